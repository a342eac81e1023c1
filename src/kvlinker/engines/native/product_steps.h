// Forms of weights, and the steps by which rows are multiplied by them: see products.cpp. Inputs are bf16 or fp32 here;
// product_bytes.h has bytes.
#pragma once

#include <type_traits>

#include "vectors.h"

constexpr int BLOCK = 64;                      // outputs; model/weights/blocks.py lays them out
constexpr int VECTORS = BLOCK / LANES;         // of a block's outputs
constexpr int STEP = BLOCK * sizeof(int32_t);  // bytes of a step
constexpr int MOST_SUMS = REGISTERS == 32 ? 24 : 12;  // vectors that are added to at once

// A header's numbers.
inline Floats header_at(const uint8_t* header, int vector) {
    return load_bf16(reinterpret_cast<const bf16*>(header) + vector * LANES);
}

// Bytes of inputs in the order of words with as many PAIRS: those of the first inputs of two pairs, then of the second ones;
// in 4 bits, pairs of every other one first.
template <int PAIRS>
Bytes in_pairs(Bytes bytes) {
    constexpr int INPUTS = 2 * PAIRS;
    Bytes order{};
    for (int i = 0; i < VECTOR; ++i) {
        const int part = i % INPUTS / 4, input = i % 4 / 2, pair = i % 2;
        order[i] = i / INPUTS * INPUTS + 2 * (part + pair * PAIRS / 2) + input;
    }
    return __builtin_shuffle(bytes, order);
}

// Forms of weights: how words become numbers or bytes; what is added to the total of an output for each group of inputs,
// by the sum of their products and the Numbers of the group's header; and what scales the total. A step has WORDS for INPUTS. Bytes are codes plus OFFSET. FETCHED_AHEAD: whether weights that
// are read once are; processors that multiply bf16 do so by themselves where little is computed (measured on Zen 4).
struct InBf16 {
    struct Numbers {};

    static constexpr int PAIRS = 1;  // of inputs in a word
    static constexpr int INPUTS = 2, WORDS = 1, HEADER = 0;
    static constexpr bool HEADED_GROUPS = false;  // else a block has one header
    static constexpr int WIDENED_FROM = MULTIPLIES_BF16 ? INT32_MAX : 96;  // rows
    static constexpr bool FETCHED_AHEAD = !MULTIPLIES_BF16;

    static Floats numbers_of(Words words, int, int input) { return input == 0 ? low_of(words) : high_of(words); }
    static Numbers numbers_at(const uint8_t*, int) { return {}; }
    static Floats added(Floats total, Floats sum, Numbers, float) { return total + sum; }
    static Floats scaled(Floats total, const uint8_t*, int) { return total; }
};

// Header: the scale of each output.
struct In8Bits {
    struct Numbers {};

    static constexpr int PAIRS = 2, INPUTS = 4, WORDS = 1, HEADER = BLOCK * sizeof(bf16);
    static constexpr bool HEADED_GROUPS = false;
    static constexpr int WIDENED_FROM = 20;
    static constexpr bool FETCHED_AHEAD = !MULTIPLIES_BF16;
    static constexpr int OFFSET = SIGNED_BYTES ? 0 : 128;
    static constexpr int32_t SIGNS = static_cast<int32_t>(0x80808080);

    static Floats numbers_of(Words words, int pair, int input) {
        return __builtin_convertvector((words ^ SIGNS) << (24 - 16 * input - 8 * pair) >> 24, Floats);
    }
    static Words bytes_of(const uint8_t* at, int) { return SIGNED_BYTES ? load<Words>(at) ^ SIGNS : load<Words>(at); }
    static Bytes ordered(Bytes bytes) { return in_pairs<PAIRS>(bytes); }
    static Numbers numbers_at(const uint8_t*, int) { return {}; }
    static Floats added(Floats total, Floats sum, Numbers, float) { return total + sum; }
    static Floats scaled(Floats total, const uint8_t* header, int vector) { return total * header_at(header, vector); }
};

// Header: the scale of each output, then what code 8 means.
struct In4Bits {
    struct Numbers {
        Floats scale, middle;
    };

    static constexpr int PAIRS = 4, INPUTS = 8, WORDS = 1, HEADER = 2 * BLOCK * sizeof(bf16);
    static constexpr bool HEADED_GROUPS = true;
    static constexpr bool FETCHED_AHEAD = true;
    static constexpr int OFFSET = 8;

    static Words bytes_of(const uint8_t* at, int part) { return load<Words>(at) >> 4 * part & 0x0f0f0f0f; }
    static Bytes ordered(Bytes bytes) { return in_pairs<PAIRS>(bytes); }
    static Numbers numbers_at(const uint8_t* header, int vector) {
        return {header_at(header, vector), header_at(header, VECTORS + vector)};
    }
    static Floats added(Floats total, Floats sum, Numbers numbers, float inputs) {
        return total + sum * numbers.scale + inputs * numbers.middle;
    }
    static Floats scaled(Floats total, const uint8_t*, int) { return total; }
};

// Inputs of all rows.
template <typename Number>
struct Inputs {
    const Number* numbers;  // [rows, stride]
    int64_t stride;

    // What a row's sum over a group begins with, what it becomes, and the sum of the group's inputs: by the number of both.
    Floats start(int64_t) const { return Floats{}; }
    Floats product(Floats sum, int64_t) const { return sum; }
    float sum(int64_t) const { return 0.0f; }
};

// Steps: each has the `Number` that inputs are, the `Sum` that it adds to, how many inputs and bytes it takes, and `add`, which adds
// to the sums what the vectors of weights from `at` on make of each row's inputs.

// Weights that are pairs of bf16. Six rows have 24 sums, which leaves eight registers: weights are all loaded, and a row's
// pair is used up before the next is read.
struct PairsStep {
    using Number = bf16;
    using Sum = Floats;
    static constexpr int INPUTS = 2, BYTES = STEP, SUMS = MOST_SUMS;

    template <int ROWS, int PANEL>
    [[gnu::always_inline]] static void add(Floats (&sums)[ROWS][PANEL], const uint8_t* at, const bf16* inputs,
                                           int64_t stride) {
        Words weights[PANEL];
#pragma GCC unroll 16
        for (int v = 0; v < PANEL; ++v) weights[v] = load<Words>(at + v * VECTOR);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Words pair = broadcast_pair(inputs + row * stride);
#pragma GCC unroll 16
            for (int v = 0; v < PANEL; ++v) sums[row][v] = add_dot(sums[row][v], weights[v], pair);
        }
    }
};

// Weights that are fp32.
struct FloatsStep {
    using Number = float;
    using Sum = Floats;
    static constexpr int INPUTS = 1, BYTES = STEP, SUMS = MOST_SUMS;

    template <int ROWS, int PANEL>
    [[gnu::always_inline]] static void add(Floats (&sums)[ROWS][PANEL], const uint8_t* at, const float* inputs,
                                           int64_t stride) {
        Floats weights[PANEL];
#pragma GCC unroll 16
        for (int v = 0; v < PANEL; ++v) weights[v] = load<Floats>(at + v * VECTOR);
        add<ROWS, PANEL>(sums, weights, inputs, stride);
    }

    template <int ROWS, int PANEL>
    [[gnu::always_inline]] static void add(Floats (&sums)[ROWS][PANEL], const Floats (&weights)[PANEL],
                                           const float* inputs, int64_t stride) {
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Floats input = floats(inputs[row * stride]);
#pragma GCC unroll 16
            for (int v = 0; v < PANEL; ++v) sums[row][v] += weights[v] * input;
        }
    }
};

// Weights in any form, widened to fp32 in registers.
template <typename Form>
struct WideningStep {
    using Number = float;
    using Sum = Floats;
    static constexpr int INPUTS = Form::INPUTS, BYTES = STEP, SUMS = MOST_SUMS;

    template <int ROWS, int PANEL>
    [[gnu::always_inline]] static void add(Floats (&sums)[ROWS][PANEL], const uint8_t* at, const float* inputs,
                                           int64_t stride) {
#pragma GCC unroll 8
        for (int i = 0; i < INPUTS; ++i) {
            Floats weights[PANEL];
#pragma GCC unroll 16
            for (int v = 0; v < PANEL; ++v) weights[v] = Form::numbers_of(load<Words>(at + v * VECTOR), i / 2, i % 2);
            FloatsStep::add<ROWS, PANEL>(sums, weights, inputs + i, stride);
        }
    }
};

#if defined(__AVX512BF16__)

// Codes of 8 bits, made bf16 by looking up four bits of each half of a word at a time, in registers, one vector after the
// other: the barrier keeps the compiler from holding the pairs of all rows meanwhile.
struct LookingUpStep {
    using Number = bf16;
    using Sum = Floats;
    static constexpr int INPUTS = In8Bits::INPUTS, BYTES = STEP, SUMS = MOST_SUMS;

    template <int ROWS, int PANEL>
    [[gnu::always_inline]] static void add(Floats (&sums)[ROWS][PANEL], const uint8_t* at, const bf16* inputs,
                                           int64_t stride) {
        static constexpr float LOW[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        static constexpr float HIGH[16] = {-128, -112, -96, -80, -64, -48, -32, -16, 0, 16, 32, 48, 64, 80, 96, 112};
#pragma GCC unroll 4
        for (int v = 0; v < PANEL; ++v) {
            const Words words = load<Words>(at + v * VECTOR);
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) {
                const auto table = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(part % 2 == 0 ? LOW : HIGH));
                const __m512i shifted = _mm512_srli_epi16((__m512i)words, 4 * part);  // other bits are ignored
                const auto pairs = (Words)_mm512_permutexvar_epi16(shifted, _mm512_broadcast_i64x4(table));
                const bf16* its = inputs + part / 2 * 2;
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; ++row)
                    sums[row][v] = add_dot(sums[row][v], pairs, broadcast_pair(its + row * stride));
            }
            asm volatile("" ::: "memory");
        }
    }
};

template <typename Form>
using StepOf = std::conditional_t<std::is_same_v<Form, InBf16>, PairsStep, LookingUpStep>;

#else

template <typename Form>
using StepOf =
    std::conditional_t<MULTIPLIES_BF16 && std::is_same_v<Form, InBf16>, PairsStep, WideningStep<Form>>;

#endif

using WideStep = std::conditional_t<MULTIPLIES_BF16, PairsStep, FloatsStep>;  // of blocks that were widened

// What is left to be done with sums of products with such a block: fp32 has been scaled.
template <typename Form>
using WideForm = std::conditional_t<MULTIPLIES_BF16, Form, InBf16>;
