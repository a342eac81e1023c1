// The gated delta rule over some tokens of each of several sequences, in fp32, one token after the other.
//
// A state's columns do not meet: a few of them, which the innermost cache holds, go through all tokens of a sequence
// before the next ones do.
#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t FEW_NUMBERS = 1 << 15;  // that one thread computes

struct DeltaRule {
    const float* const* before;  // [sequences] states of [heads, rows, columns]
    float* const* after;
    const float *query, *key, *value;  // [sequences, tokens, heads, rows] twice, [sequences, tokens, heads, columns]
    const float* decay;                // [sequences, tokens, heads, decays]: logarithms
    const float* written;              // [sequences, tokens, heads]: shares
    float* output;                     // [sequences, tokens, heads, columns]
    int64_t sequences, tokens, heads, rows, columns;
    int64_t decays;  // of a head: one, or one for each row
    int64_t normed;  // 1: queries and keys are normed to length 1
    int64_t threads;
};

float length_factor(const DeltaRule& rule, const float* numbers) {
    if (!rule.normed) return 1.0f;
    float squares = 1e-6f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < rule.rows; ++i) squares += numbers[i] * numbers[i];
    return 1.0f / std::sqrt(squares);
}

// What the rows of a head meet at each token: [tokens, rows] each.
struct Factors {
    std::vector<float> keys, queries, decays;
};

Factors factors_of(const DeltaRule& rule, int64_t sequence, int64_t head) {
    const size_t size = static_cast<size_t>(rule.tokens * rule.rows);
    Factors found{std::vector<float>(size), std::vector<float>(size), std::vector<float>(size)};
    const float scale = 1.0f / std::sqrt(static_cast<float>(rule.rows));
    for (int64_t token = 0; token < rule.tokens; ++token) {
        const int64_t index = (sequence * rule.tokens + token) * rule.heads + head;
        const float *query = rule.query + index * rule.rows, *key = rule.key + index * rule.rows;
        const float* decay = rule.decay + index * rule.decays;
        const float asked = length_factor(rule, query) * scale, known = length_factor(rule, key);
        const float whole = std::exp(decay[0]);
        float *keys = found.keys.data() + token * rule.rows, *queries = found.queries.data() + token * rule.rows;
        float* decays = found.decays.data() + token * rule.rows;
#pragma omp simd
        for (int64_t row = 0; row < rule.rows; ++row) {
            keys[row] = key[row] * known;
            queries[row] = query[row] * asked;
            decays[row] = whole;
        }
        for (int64_t row = 1; row < rule.decays; ++row) decays[row] = std::exp(decay[row]);
    }
    return found;
}

// Some columns of a state, row by row.
struct Columns {
    float* numbers;
    int64_t stride;  // from row to row
};

// One token on so many vectors of columns: its output, and the state behind it.
template <int VECTORS>
void step(const float* before, int64_t stride, Columns after, const float* keys, const float* queries,
          const float* decays, const float* value, float written, float* output, int64_t rows) {
    Floats even[VECTORS] = {}, odd[VECTORS] = {}, change[VECTORS];
    int64_t row = 0;
    for (; row + 1 < rows; row += 2) {
        const float k = keys[row] * decays[row], next = keys[row + 1] * decays[row + 1];
        const float* at = before + row * stride;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            even[v] += k * load<Floats>(at + v * LANES);
            odd[v] += next * load<Floats>(at + stride + v * LANES);
        }
    }
    if (row < rows) {
        const float k = keys[row] * decays[row];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) even[v] += k * load<Floats>(before + row * stride + v * LANES);
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
        change[v] = (load<Floats>(value + v * LANES) - (even[v] + odd[v])) * written;
        even[v] = Floats{};
    }
    for (row = 0; row < rows; ++row) {
        const float k = keys[row], q = queries[row], decay = decays[row];
        const float* from = before + row * stride;
        float* to = after.numbers + row * after.stride;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            const Floats state = k * change[v] + decay * load<Floats>(from + v * LANES);
            store(to + v * LANES, state);
            even[v] += q * state;
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) store(output + v * LANES, even[v]);
}

// All tokens of a sequence on so many vectors of columns, from ``column`` on. Between tokens the columns lie side by side
// in ``held``.
template <int VECTORS>
void compute(const DeltaRule& rule, const Factors& factors, int64_t sequence, int64_t head, int64_t column, float* held) {
    const int64_t offset = head * rule.rows * rule.columns + column;
    const Columns after{rule.after[sequence] + offset, rule.columns}, between{held, VECTORS * LANES};
    const float* before = rule.before[sequence] + offset;
    int64_t stride = rule.columns;
    for (int64_t token = 0; token < rule.tokens; ++token) {
        const int64_t index = (sequence * rule.tokens + token) * rule.heads + head;
        const int64_t at = token * rule.rows, first = index * rule.columns + column;
        const Columns next = token + 1 < rule.tokens ? between : after;
        step<VECTORS>(before, stride, next, factors.keys.data() + at, factors.queries.data() + at,
                      factors.decays.data() + at, rule.value + first, rule.written[index], rule.output + first, rule.rows);
        before = next.numbers;
        stride = next.stride;
    }
}

void compute(const DeltaRule& rule, int64_t sequence, int64_t head) {
    const Factors factors = factors_of(rule, sequence, head);
    std::vector<Floats> held(static_cast<size_t>(rule.rows * 4));
    float* between = reinterpret_cast<float*>(held.data());
    int64_t column = 0;
    for (; column + 4 * LANES <= rule.columns; column += 4 * LANES)
        compute<4>(rule, factors, sequence, head, column, between);
    for (; column < rule.columns; column += LANES) compute<1>(rule, factors, sequence, head, column, between);
}

}  // namespace

extern "C" void kvlinker_delta_rule(const DeltaRule* rule) {
    const int64_t heads = rule->sequences * rule->heads;
    const int64_t numbers = heads * rule->tokens * rule->rows * rule->columns;
#pragma omp parallel for num_threads(static_cast<int>(rule->threads)) if (numbers > FEW_NUMBERS)
    for (int64_t index = 0; index < heads; ++index) compute(*rule, index / rule->heads, index % rule->heads);
}
