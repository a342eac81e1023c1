// Rows times a matrix of weights in the codes of GGUF files, in groups of inputs that share a scale, in fp16, and in some
// forms what is added to all of them.
//
// A byte of a word belongs to an input, four inputs to a word: in 8 bits its code, in fewer its lower four bits, and in the
// byte's upper half those of the input four further on. Words of a step with the codes' upper bits follow: of each byte the
// lowest ones belong to the step's first four inputs, those above to the next four, and so on.
#include "block_products.h"

namespace {

inline Floats load_f16(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16(load<float16x4_t>(from));
#else
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#endif
}

// What all forms have in common: bytes of inputs stay in order, and a group's header has scales and, with MINIMA, what is
// added to each of its weights. Sums are of codes less BYTE_OFFSET, for which the minima make up.
template <bool MINIMA, int BYTE_OFFSET>
struct InGroups {
    static constexpr int HEADER = (MINIMA ? 2 : 1) * BLOCK * sizeof(uint16_t);
    static constexpr bool HEADED_GROUPS = true;
    static constexpr bool FETCHED_AHEAD = true;
    static constexpr int OFFSET = BYTE_OFFSET;

    struct Numbers {
        Floats scale, least;
    };

    static Bytes ordered(Bytes bytes) { return bytes; }
    static Numbers numbers_at(const uint8_t* header, int vector) {
        const Floats scale = load_f16(header + vector * VECTOR / 2);
        if (!MINIMA) return {scale, Floats{}};
        return {scale, load_f16(header + (VECTORS + vector) * VECTOR / 2) + static_cast<float>(OFFSET) * scale};
    }
    static Floats added(Floats total, Floats sum, Numbers numbers, float inputs) {
        total += sum * numbers.scale;
        return MINIMA ? total + inputs * numbers.least : total;
    }
    static Floats scaled(Floats total, const uint8_t*, int) { return total; }
};

// Codes of four bits, and of HIGH more.
template <int HIGH, bool MINIMA>
struct Grouped : InGroups<MINIMA, 8 << HIGH> {
    static constexpr int INPUTS = HIGH ? 32 / HIGH : 8, LOW_WORDS = INPUTS / 8, WORDS = LOW_WORDS + (HIGH ? 1 : 0);

    static Words bytes_of(const uint8_t* at, int part) {
        const Words low = load<Words>(at + part / 2 * STEP) >> part % 2 * 4 & 0x0f0f0f0f;
        if (!HIGH) return low;
        const Words high = load<Words>(at + LOW_WORDS * STEP);
        const int shift = HIGH * part - 4;  // so that they are above the lower four
        return low | ((shift < 0 ? high << -shift : high >> shift) & ((1 << HIGH) - 1) * 0x10101010);
    }
};

struct GroupedBytes : InGroups<false, In8Bits::OFFSET> {
    static constexpr int INPUTS = 4, WORDS = 1;

    static Words bytes_of(const uint8_t* at, int part) { return In8Bits::bytes_of(at, part); }
};

// Some rows of a weight, which are its outputs, as numbers; model/weights/native_products.py has the same.
struct WeightRows {
    const int64_t* chosen;  // [rows]
    int64_t rows, width;
    const uint8_t* weights;
    int64_t group;
    bf16* output;  // [rows, width]
    int64_t threads;
};

inline float f16_at(const uint8_t* header, int64_t index) {
    uint16_t number;
    std::memcpy(&number, header + index * sizeof number, sizeof number);
    const uint32_t bits = static_cast<uint32_t>(number & 0x7fff) << 13;
    float size;
    std::memcpy(&size, &bits, sizeof size);
    size *= 0x1p112f;  // the exponent's bias is 112 less
    return number & 0x8000 ? -size : size;
}

inline int32_t word_at(const uint8_t* at) {
    int32_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// Where the codes of BITS bits of a step's INPUTS inputs are: IN_WORD of them in each of an output's WORDS words, of which
// the last one has the upper bits, HIGH of each.
template <int BITS>
struct CodeWords {
    static constexpr int HIGH = BITS == 8 ? 0 : BITS - 4, INPUTS = BITS == 8 ? 4 : HIGH ? 32 / HIGH : 8;
    static constexpr int IN_WORD = BITS == 8 ? 4 : 8, WORDS = INPUTS / IN_WORD + (HIGH ? 1 : 0);
};

// The codes of inputs [first, first + LANES) of BITS bits each, whose output's words begin at `at`; `first` is a multiple
// of LANES.
template <int BITS>
inline Words codes_at(const uint8_t* at, int64_t first) {
    constexpr int HIGH = CodeWords<BITS>::HIGH, INPUTS = CodeWords<BITS>::INPUTS;
    constexpr int IN_WORD = CodeWords<BITS>::IN_WORD, WORDS = CodeWords<BITS>::WORDS;
    Words words, shifts, high_shifts;
#pragma GCC unroll 4
    for (int lane = 0; lane < LANES; lane += IN_WORD < LANES ? IN_WORD : LANES) {
        const int64_t input = first + lane;
        const int32_t word = word_at(at + (input / INPUTS * WORDS + input % INPUTS / IN_WORD) * STEP);
#pragma GCC unroll 8
        for (int next = lane; next < lane + IN_WORD && next < LANES; ++next) words[next] = word;
    }
#pragma GCC unroll 16
    for (int lane = 0; lane < LANES; ++lane) {
        const int group = static_cast<int>((first + lane) % INPUTS) / 4;
        shifts[lane] = lane % 4 * 8 + (BITS == 8 ? 0 : group % 2 * 4);
        high_shifts[lane] = lane % 4 * 8 + HIGH * group;
    }
    const Words low = words >> shifts & (BITS == 8 ? 255 : 15);
    if (!HIGH) return low;
    const int32_t high = word_at(at + (first / INPUTS * WORDS + WORDS - 1) * STEP);
    return low | ((high + Words{}) >> high_shifts & ((1 << HIGH) - 1)) << 4;
}

// The codes of one input of LANES outputs, whose words begin at `at`.
template <int BITS>
inline Words codes_of(const uint8_t* at, int64_t input) {
    constexpr int HIGH = CodeWords<BITS>::HIGH, INPUTS = CodeWords<BITS>::INPUTS;
    constexpr int IN_WORD = CodeWords<BITS>::IN_WORD, WORDS = CodeWords<BITS>::WORDS;
    const uint8_t* step = at + input / INPUTS * WORDS * STEP;
    const int byte = static_cast<int>(input % 4) * 8, group = static_cast<int>(input % INPUTS) / 4;
    const Words word = load<Words>(step + input % INPUTS / IN_WORD * STEP);
    if constexpr (BITS == 8) return word >> byte & 255;
    const Words low = word >> (byte + group % 2 * 4) & 15;
    if (!HIGH) return low;
    const Words high = load<Words>(step + (WORDS - 1) * STEP) >> (byte + HIGH * group) & ((1 << HIGH) - 1);
    return low | high << 4;
}

template <int BITS, bool MINIMA>
struct GroupedRows {
    static constexpr int64_t HEADER = (MINIMA ? 2 : 1) * BLOCK * sizeof(uint16_t), MIDDLE = MINIMA ? 0 : 1 << (BITS - 1);

    const WeightRows& rows;
    const int64_t stride = HEADER + rows.group * BLOCK * BITS / 8, groups = rows.width / rows.group;

    const uint8_t* block_of(int64_t row) const { return rows.weights + rows.chosen[row] / BLOCK * groups * stride; }

    bool is_block(int64_t row) const {
        if (rows.chosen[row] % BLOCK || rows.rows - row < BLOCK) return false;
        for (int64_t next = 1; next < BLOCK; ++next)
            if (rows.chosen[row + next] != rows.chosen[row] + next) return false;
        return true;
    }

    static Floats number(Words codes, Floats scale, Floats least) {
        return scale * __builtin_convertvector(codes - static_cast<int32_t>(MIDDLE), Floats) + least;
    }

    void copy_row(int64_t row) const {
        const int64_t lane = rows.chosen[row] % BLOCK;
        const uint8_t* header = block_of(row);
        bf16* to = rows.output + row * rows.width;
        for (int64_t group = 0; group < groups; ++group, header += stride) {
            const Floats scale = Floats{} + f16_at(header, lane);
            const Floats least = Floats{} + (MINIMA ? f16_at(header, BLOCK + lane) : 0.0f);
            const uint8_t* words = header + HEADER + lane * sizeof(int32_t);
            for (int64_t first = 0; first < rows.group; first += LANES, to += LANES)
                store_bf16(to, number(codes_at<BITS>(words, first), scale, least));
        }
    }

    // All rows of a block, in squares of outputs and inputs: each word is read once for all of its inputs.
    void copy_block(int64_t row) const {
        const uint8_t* header = block_of(row);
        bf16* to = rows.output + row * rows.width;
        for (int64_t group = 0; group < groups; ++group, header += stride, to += rows.group)
            for (int vector = 0; vector < VECTORS; ++vector) {
                const Floats scale = load_f16(header + vector * VECTOR / 2);
                const Floats least = MINIMA ? load_f16(header + (VECTORS + vector) * VECTOR / 2) : Floats{};
                const uint8_t* words = header + HEADER + vector * VECTOR;
                for (int64_t first = 0; first < rows.group; first += LANES) {
                    Words square[LANES];
                    for (int input = 0; input < LANES; ++input)
                        square[input] = (Words)number(codes_of<BITS>(words, first + input), scale, least);
                    transpose(square);
                    for (int output = 0; output < LANES; ++output)
                        store_bf16(to + (vector * LANES + output) * rows.width + first, (Floats)square[output]);
                }
            }
    }
};

template <int BITS, bool MINIMA>
void copy_rows(const WeightRows& rows) {
    const GroupedRows<BITS, MINIMA> copy{rows};
    const int64_t before = rows.rows ? rows.chosen[0] % BLOCK : 0;  // neighbouring rows may begin within a block
#pragma omp parallel for num_threads(static_cast<int>(rows.threads)) if (rows.threads > 1 && rows.rows > BLOCK)
    for (int64_t begin = -before; begin < rows.rows; begin += BLOCK)
        if (begin >= 0 && copy.is_block(begin))
            copy.copy_block(begin);
        else
            for (int64_t row = std::max<int64_t>(begin, 0); row < std::min<int64_t>(begin + BLOCK, rows.rows); ++row)
                copy.copy_row(row);
}

}  // namespace

extern "C" {

void kvlinker_multiply_grouped4(const Product* product) { multiply_bytes<Grouped<0, false>>(*product); }

void kvlinker_multiply_grouped4_min(const Product* product) { multiply_bytes<Grouped<0, true>>(*product); }

void kvlinker_multiply_grouped5(const Product* product) { multiply_bytes<Grouped<1, false>>(*product); }

void kvlinker_multiply_grouped5_min(const Product* product) { multiply_bytes<Grouped<1, true>>(*product); }

void kvlinker_multiply_grouped6(const Product* product) { multiply_bytes<Grouped<2, false>>(*product); }

void kvlinker_multiply_grouped8(const Product* product) { multiply_bytes<GroupedBytes>(*product); }

void kvlinker_rows_grouped4(const WeightRows* rows) { copy_rows<4, false>(*rows); }

void kvlinker_rows_grouped4_min(const WeightRows* rows) { copy_rows<4, true>(*rows); }

void kvlinker_rows_grouped5(const WeightRows* rows) { copy_rows<5, false>(*rows); }

void kvlinker_rows_grouped5_min(const WeightRows* rows) { copy_rows<5, true>(*rows); }

void kvlinker_rows_grouped6(const WeightRows* rows) { copy_rows<6, false>(*rows); }

void kvlinker_rows_grouped8(const WeightRows* rows) { copy_rows<8, false>(*rows); }
}
