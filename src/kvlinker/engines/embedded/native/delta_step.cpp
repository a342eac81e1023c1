// One step of the gated delta rule, of one token for each of several sequences, in fp32.
#include <cmath>

#include "vectors.h"

namespace {

constexpr int64_t FEW_NUMBERS = 1 << 15;  // that one thread computes
constexpr int64_t MOST_VECTORS = 256 / LANES;  // of a row of the state

struct DeltaStep {
    const float* const* before;  // [sequences] states of [heads, rows, columns]
    float* const* after;
    const float *query, *key, *value;  // [sequences, heads, rows] twice, [sequences, heads, columns]
    const float *decay, *written;      // [sequences, heads]: logarithm, and share
    float* output;                     // [sequences, heads, columns]
    int64_t sequences, heads, rows, columns;
    int64_t normed;  // 1: queries and keys are normed to length 1
    int64_t threads;
};

float factor(const DeltaStep& step, const float* numbers) {
    if (!step.normed) return 1.0f;
    float squares = 1e-6f;
    for (int64_t i = 0; i < step.rows; ++i) squares += numbers[i] * numbers[i];
    return 1.0f / std::sqrt(squares);
}

void compute(const DeltaStep& step, int64_t sequence, int64_t head) {
    const int64_t index = sequence * step.heads + head, size = step.rows * step.columns;
    const int64_t vectors = step.columns / LANES;
    const float* before = step.before[sequence] + head * size;
    float* after = step.after[sequence] + head * size;
    const float *query = step.query + index * step.rows, *key = step.key + index * step.rows;
    const float asked = factor(step, query) / std::sqrt(static_cast<float>(step.rows));
    const float known = factor(step, key);
    const float decay = std::exp(step.decay[index]);

    Floats sums[MOST_VECTORS] = {};
    for (int64_t row = 0; row < step.rows; ++row) {
        const float k = key[row] * known * decay;
        for (int64_t v = 0; v < vectors; ++v) sums[v] += k * load<Floats>(before + row * step.columns + v * LANES);
    }
    Floats change[MOST_VECTORS];
    for (int64_t v = 0; v < vectors; ++v) {
        change[v] = (load<Floats>(step.value + index * step.columns + v * LANES) - sums[v]) * step.written[index];
        sums[v] = Floats{};
    }
    for (int64_t row = 0; row < step.rows; ++row) {
        const float k = key[row] * known, q = query[row] * asked;
        for (int64_t v = 0; v < vectors; ++v) {
            const int64_t at = row * step.columns + v * LANES;
            const Floats state = k * change[v] + decay * load<Floats>(before + at);
            store(after + at, state);
            sums[v] += q * state;
        }
    }
    for (int64_t v = 0; v < vectors; ++v) store(step.output + index * step.columns + v * LANES, sums[v]);
}

}  // namespace

extern "C" void kvlinker_delta_step(const DeltaStep* step) {
    const int64_t heads = step->sequences * step->heads;
#pragma omp parallel for num_threads(static_cast<int>(step->threads)) if (heads * step->rows * step->columns > FEW_NUMBERS)
    for (int64_t index = 0; index < heads; ++index) compute(*step, index / step->heads, index % step->heads);
}
