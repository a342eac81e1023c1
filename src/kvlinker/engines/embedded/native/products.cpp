// Rows times a matrix of weights in bf16, 8 or 4 bits. With few rows, reading the weights is most of the work.
//
// Outputs lie in blocks of 64. A block is a sequence of groups of inputs; a group has a header and then, for every few
// pairs of inputs, four vectors, each with the weights of 16 outputs. Word 2i + j of a vector has 16 bits and belongs to
// output i: in bf16 it is the weight of input j of a pair, so that a block is what oneDNN makes of it. In 8 bits it has the
// codes of input j of two pairs, in 4 bits those of four, the first one lowest.
#include "vectors.h"

namespace {

constexpr int BLOCK = 64;  // outputs; model/weights/blocks.py lays them out
constexpr int VECTORS = BLOCK / LANES;
constexpr int ROWS_TOGETHER = 6;
constexpr int FETCHES_AHEAD_FROM = 4 * ROWS_TOGETHER;  // rows

struct Product {
    const bf16* inputs;  // [rows, width]
    int64_t rows, width;
    const uint8_t* weights;
    int64_t outputs, group;  // of inputs; the whole width but in 4 bits
    const bf16* bias;        // [outputs], or null
    bf16* output;            // [rows, outputs]
    int64_t threads;

    int64_t groups() const { return width / group; }
};

// 16 numbers of a group's header.
__m512 header_at(const uint8_t* header, int vector) {
    return load_bf16(reinterpret_cast<const bf16*>(header) + vector * LANES, 0xffff);
}

// 32 numbers by the lowest 4 bits of each word; a fifth bit is ignored.
__m512bh looked_up(const float (&values)[16], __m512i words) {
    const __m256i table = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(values));
    return (__m512bh)_mm512_permutexvar_epi16(words, _mm512_broadcast_i64x4(table));
}

struct InBf16 {
    static constexpr int PAIRS = 1;  // of inputs in a vector
    static constexpr int PARTS = 1;  // whose products with the inputs add up
    static constexpr int HEADER = 0;
    static constexpr bool FETCHES_AHEAD = true;

    static __m512 scaled(__m512, __m512 sum, const uint8_t*, int, float) { return sum; }
};

// Header: the scale of each output.
struct In8Bits {
    static constexpr int PAIRS = 2, PARTS = 4, HEADER = BLOCK * sizeof(bf16);
    static constexpr int WIDENED_FROM = 20;  // rows: a block's codes are made bf16 once for all of them
    static constexpr bool FETCHES_AHEAD = false;

    static int pair_of(int part) { return part / 2; }
    static __m512bh part_of(__m512i words, int part) {
        constexpr float LOW[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        constexpr float HIGH[16] = {0, 16, 32, 48, 64, 80, 96, 112, -128, -112, -96, -80, -64, -48, -32, -16};
        return looked_up(part % 2 == 0 ? LOW : HIGH, _mm512_srli_epi16(words, 4 * part));
    }
    static __m512i widened(__m512i words, int pair) {
        const __m512i codes = _mm512_srai_epi16(pair == 0 ? _mm512_slli_epi16(words, 8) : words, 8);
        const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(codes, 16), 16));
        const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(codes, 16));
        return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
    }
    static __m512 scaled(__m512, __m512 sum, const uint8_t* header, int vector, float) {
        return _mm512_mul_ps(sum, header_at(header, vector));
    }
};

// Header: the scale of each output, then what code 8 means.
struct In4Bits {
    static constexpr int PAIRS = 4, PARTS = 4, HEADER = 2 * BLOCK * sizeof(bf16);
    static constexpr int WIDENED_FROM = 48;  // rows
    static constexpr bool FETCHES_AHEAD = false;

    static int pair_of(int part) { return part; }
    static __m512bh part_of(__m512i words, int part) {
        constexpr float CODES[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        return looked_up(CODES, _mm512_srli_epi16(words, 4 * part));
    }
    static __m512i widened(__m512i words, int pair) { return (__m512i)part_of(words, pair); }
    static __m512 scaled(__m512 total, __m512 sum, const uint8_t* header, int vector, float inputs) {
        total = _mm512_fmadd_ps(sum, header_at(header, vector), total);
        return _mm512_fmadd_ps(_mm512_set1_ps(inputs), header_at(header, VECTORS + vector), total);
    }
};

// Codes that have been widened already.
template <typename Codes>
struct Widened : InBf16 {
    static constexpr bool FETCHES_AHEAD = false;

    static __m512 scaled(__m512 total, __m512 sum, const uint8_t* header, int vector, float inputs) {
        return Codes::scaled(total, sum, header, vector, inputs);
    }
};

// A block's weights; strides are in bytes, from group to group.
struct OutputBlock {
    int64_t first;  // output
    const uint8_t *weights, *headers;
    int64_t weight_stride, header_stride;
};

template <typename Weights>
int64_t weight_bytes(int64_t group) {
    return group / (2 * Weights::PAIRS) * VECTORS * sizeof(__m512i);
}

// Adds to the sums what the vectors of weights at `at` make of each row's inputs. Six rows have 24 sums, which leaves eight
// registers: weights that are ready are all loaded, and a row's pair is used up before the next is read; of codes one
// vector is taken after the other, and the barrier keeps the compiler from holding the pairs of all rows meanwhile.
template <typename Weights, int ROWS>
[[gnu::always_inline]] inline void add_products(__m512 (&sums)[ROWS][VECTORS], const uint8_t* at, const bf16* inputs,
                                                int64_t width) {
    if constexpr (Weights::PARTS == 1) {
        __m512bh weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) weights[v] = (__m512bh)_mm512_loadu_si512(at + v * sizeof(__m512i));
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const __m512bh pair = broadcast_pair(inputs + row * width);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], weights[v], pair);
        }
    } else {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            const __m512i words = _mm512_loadu_si512(at + v * sizeof(__m512i));
#pragma GCC unroll 4
            for (int part = 0; part < Weights::PARTS; ++part) {
                const __m512bh weights = Weights::part_of(words, part);
                const bf16* pairs = inputs + 2 * Weights::pair_of(part);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; ++row)
                    sums[row][v] = _mm512_dpbf16_ps(sums[row][v], weights, broadcast_pair(pairs + row * width));
            }
            asm volatile("" ::: "memory");
        }
    }
}

// Computes a block's outputs of ROWS rows. input_sums: [rows, groups], or null where they do not matter. The line that is
// so many bytes ahead of each step's weights is fetched meanwhile.
template <typename Weights, int ROWS>
void multiply(const Product& product, const OutputBlock& block, int64_t first_row, const float* input_sums,
              int64_t ahead) {
    const bf16* inputs = product.inputs + first_row * product.width;
    const int64_t groups = product.groups();
    __m512 totals[ROWS][VECTORS] = {};
    for (int64_t group = 0; group < groups; ++group) {
        const uint8_t* at = block.weights + group * block.weight_stride;
        const uint8_t* header = block.headers + group * block.header_stride;
        __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = _mm512_setzero_ps();
        for (int64_t step = 0; step < product.group / (2 * Weights::PAIRS); ++step) {
            _mm_prefetch(at + ahead, _MM_HINT_T1);
            add_products<Weights, ROWS>(sums, at, inputs, product.width);
            at += VECTORS * sizeof(__m512i);
            inputs += 2 * Weights::PAIRS;
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
                totals[row][v] = Weights::scaled(totals[row][v], sums[row][v], header, v,
                                                 input_sums ? input_sums[row * groups + group] : 0.0f);
    }
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t output = block.first + v * LANES;
        const __mmask16 lanes = lanes_below(product.outputs - output);
        const __m512 bias = product.bias ? load_bf16(product.bias + output, lanes) : _mm512_setzero_ps();
        for (int row = 0; row < ROWS; ++row)
            store_bf16(product.output + (first_row + row) * product.outputs + output, lanes,
                       _mm512_add_ps(totals[row][v], bias));
    }
}

// The rows of a pass over a block's weights find these in the cache, but for those of the first pass. So the passes behind
// it, where there are enough of them, fetch the next block: each a quarter of its lines.
template <typename Weights>
int64_t bytes_ahead(const Product& product, const OutputBlock& block, int64_t pass) {
    if (!Weights::FETCHES_AHEAD || product.rows < FETCHES_AHEAD_FROM || pass < 1 || pass > VECTORS) return 0;
    return product.groups() * block.weight_stride + (pass - 1) * sizeof(__m512i);
}

template <typename Weights>
void multiply(const Product& product, const OutputBlock& block, const float* input_sums) {
    for (int64_t row = 0; row < product.rows; row += ROWS_TOGETHER) {
        const float* sums = input_sums ? input_sums + row * product.groups() : nullptr;
        const int64_t ahead = bytes_ahead<Weights>(product, block, row / ROWS_TOGETHER);
        switch (product.rows - row) {
            case 1: multiply<Weights, 1>(product, block, row, sums, ahead); break;
            case 2: multiply<Weights, 2>(product, block, row, sums, ahead); break;
            case 3: multiply<Weights, 3>(product, block, row, sums, ahead); break;
            case 4: multiply<Weights, 4>(product, block, row, sums, ahead); break;
            case 5: multiply<Weights, 5>(product, block, row, sums, ahead); break;
            default: multiply<Weights, ROWS_TOGETHER>(product, block, row, sums, ahead);
        }
    }
}

// Writes the block's codes to `widened`, in bf16, and returns the block that these are.
template <typename Codes>
OutputBlock widen(const Product& product, const OutputBlock& block, uint8_t* widened) {
    OutputBlock wide = block;
    wide.weights = widened;
    wide.weight_stride = weight_bytes<InBf16>(product.group);
    for (int64_t group = 0; group < product.groups(); ++group) {
        const uint8_t* at = block.weights + group * block.weight_stride;
        for (int64_t step = 0; step < product.group / (2 * Codes::PAIRS); ++step, at += VECTORS * sizeof(__m512i))
#pragma GCC unroll 4
            for (int pair = 0; pair < Codes::PAIRS; ++pair)
                for (int v = 0; v < VECTORS; ++v, widened += sizeof(__m512i))
                    _mm512_storeu_si512(widened, Codes::widened(_mm512_loadu_si512(at + v * sizeof(__m512i)), pair));
    }
    return wide;
}

template <typename Weights>
OutputBlock block_at(const Product& product, int64_t index) {
    const int64_t stride = Weights::HEADER + weight_bytes<Weights>(product.group);
    const uint8_t* headers = product.weights + index * product.groups() * stride;
    return {index * BLOCK, headers + Weights::HEADER, headers, stride, stride};
}

int64_t block_count(const Product& product) { return round_up(product.outputs, BLOCK) / BLOCK; }

template <typename Codes>
void multiply_codes(const Product& product, const float* input_sums) {
    const bool widens = product.rows >= Codes::WIDENED_FROM;
#pragma omp parallel num_threads(static_cast<int>(product.threads))
    {
        const auto widened = allocate<uint8_t>(widens ? BLOCK * product.width * sizeof(bf16) : 1);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < block_count(product); ++index) {
            const OutputBlock block = block_at<Codes>(product, index);
            if (widens)
                multiply<Widened<Codes>>(product, widen<Codes>(product, block, widened.get()), input_sums);
            else
                multiply<Codes>(product, block, input_sums);
        }
    }
}

// The sum of each group of each row's inputs: [rows, groups].
std::unique_ptr<float, Free> sums_of_inputs(const Product& product) {
    auto sums = allocate<float>(product.rows * product.groups());
    for (int64_t i = 0; i < product.rows * product.groups(); ++i) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t input = 0; input < product.group; input += LANES)
            sum = _mm512_add_ps(sum, load_bf16(product.inputs + i * product.group + input, 0xffff));
        sums.get()[i] = _mm512_reduce_add_ps(sum);
    }
    return sums;
}

}  // namespace

extern "C" {

void kvlinker_multiply_bf16(const Product* product) {
#pragma omp parallel for num_threads(static_cast<int>(product->threads)) schedule(static)
    for (int64_t index = 0; index < block_count(*product); ++index)
        multiply<InBf16>(*product, block_at<InBf16>(*product, index), nullptr);
}

void kvlinker_multiply_int8(const Product* product) { multiply_codes<In8Bits>(*product, nullptr); }

// The group is a multiple of 16.
void kvlinker_multiply_int4(const Product* product) {
    multiply_codes<In4Bits>(*product, sums_of_inputs(*product).get());
}
}
