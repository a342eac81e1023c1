// Root-mean-square norms of rows, in bf16, with sums in fp32.
#include <cmath>

#include "vectors.h"

namespace {

constexpr int64_t FEW_NUMBERS = 1 << 15;  // that one thread computes

struct Norm {
    const bf16 *inputs, *weight;  // [rows, width], [width]
    bf16* output;                 // [rows, width]
    int64_t rows, width;
    float epsilon;
    float offset;         // that is added to the weight
    int64_t rounds_first;  // 1: what is normed is rounded before it is multiplied by the weight
    int64_t threads;
};

void compute(const Norm& norm, int64_t row) {
    const bf16* inputs = norm.inputs + row * norm.width;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < norm.width; i += LANES) {
        const __m512 x = load_bf16(inputs + i, lanes_below(norm.width - i));
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(norm.width);
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean + norm.epsilon));
    const __m512 offset = _mm512_set1_ps(norm.offset);
    for (int64_t i = 0; i < norm.width; i += LANES) {
        const __mmask16 lanes = lanes_below(norm.width - i);
        __m512 normed = _mm512_mul_ps(load_bf16(inputs + i, lanes), factor);
        if (norm.rounds_first) {
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(normed);
            normed = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
        }
        const __m512 weight = _mm512_add_ps(load_bf16(norm.weight + i, lanes), offset);
        store_bf16(norm.output + row * norm.width + i, lanes, _mm512_mul_ps(normed, weight));
    }
}

}  // namespace

extern "C" void kvlinker_norm(const Norm* norm) {
#pragma omp parallel for num_threads(static_cast<int>(norm->threads)) if (norm->rows * norm->width > FEW_NUMBERS)
    for (int64_t row = 0; row < norm->rows; ++row) compute(*norm, row);
}
