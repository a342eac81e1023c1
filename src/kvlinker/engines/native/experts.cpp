// Rows times matrices of experts: each row by those that were chosen for it. The rows of an expert are gathered and
// multiplied at once, by a function of products.cpp; model/weights/native_experts.py has the same structures.
#include "product.h"
#include "vectors.h"

namespace {

constexpr int64_t FEW_NUMBERS = 1 << 14;  // that one thread moves

// A matrix; its product lacks inputs, rows, output and threads.
struct Expert {
    void (*multiply)(const Product*);
    Product product;
};

// Pair p is row p / together of the inputs and the expert that was chosen for it.
struct Experts {
    const bf16* inputs;
    int64_t width, pairs, together;
    const int64_t* chosen;  // [pairs]; of what is no expert's number, outputs are zeros
    const Expert* experts;
    int64_t count, outputs;
    bf16* output;  // [pairs, outputs]
    int64_t threads;
};

// The sums of neighbouring pairs' numbers, each times a weight of its own.
struct WeightedSum {
    const bf16* inputs;    // [rows, together, width]
    const float* weights;  // [rows, together]
    int64_t rows, together, width;
    bf16* output;  // [rows, width]
    int64_t threads;
};

// Calls `move` with the numbers of all rows, which have so many numbers each.
template <typename Move>
void each_row(int64_t rows, int64_t width, int64_t threads, const Move& move) {
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (threads > 1 && rows * width > FEW_NUMBERS)
    for (int64_t row = 0; row < rows; ++row) move(row);
}

void multiply(const Experts& experts) {
    const int64_t width = experts.width, outputs = experts.outputs, threads = experts.threads, count = experts.count;
    const auto known = [&](int64_t pair) { return experts.chosen[pair] >= 0 && experts.chosen[pair] < count; };
    // The pairs of each expert, one expert's after the other's: `last` is behind them, and counts up to there.
    const auto memory = allocate<int64_t>(experts.pairs + count + 1);
    int64_t *order = memory.get(), *last = order + experts.pairs;
    std::fill(last, last + count + 1, 0);
    for (int64_t pair = 0; pair < experts.pairs; ++pair)
        if (known(pair)) ++last[experts.chosen[pair] + 1];
    int64_t most = *std::max_element(last, last + count + 1);
    for (int64_t expert = 0; expert < count; ++expert) last[expert + 1] += last[expert];
    for (int64_t pair = 0; pair < experts.pairs; ++pair)
        if (known(pair))
            order[last[experts.chosen[pair]]++] = pair;
        else
            std::fill_n(experts.output + pair * outputs, outputs, 0);
    if (most == 1) most = 0;  // no memory: a single row is multiplied where it lies
    const auto gathered = allocate<bf16>(most * width), products = allocate<bf16>(most * outputs);
    for (int64_t expert = 0, first = 0; expert < count; first = last[expert++]) {
        const int64_t rows = last[expert] - first, *pairs = order + first;
        if (!rows) continue;
        const auto input = [&](int64_t row) { return experts.inputs + pairs[row] / experts.together * width; };
        const auto output = [&](int64_t row) { return experts.output + pairs[row] * outputs; };
        Product product = experts.experts[expert].product;
        product.rows = rows;
        product.threads = threads;
        product.inputs = rows == 1 ? input(0) : gathered.get();
        product.output = rows == 1 ? output(0) : products.get();
        if (rows > 1)
            each_row(rows, width, threads,
                     [&](int64_t row) { std::copy_n(input(row), width, gathered.get() + row * width); });
        experts.experts[expert].multiply(&product);
        if (rows > 1)
            each_row(rows, outputs, threads,
                     [&](int64_t row) { std::copy_n(products.get() + row * outputs, outputs, output(row)); });
    }
}

void add_up(const WeightedSum& sum) {
    each_row(sum.rows, sum.together * sum.width, sum.threads, [&](int64_t row) {
        const float* weights = sum.weights + row * sum.together;
        const bf16* inputs = sum.inputs + row * sum.together * sum.width;
        for (int64_t i = 0; i < sum.width; i += LANES) {
            const int64_t left = sum.width - i;
            Floats total{};
            for (int64_t one = 0; one < sum.together; ++one)
                total += load_bf16(inputs + one * sum.width + i, left) * weights[one];
            store_bf16(sum.output + row * sum.width + i, total, left);
        }
    });
}

}  // namespace

extern "C" {

void kvlinker_multiply_experts(const Experts* experts) { multiply(*experts); }

void kvlinker_weighted_sum(const WeightedSum* sum) { add_up(*sum); }
}
