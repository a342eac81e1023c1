// Root-mean-square norms of rows, in bf16.
#include "norm_row.h"

namespace {

constexpr int64_t FEW_NUMBERS = 1 << 15;  // that one thread computes

struct Norm {
    const bf16 *inputs, *weight;  // [rows, width], [width]
    bf16* output;                 // [rows, width]
    int64_t rows, width;
    NormForm form;
    int64_t threads;
};

}  // namespace

extern "C" void kvlinker_norm(const Norm* norm) {
    const int64_t width = norm->width;
#pragma omp parallel for num_threads(static_cast<int>(norm->threads)) if (norm->rows * width > FEW_NUMBERS)
    for (int64_t row = 0; row < norm->rows; ++row)
        norm_row(norm->form, norm->inputs + row * width, norm->weight, width, norm->output + row * width);
}
