// The root-mean-square norm of a row in bf16, with sums in fp32.
#pragma once

#include <cmath>

#include "vectors.h"

struct NormForm {
    float epsilon;
    float offset;          // that is added to the weight
    int64_t rounds_first;  // 1: what is normed is rounded before it is multiplied by the weight
};

inline void norm_row(const NormForm& form, const bf16* inputs, const bf16* weight, int64_t width, bf16* output) {
    Floats squares{};
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats x = load_bf16(inputs + i, width - i);
        squares += x * x;
    }
    const float mean = sum_of(squares) / static_cast<float>(width);
    const float factor = 1.0f / std::sqrt(mean + form.epsilon);
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t left = width - i;
        Floats normed = load_bf16(inputs + i, left) * factor;
        if (form.rounds_first) normed = widened(rounded(normed));
        store_bf16(output + i, normed * (load_bf16(weight + i, left) + form.offset), left);
    }
}
