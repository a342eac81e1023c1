// The instruction of AVX-VNNI by those of AVX2, so that code for processors with it is tested on others.
#pragma once

#include <immintrin.h>

static inline __m256i software_dpbusd(__m256i sum, __m256i bytes, __m256i others) {
    const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(bytes, 8);
    const __m256i other_even = _mm256_srai_epi16(_mm256_slli_epi16(others, 8), 8), other_odd = _mm256_srai_epi16(others, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, other_even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, other_odd));
}

#define _mm256_dpbusd_avx_epi32 software_dpbusd
#define __AVXVNNI__ 1
