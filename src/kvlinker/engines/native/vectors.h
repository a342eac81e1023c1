// Arithmetic on vectors of numbers, written once for all processors by the compiler's vector types. What a processor does
// by an instruction of its own is chosen below: products of pairs in bf16, rounding to bf16, powers of two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "call.h"

#if defined(__AVX512F__)
constexpr int LANES = 16;  // numbers in a vector
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int REGISTERS = 16;
#else
constexpr int LANES = 4;
constexpr int REGISTERS = 32;
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MULTIPLIES_BF16 1  // else numbers are widened to fp32 first
#else
#define MULTIPLIES_BF16 0
#endif

constexpr float LOG2E = 1.44269504f;

template <typename T, int BYTES>
struct VectorOf {
    typedef T type __attribute__((vector_size(BYTES)));
};

constexpr int VECTOR = LANES * sizeof(float);  // bytes

using Floats = VectorOf<float, VECTOR>::type;
using Words = VectorOf<int32_t, VECTOR>::type;     // integers, masks (all bits or none), or pairs of bf16: the first one low
using Halves = VectorOf<uint16_t, VECTOR>::type;   // a row of bf16, twice as many as there are lanes
using Rounded = VectorOf<uint16_t, VECTOR / 2>::type;  // bf16
using Bytes = VectorOf<int8_t, VECTOR>::type;

inline int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

struct Free {
    void operator()(void* allocated) const { std::free(allocated); }
};

// Uninitialised memory for whole vectors.
template <typename T>
std::unique_ptr<T, Free> allocate(int64_t count) {
    const int64_t bytes = round_up(count * sizeof(T), 64);
    return std::unique_ptr<T, Free>(static_cast<T*>(std::aligned_alloc(64, bytes)));
}

template <typename Vector, typename T>
Vector load(const T* from) {
    Vector loaded;
    std::memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

template <typename Vector, typename T>
void store(T* to, Vector vector) {
    std::memcpy(to, &vector, sizeof vector);
}

inline Floats floats(float number) { return number - Floats{}; }
inline Words words(int32_t number) { return number - Words{}; }

// 0, 1, 2, ...
inline Words counted() {
    Words numbers;
    for (int i = 0; i < LANES; ++i) numbers[i] = i;
    return numbers;
}

// The first `count` numbers from `from` on, or as many as a vector has; zeros behind.
template <typename Vector, typename T>
Vector load_some(const T* from, int64_t count) {
    constexpr int64_t MOST = sizeof(Vector) / sizeof(T);
    if (count >= MOST) return load<Vector>(from);
    Vector loaded{};
    if (count > 0) std::memcpy(&loaded, from, count * sizeof(T));
    return loaded;
}

template <typename Vector, typename T>
void store_some(T* to, Vector vector, int64_t count) {
    constexpr int64_t MOST = sizeof(Vector) / sizeof(T);
    if (count >= MOST)
        store(to, vector);
    else if (count > 0)
        std::memcpy(to, &vector, count * sizeof(T));
}

// The low or high number of each pair.
inline Floats low_of(Words pairs) { return (Floats)(pairs << 16); }
inline Floats high_of(Words pairs) { return (Floats)(pairs & static_cast<int32_t>(0xffff0000)); }

inline Floats widened(Rounded numbers) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)numbers), 16);  // GCC 12 does it in halves
#else
    return (Floats)(__builtin_convertvector(numbers, Words) << 16);
#endif
}

inline Floats load_bf16(const bf16* from, int64_t count = LANES) { return widened(load_some<Rounded>(from, count)); }

#if defined(__AVX512BF16__)

inline Rounded rounded(Floats numbers) { return (Rounded)_mm512_cvtneps_pbh((__m512)numbers); }

// sum + first * first + second * second of each pair
inline Floats add_dot(Floats sum, Words pairs, Words others) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)others);
}

#else

// The bits of the nearest bf16, of two as near the even one, in each word's upper half. NaN stays NaN.
inline Words rounded_up(Floats numbers) {
    const Words bits = (Words)numbers;
    const Words nearest = bits + 0x7fff + (bits >> 16 & 1);
    return numbers == numbers ? nearest : bits | 0x400000;
}

inline Rounded rounded(Floats numbers) {
    return __builtin_convertvector(rounded_up(numbers) >> 16, Rounded);
}

inline Floats add_dot(Floats sum, Words pairs, Words others) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)pairs, (bfloat16x8_t)others);
#else
    sum += low_of(pairs) * low_of(others);
    return sum + high_of(pairs) * high_of(others);
#endif
}

#endif

// Where there is no instruction for four bytes, two products become a sum of 16 bits first, which holds several of them if
// codes are small.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define SUMS_IN_16_BITS 1
#else
#define SUMS_IN_16_BITS 0
#endif

#if defined(__aarch64__) || SUMS_IN_16_BITS
constexpr bool SIGNED_BYTES = true;
#else
constexpr bool SIGNED_BYTES = false;
#endif

// How many words of codes up to MOST, times others, are added at once.
template <int MOST>
constexpr int WORDS_TOGETHER = SUMS_IN_16_BITS ? std::max(1, INT16_MAX / (2 * MOST * INT8_MAX)) : 1;

// sum + the products of the bytes of each word, four, exactly; of COUNT words. None of the bytes is above MOST; they are
// unsigned, but where SIGNED_BYTES and MOST is 127. The others are signed, and none is -128.
template <int MOST, int COUNT>
[[gnu::always_inline]] inline Words add_dots(Words sum, const Words (&bytes)[COUNT], const Words (&others)[COUNT]) {
#if SUMS_IN_16_BITS
    static_assert(COUNT <= WORDS_TOGETHER<MOST>);
    __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) {
        const auto one = (__m256i)bytes[i], other = (__m256i)others[i];
        if constexpr (MOST < INT8_MAX)
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(one, other));
        else
            pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(one), _mm256_sign_epi8(other, one));
    }
    return sum + (Words)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) {
#if defined(__AVX512VNNI__)
        sum = (Words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes[i], (__m512i)others[i]);
#elif defined(__AVXVNNI__)
        sum = (Words)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)bytes[i], (__m256i)others[i]);
#elif defined(__ARM_FEATURE_DOTPROD)
        sum = (Words)vdotq_s32((int32x4_t)sum, (int8x16_t)bytes[i], (int8x16_t)others[i]);
#elif defined(__aarch64__)
        const auto one = (int8x16_t)bytes[i], other = (int8x16_t)others[i];
        const int16x8_t low = vmull_s8(vget_low_s8(one), vget_low_s8(other)), high = vmull_high_s8(one, other);
        sum = (Words)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#else
        using Numbers = VectorOf<int16_t, VECTOR>::type;
        const auto even = (Numbers)(bytes[i] & 0xff00ff), odd = (Numbers)(bytes[i] >> 8 & 0xff00ff);
        const auto other_even = (Numbers)(others[i] << 8) >> 8, other_odd = (Numbers)others[i] >> 8;
        sum += (Words)_mm512_madd_epi16((__m512i)even, (__m512i)other_even);
        sum += (Words)_mm512_madd_epi16((__m512i)odd, (__m512i)other_odd);
#endif
    }
    return sum;
#endif
}

inline void store_bf16(bf16* to, Floats numbers, int64_t count = LANES) { store_some(to, rounded(numbers), count); }

// Rounds two vectors to bf16, and makes them pairs.
inline Words pairs_of(Floats first, Floats second) {
#if defined(__AVX512BF16__)
    const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    const Words order = (counted() + LANES) << 16 | counted();
    return (Words)_mm512_permutexvar_epi16((__m512i)order, both);
#else
    return (rounded_up(first) >> 16 & 0xffff) | (rounded_up(second) & static_cast<int32_t>(0xffff0000));
#endif
}

// 2^x with a relative error of 3e-6; 0 where x is -150 or less. NaN stays NaN.
inline Floats exp2(Floats x) {
#if defined(__AVX512F__)
    const Floats fraction = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    const Floats given = x;
    x = x < -126.0f ? floats(-126.0f) : x;
    const Words cut = __builtin_convertvector(x, Words);  // towards zero
    const Words whole = cut + (Words)(__builtin_convertvector(cut, Floats) > x);
    const Floats fraction = x - __builtin_convertvector(whole, Floats);
#endif
    Floats power = floats(0.0135341678f);
    power = power * fraction + 0.0520114638f;
    power = power * fraction + 0.241442755f;
    power = power * fraction + 0.693003833f;
    power = power * fraction + 1.0000026f;
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)power, (__m512)x);  // times 2^floor(x)
#else
    return given < -126.0f ? Floats{} : (Floats)((Words)power + (whole << 23));
#endif
}

// 1 - 2 / (e^2x + 1)
inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp2(x * (2 * LOG2E)) + 1.0f); }

inline Floats larger(Floats one, Floats other) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)one, (__m512)other);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)one, (__m256)other);
#else
    return one > other ? one : other;
#endif
}

// All bits of each lane whose bit is set.
inline Words mask_of(uint32_t bits) {
    const Words lane = words(1) << counted();
    return (words(static_cast<int32_t>(bits)) & lane) != 0;
}

// What is in memory, in each lane.
template <typename T>
Words broadcast_word(const T* from) {
    int32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return words(bits);
}

inline Words broadcast_pair(const bf16* two) { return broadcast_word(two); }

// The first, or the second, half of what two vectors are that take turns: one[0], other[0], one[1], other[1], ...
template <typename Vector>
[[gnu::always_inline]] inline Vector alternated(Vector one, Vector other, bool second_half) {
    constexpr int COUNT = sizeof(Vector) / sizeof(one[0]);
    using Index = std::conditional_t<sizeof(one[0]) == 2, Halves, Words>;
    Index low{}, high{};
    for (int i = 0; i < COUNT; ++i) {
        low[i] = i / 2 + i % 2 * COUNT;
        high[i] = low[i] + COUNT / 2;
    }
    return second_half ? __builtin_shuffle(one, other, high) : __builtin_shuffle(one, other, low);
}

// Calls with 0, 1, ..., COUNT - 1 in turn, each a constant: arrays that are indexed by it can be registers.
template <typename Call, int... NUMBERS>
[[gnu::always_inline]] inline void each(Call call, std::integer_sequence<int, NUMBERS...>) {
    (call(std::integral_constant<int, NUMBERS>()), ...);
}

template <int COUNT, typename Call>
[[gnu::always_inline]] inline void each(Call call) {
    each(call, std::make_integer_sequence<int, COUNT>());
}

// Vector i has what vector j has for each j in lane i.
template <int STAGE = 1>
[[gnu::always_inline]] inline void transpose(Words (&rows)[LANES]) {
    Words turned[LANES];
    each<LANES / 2>([&](auto i) __attribute__((always_inline)) {
        turned[2 * i] = alternated(rows[i], rows[i + LANES / 2], false);
        turned[2 * i + 1] = alternated(rows[i], rows[i + LANES / 2], true);
    });
    each<LANES>([&](auto i) __attribute__((always_inline)) { rows[i] = turned[i]; });
    if constexpr (2 * STAGE < LANES) transpose<2 * STAGE>(rows);
}

// The sums of as many vectors as there are lanes, one in each lane. It calls itself for those that are STEP apart, from
// FIRST on.
template <int FIRST = 0, int STEP = 1>
[[gnu::always_inline]] inline Floats sums_of(const Floats (&vectors)[LANES]) {
    if constexpr (STEP == LANES) {
        return vectors[FIRST];
    } else {
        const Floats one = sums_of<FIRST, 2 * STEP>(vectors), other = sums_of<FIRST + STEP, 2 * STEP>(vectors);
        return alternated(one, other, false) + alternated(one, other, true);
    }
}

inline int32_t sum_of(Words numbers) {
    int32_t sum = 0;
#if defined(__AVX512F__)
    sum = _mm512_reduce_add_epi32((__m512i)numbers);
#else
    for (int i = 0; i < LANES; ++i) sum += numbers[i];
#endif
    return sum;
}

inline float sum_of(Floats numbers) {
    float sum = 0.0f;
#if defined(__AVX512F__)
    sum = _mm512_reduce_add_ps((__m512)numbers);
#else
    for (int i = 0; i < LANES; ++i) sum += numbers[i];
#endif
    return sum;
}

inline float largest_of(Floats numbers) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)numbers);
#else
    float largest = numbers[0];
    for (int i = 1; i < LANES; ++i) largest = std::max(largest, numbers[i]);
    return largest;
#endif
}
