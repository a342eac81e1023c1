// Arithmetic on vectors of 16 numbers, and the micro-kernels' helpers.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "call.h"

constexpr int LANES = 16;  // numbers in a vector
constexpr float LOG2E = 1.44269504f;

inline int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

struct Free {
    void operator()(void* allocated) const { std::free(allocated); }
};

// Uninitialised memory for whole vectors.
template <typename T>
std::unique_ptr<T, Free> allocate(int64_t count) {
    const int64_t bytes = round_up(count * sizeof(T), sizeof(__m512i));
    return std::unique_ptr<T, Free>(static_cast<T*>(std::aligned_alloc(sizeof(__m512i), bytes)));
}

// 2^x with a relative error of 3e-6; 0 below -200. NaN stays NaN.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 power = _mm512_set1_ps(0.0135341678f);
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0.0520114638f));
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0.241442755f));
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0.693003833f));
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(1.0000026f));
    return _mm512_scalef_ps(power, x);  // times 2^floor(x)
}

// 1 - 2 / (e^2x + 1)
inline __m512 tanh(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 power = exp2(_mm512_mul_ps(x, _mm512_set1_ps(2 * LOG2E)));
    return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one)));
}

// 16-bit indices that take from two halves in turn: first, first + distance, first + 1, first + 1 + distance, ...
inline __m512i alternating(int first, int distance) {
    const __m512i counted = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i both = _mm512_mullo_epi32(counted, _mm512_set1_epi32(0x10001));
    return _mm512_add_epi32(both, _mm512_set1_epi32(first * 0x10001 + distance * 0x10000));
}

inline __m512bh broadcast_pair(const bf16* two) {
    int32_t bits;
    std::memcpy(&bits, two, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(bits);
}

// 16 numbers of 16 bits from `from` on, or as many as `lanes` has bits.
inline __m512 load_bf16(const bf16* from, __mmask16 lanes) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from)), 16));
}

inline void store_bf16(bf16* to, __mmask16 lanes, __m512 rounded) {
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(rounded));
}

// A mask of the first `count` lanes.
inline __mmask16 lanes_below(int64_t count) {
    return static_cast<__mmask16>((uint32_t{1} << std::clamp<int64_t>(count, 0, LANES)) - 1);
}

// 32 numbers of 16 bits from `from` on, or as many as there are; zeros behind.
inline __m512i load_row(const bf16* from, int64_t count) {
    if (count >= 2 * LANES) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi16((__mmask32{1} << std::max<int64_t>(count, 0)) - 1, from);
}

// The sum of each of 16 vectors.
inline __m512 sums_of(const __m512 (&vectors)[LANES]) {
    __m512 quarters[4];  // of four vectors each, a sum per quarter
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512 *four = vectors + 4 * i;
        const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(four[0], four[1]), _mm512_unpackhi_ps(four[0], four[1]));
        const __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(four[2], four[3]), _mm512_unpackhi_ps(four[2], four[3]));
        const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(first), _mm512_castps_pd(second));
        const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(first), _mm512_castps_pd(second));
        quarters[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    }
    const auto join = [](__m512 one, __m512 other) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(one, other, 0x88), _mm512_shuffle_f32x4(one, other, 0xdd));
    };
    return join(join(quarters[0], quarters[1]), join(quarters[2], quarters[3]));
}

// Makes the rows of 16 times 16 numbers of 32 bits its columns.
inline void transpose(__m512i (&rows)[LANES]) {
    __m512i pairs[LANES], fours[LANES];
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)  // quarter q of fours[i + c] is column 4q + c of four rows from i on
        for (int c = 0; c < 2; ++c) {
            fours[i + 2 * c] = _mm512_unpacklo_epi64(pairs[i + c], pairs[i + c + 2]);
            fours[i + 2 * c + 1] = _mm512_unpackhi_epi64(pairs[i + c], pairs[i + c + 2]);
        }
    for (int c = 0; c < 4; ++c) {
        const __m512i even = _mm512_shuffle_i32x4(fours[c], fours[c + 4], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(fours[c], fours[c + 4], 0xdd);
        const __m512i later_even = _mm512_shuffle_i32x4(fours[c + 8], fours[c + 12], 0x88);
        const __m512i later_odd = _mm512_shuffle_i32x4(fours[c + 8], fours[c + 12], 0xdd);
        rows[c] = _mm512_shuffle_i32x4(even, later_even, 0x88);
        rows[c + 4] = _mm512_shuffle_i32x4(odd, later_odd, 0x88);
        rows[c + 8] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
        rows[c + 12] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
    }
}
