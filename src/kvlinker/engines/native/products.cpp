// Rows times a matrix of weights in bf16, 8 or 4 bits, in the forms that kvlinker makes itself.
//
// A word has 16 bits for each input of a pair, the first one's low: in bf16 its weight, so that a block is what oneDNN makes
// of it; in 8 bits the codes of that input of two pairs, in 4 bits those of four, the first pair's lowest.
#include "block_products.h"

extern "C" {

void kvlinker_multiply_bf16(const Product* product) { multiply<InBf16>(*product); }

void kvlinker_multiply_int8(const Product* product) { multiply<In8Bits>(*product); }

void kvlinker_multiply_int8_int8(const Product* product) { multiply_bytes<In8Bits>(*product); }

void kvlinker_multiply_int4(const Product* product) { multiply_bytes<In4Bits>(*product); }
}
