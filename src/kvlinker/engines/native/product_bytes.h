// Inputs that are rounded to bytes, each group of a row by a scale of its own, and the step that multiplies them and codes
// of weights exactly, as integers.
#pragma once

#include "product_steps.h"

constexpr int MOST_BYTE = 127;

template <>
struct Inputs<int8_t> {
    const int8_t* numbers;  // [rows, stride], in the order of Form's bytes
    int64_t stride;
    const float* scales;    // each [rows, groups]: of a byte
    const float* sums;      // of the inputs
    const int32_t* starts;  // minus OFFSET for each byte

    Words start(int64_t index) const { return words(starts[index]); }
    Floats product(Words sum, int64_t index) const { return __builtin_convertvector(sum, Floats) * scales[index]; }
    float sum(int64_t index) const { return sums[index]; }
};

template <typename Form>
struct BytesStep {
    using Number = int8_t;
    using Sum = Words;
    static constexpr int INPUTS = Form::INPUTS, BYTES = Form::WORDS * STEP;
    static constexpr int SUMS = SUMS_IN_16_BITS ? 8 : MOST_SUMS;  // which leaves registers for what they are made of
    static constexpr int MOST = Form::OFFSET ? 2 * Form::OFFSET - 1 : MOST_BYTE;
    static constexpr int TOGETHER = std::min(INPUTS / 4, WORDS_TOGETHER<MOST>);

    template <int ROWS, int PANEL>
    [[gnu::always_inline]] static void add(Words (&sums)[ROWS][PANEL], const uint8_t* at, const int8_t* inputs,
                                           int64_t stride) {
#pragma GCC unroll 8
        for (int part = 0; part < INPUTS / 4; part += TOGETHER) {
            Words bytes[PANEL][TOGETHER];
#pragma GCC unroll 16
            for (int v = 0; v < PANEL; ++v)
#pragma GCC unroll 8
                for (int i = 0; i < TOGETHER; ++i) bytes[v][i] = Form::bytes_of(at + v * VECTOR, part + i);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                Words others[TOGETHER];
#pragma GCC unroll 8
                for (int i = 0; i < TOGETHER; ++i) others[i] = broadcast_word(inputs + (part + i) * 4 + row * stride);
#pragma GCC unroll 16
                for (int v = 0; v < PANEL; ++v) sums[row][v] = add_dots<MOST>(sums[row][v], bytes[v], others);
            }
            if (ROWS > 1) asm volatile("" ::: "memory");  // words are read again, not kept
        }
    }
};

// Memory for the inputs of a product as bytes.
struct RoundedInputs {
    std::unique_ptr<int8_t, Free> numbers;
    std::unique_ptr<float, Free> scales, sums;
    std::unique_ptr<int32_t, Free> starts;
    int64_t width, stride, groups, group;

    // The last group may be smaller than the others.
    RoundedInputs(int64_t rows, int64_t width, int64_t group)
        : width(width), stride(round_up(width, VECTOR)), groups(round_up(width, group) / group), group(group) {
        numbers = allocate<int8_t>(rows * stride);
        scales = allocate<float>(rows * groups);
        sums = allocate<float>(rows * groups);
        starts = allocate<int32_t>(rows * groups);
    }

    Inputs<int8_t> inputs() const { return {numbers.get(), stride, scales.get(), sums.get(), starts.get()}; }

    // Rounds the inputs of a row. Of a group with a number that is not finite, the scale is NaN.
    template <typename Form>
    void round(const bf16* inputs, int64_t row) {
        int8_t* to = numbers.get() + row * stride;
        for (int64_t index = row * groups, first = 0; first < width; ++index, first += group)
            round<Form>(inputs + first, std::min(group, width - first), to + first, index);
        for (int64_t at = 0; at < stride; at += VECTOR) store(to + at, Form::ordered(load<Bytes>(to + at)));
    }

private:
    template <typename Form>
    void round(const bf16* from, int64_t count, int8_t* to, int64_t index) {
        constexpr float ROUNDS = 12582912.0f;  // 1.5 * 2^23: what is added to it becomes whole, the nearest
        constexpr float LEAST = 1e-30f;        // what is less counts as zero
        Floats largest{}, sum{};
        for (int64_t at = 0; at < count; at += LANES) {
            const Floats numbers = load_bf16(from + at, count - at);
            largest = larger(largest, (Floats)((Words)numbers & 0x7fffffff));
            sum += numbers;
        }
        const float most = largest_of(largest), factor = most > LEAST ? MOST_BYTE / most : 0.0f;
        sums.get()[index] = sum_of(sum);
        scales.get()[index] = most / MOST_BYTE + 0.0f * sums.get()[index];
        Words total{};
        for (int64_t at = 0; at < count; at += LANES) {
            const Floats numbers = load_bf16(from + at, count - at);
            const Words bytes = (Words)(numbers * factor + ROUNDS) - (Words)floats(ROUNDS);
            total += bytes;
            store_some(to + at, __builtin_convertvector(bytes, VectorOf<int8_t, LANES>::type), count - at);
        }
        starts.get()[index] = -Form::OFFSET * sum_of(total);
    }
};
