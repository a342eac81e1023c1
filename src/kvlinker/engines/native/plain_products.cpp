// Rows times a matrix of weights in bf16 that lie as PyTorch has them, one output's after the other's: those that are read
// elsewhere, too, such as embeddings.
#include "product.h"
#include "vectors.h"

namespace {

constexpr int TOGETHER = 4;       // outputs, and rows, whose sums are computed at once
constexpr int THREAD_BLOCK = 64;  // outputs
constexpr int PAIRS = 2 * LANES;  // numbers that are multiplied at once

// Inputs as weights meet them: pairs of bf16; or the first numbers of all pairs of a vector, then the second ones.
struct Inputs {
    explicit Inputs(const Product& product) : stride(round_up(product.width, PAIRS)) {
        memory = allocate<float>(product.rows * stride);
        for (int64_t row = 0; row < product.rows; ++row)
            for (int64_t i = 0; i < product.width; i += PAIRS) {
                const Words pairs = load_some<Words>(product.inputs + row * product.width + i, product.width - i);
                store(memory.get() + row * stride + i, low_of(pairs));
                store(memory.get() + row * stride + i + LANES, high_of(pairs));
            }
    }

    const float* row(int64_t index) const { return memory.get() + index * stride; }

    int64_t stride;
    std::unique_ptr<float, Free> memory;
};

template <int OUTPUTS, int ROWS>
void multiply(const Product& product, const Inputs& inputs, int64_t output, int64_t first_row) {
    const auto* weights = static_cast<const bf16*>(product.weights) + output * product.width;  // [outputs, width]
    Floats sums[OUTPUTS][ROWS] = {};
    for (int64_t i = 0; i < product.width; i += PAIRS) {
#pragma GCC unroll 4
        for (int o = 0; o < OUTPUTS; ++o) {
            const Words pairs = load_some<Words>(weights + o * product.width + i, product.width - i);
            const Floats low = low_of(pairs), high = high_of(pairs);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const float* row = inputs.row(first_row + r) + i;
                sums[o][r] += low * load<Floats>(row);
                sums[o][r] += high * load<Floats>(row + LANES);
            }
        }
    }
    for (int o = 0; o < OUTPUTS; ++o) {
        const Floats bias = product.bias ? load_bf16(product.bias + output + o, 1) : Floats{};
        for (int r = 0; r < ROWS; ++r)
            store_bf16(product.output + (first_row + r) * product.outputs + output + o,
                       floats(sum_of(sums[o][r])) + bias, 1);
    }
}

template <int OUTPUTS>
void multiply_rows(const Product& product, const Inputs& inputs, int64_t output) {
    int64_t row = 0;
    for (; row + TOGETHER <= product.rows; row += TOGETHER) multiply<OUTPUTS, TOGETHER>(product, inputs, output, row);
    for (; row < product.rows; ++row) multiply<OUTPUTS, 1>(product, inputs, output, row);
}

}  // namespace

extern "C" void kvlinker_multiply_plain(const Product* product) {
    const Inputs inputs(*product);
    const int64_t blocks = round_up(product->outputs, THREAD_BLOCK) / THREAD_BLOCK;
#pragma omp parallel for num_threads(static_cast<int>(product->threads)) schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
        int64_t output = block * THREAD_BLOCK;
        const int64_t end = std::min(output + THREAD_BLOCK, product->outputs);
        for (; output + TOGETHER <= end; output += TOGETHER) multiply_rows<TOGETHER>(*product, inputs, output);
        for (; output < end; ++output) multiply_rows<1>(*product, inputs, output);
    }
}
