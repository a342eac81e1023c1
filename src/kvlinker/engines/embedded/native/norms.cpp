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
    Floats squares{};
    for (int64_t i = 0; i < norm.width; i += LANES) {
        const Floats x = load_bf16(inputs + i, norm.width - i);
        squares += x * x;
    }
    const float mean = sum_of(squares) / static_cast<float>(norm.width);
    const float factor = 1.0f / std::sqrt(mean + norm.epsilon);
    for (int64_t i = 0; i < norm.width; i += LANES) {
        const int64_t left = norm.width - i;
        Floats normed = load_bf16(inputs + i, left) * factor;
        if (norm.rounds_first) normed = widened(rounded(normed));
        const Floats weight = load_bf16(norm.weight + i, left) + norm.offset;
        store_bf16(norm.output + row * norm.width + i, normed * weight, left);
    }
}

}  // namespace

extern "C" void kvlinker_norm(const Norm* norm) {
#pragma omp parallel for num_threads(static_cast<int>(norm->threads)) if (norm->rows * norm->width > FEW_NUMBERS)
    for (int64_t row = 0; row < norm->rows; ++row) compute(*norm, row);
}
