// The instructions of AVX512-BF16 by those of AVX-512, so that code for processors with them is tested on others.
#pragma once

#include <immintrin.h>

#include <cstdint>

static inline __m512i bf16_bits(__m512 numbers) {  // the nearest bf16, of two as near the even one
    const __m512i bits = (__m512i)numbers, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 unordered = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
    return _mm512_srli_epi32(_mm512_mask_or_epi32(nearest, unordered, bits, _mm512_set1_epi32(0x400000)), 16);
}

static inline __m256bh software_cvtneps(__m512 numbers) { return (__m256bh)_mm512_cvtepi32_epi16(bf16_bits(numbers)); }

static inline __m512bh software_cvtne2ps(__m512 high, __m512 low) {
    return (__m512bh)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)software_cvtneps(low)),
                                        (__m256i)software_cvtneps(high), 1);
}

static inline __m512 software_dpbf16(__m512 sum, __m512bh one, __m512bh other) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    const auto second = [&](__m512bh pairs) { return (__m512)_mm512_and_si512((__m512i)pairs, upper); };
    const auto first = [&](__m512bh pairs) { return (__m512)_mm512_slli_epi32((__m512i)pairs, 16); };
    return _mm512_fmadd_ps(first(one), first(other), _mm512_fmadd_ps(second(one), second(other), sum));
}

#define _mm512_cvtneps_pbh software_cvtneps
#define _mm512_cvtne2ps_pbh software_cvtne2ps
#define _mm512_dpbf16_ps software_dpbf16
#define __AVX512BF16__ 1
