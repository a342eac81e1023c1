// What attention's tiles multiply: where the processor multiplies bf16, a number is a pair of bf16; elsewhere it is one of
// fp32, to which everything is widened first. Each function exists for both.
#pragma once

#include <type_traits>

#include "vectors.h"

constexpr int IN_NUMBER = MULTIPLIES_BF16 ? 2 : 1;
constexpr int IN_WORDS = 2 / IN_NUMBER;  // vectors of numbers that a vector of pairs becomes

using Part = std::conditional_t<MULTIPLIES_BF16, bf16, float>;       // IN_NUMBER of them are a number
using Numbers = std::conditional_t<MULTIPLIES_BF16, Words, Floats>;  // a vector of them

inline Words broadcast_number(const bf16* from) { return broadcast_pair(from); }
inline Floats broadcast_number(const float* from) { return floats(*from); }

inline Floats add_product(Floats sum, Words one, Words other) { return add_dot(sum, one, other); }
inline Floats add_product(Floats sum, Floats one, Floats other) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)one, (__m512)other, (__m512)sum);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)one, (__m256)other, (__m256)sum);
#else
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)one, (float32x4_t)other);
#endif
}

inline void copy_parts(bf16* to, const bf16* from, int64_t count) { std::memcpy(to, from, count * sizeof(bf16)); }
inline void copy_parts(float* to, const bf16* from, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store_some(to + i, load_bf16(from + i, count - i), count - i);
}

// Pairs of bf16, or of fp32 that are rounded, as one number or two, which are `stride` vectors apart.
inline void put_pairs(Words* to, int64_t, Words pairs) { *to = pairs; }
inline void put_pairs(Floats* to, int64_t stride, Words pairs) {
    to[0] = low_of(pairs);
    to[stride] = high_of(pairs);
}
inline void put_pairs(Words* to, int64_t, Floats first, Floats second) { *to = pairs_of(first, second); }
inline void put_pairs(Floats* to, int64_t stride, Floats first, Floats second) {
    to[0] = first;
    to[stride] = second;
}

inline void put_parts(bf16* to, Floats numbers) { store(to, rounded(numbers)); }
inline void put_parts(float* to, Floats numbers) { store(to, numbers); }

// Rows `one` and `other`, of 2 * LANES each: from `to` on as pairs, or behind each other, `stride` apart.
inline void put_rows(bf16* to, int64_t, Halves one, Halves other) {
    store(to, alternated(one, other, false));
    store(to + 2 * LANES, alternated(one, other, true));
}
inline void put_rows(float* to, int64_t stride, Halves one, Halves other) {
    for (const Halves& row : {one, other}) {
        Rounded halves[2];
        std::memcpy(halves, &row, sizeof row);
        store(to, widened(halves[0]));
        store(to + LANES, widened(halves[1]));
        to += stride;
    }
}
