// Products of up to 64 rows, which lie in the lanes of vectors, and the keys of blocks: scores[key][row], so that the maximum
// of a softmax needs no work across lanes.
#pragma once

#include <cmath>

#include "exponents.h"
#include "numbers.h"
#include "rows.h"

constexpr int SUMS = REGISTERS == 32 ? 16 : 8;  // accumulators of the micro-kernel
constexpr int WIDE_ROWS = 16;                   // what its rows are a multiple of, filled up
constexpr int WIDE_KEYS = 16;                   // what a block's keys are rounded up to

// The micro-kernel. For every step, row vector v and i: sums[i][v] += rows[step * row_stride + v] times the number at
// others + i * other_stride + step * step_stride.
template <int OTHERS, int VECTORS>
inline void multiply(Floats (&sums)[OTHERS][VECTORS], const Numbers* rows, int64_t row_stride, const Part* others,
                     int64_t other_stride, int64_t step_stride, int64_t steps) {
    const Part* at[(OTHERS + 3) / 4];  // of every fourth: addresses of all take more registers than there are
    for (int i = 0; i < OTHERS; i += 4) at[i / 4] = others + i * other_stride;
    for (int64_t step = 0; step < steps; ++step, rows += row_stride) {
        Numbers numbers[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) numbers[v] = rows[v];
#pragma GCC unroll 16
        for (int i = 0; i < OTHERS; ++i) {
            const Numbers other = broadcast_number(at[i / 4] + i % 4 * other_stride);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) sums[i][v] = add_product(sums[i][v], numbers[v], other);
        }
#pragma GCC unroll 4
        for (const Part*& each : at) each += step_stride;
    }
}

// One thread's memory, large enough for all rows of a call.
struct ScoreScratch {
    explicit ScoreScratch(const Call& call)
        : key_numbers(call.query.dim / IN_NUMBER), queries(allocate<bf16>(TILE_ROWS * call.query.dim)),
          query(allocate<Numbers>(TILE_ROWS / LANES * key_numbers)), copied(allocate<Part>(KEY_BLOCK * call.query.dim)) {}

    const int64_t key_numbers;
    const std::unique_ptr<bf16, Free> queries;   // [rows][key_dim]
    const std::unique_ptr<Numbers, Free> query;  // [key_numbers][vectors]
    const std::unique_ptr<Part, Free> copied;    // keys [KEY_BLOCK][key_dim]
};

// Scores of at most ROWS rows.
template <int ROWS>
class WideScores {
  public:
    static constexpr int VECTORS = ROWS / LANES;
    // Vectors of rows that the micro-kernel takes, and keys or dims that it takes with them.
    static constexpr int TOGETHER = REGISTERS == 16 ? 2 : VECTORS % 4 == 0 ? 4 : VECTORS;
    static constexpr int OTHERS = TOGETHER == 3 ? 8 : SUMS / TOGETHER;

    // A sink is a key with that score, seen first.
    WideScores(const Rows& rows, ScoreScratch& scratch, bool with_sinks)
        : rows(rows), exponents(rows.call), scratch(scratch), key_dim(rows.call.query.dim) {
        for (int64_t row = 0; row < ROWS; ++row)
            maxima[row / LANES][row % LANES] = with_sinks && row < rows.count ? rows.sink(row) : LOWEST;
    }

    // Where a row's rotated query is to be written before `take_queries`.
    bf16* query(int64_t row) { return scratch.queries.get() + row * key_dim; }

    void take_queries() {
        const int64_t pairs = key_dim / 2;
        for (int v = 0; v < VECTORS; ++v)
            for (int64_t pair = 0; pair < pairs; pair += LANES) {
                Words packed[LANES];
                for (int64_t i = 0; i < LANES; ++i) {
                    const int64_t row = v * LANES + i;
                    packed[i] = load_some<Words>(query(row) + 2 * pair, row < rows.count ? 2 * (pairs - pair) : 0);
                }
                transpose(packed);
                for (int64_t i = 0; i < std::min<int64_t>(pairs - pair, LANES); ++i)
                    put_pairs(scratch.query.get() + (pair + i) * (2 / IN_NUMBER) * VECTORS + v, VECTORS, packed[i]);
            }
    }

    // Computes the products of the rows and a block's keys, -inf where hidden, and the maxima that follow. Calls
    // `meanwhile` with each key's index in the block, to have more memory fetched.
    template <typename Meanwhile>
    void score(const Heads& source, const KeyBlock& block, int64_t keys, Floats* scores, Meanwhile meanwhile) {
        if (block.some_hidden)
            score<true>(source, block, keys, scores, meanwhile);
        else
            score<false>(source, block, keys, scores, meanwhile);
    }

  protected:
    const Rows& rows;
    const Exponents exponents;
    Floats maxima[VECTORS];  // of the scores so far, as exponents
    Floats shrink[VECTORS];  // what the weights before the last block are multiplied by

  private:
    template <bool SOME_HIDDEN, typename Meanwhile>
    void score(const Heads& source, const KeyBlock& block, int64_t keys, Floats* scores, Meanwhile meanwhile) {
        const bool in_place = MULTIPLIES_BF16 && block.neighbours && block.keys[0] + keys <= source.rows;
        const auto* parts = in_place ? reinterpret_cast<const Part*>(source.at(rows.head, block.keys[0]))
                                     : copy_keys(source, block, keys);
        const int64_t stride = in_place ? source.row_stride : source.dim;
        for (int first = 0; first < VECTORS; first += TOGETHER) {
            Floats highest[TOGETHER];
            std::fill(highest, highest + TOGETHER, floats(-HUGE_VALF));
            for (int64_t key = 0; key < keys; key += OTHERS) {
                for (int64_t i = key; first == 0 && i < key + OTHERS; ++i) meanwhile(i);
                Floats* const to = scores + key * VECTORS + first;
                multiply_keys(parts + key * stride, stride, first, to);
                for (int i = 0; i < OTHERS; ++i) {
#pragma GCC unroll 4
                    for (int v = 0; v < TOGETHER; ++v) {
                        Floats& found = to[i * VECTORS + v];
                        if (SOME_HIDDEN) {
                            const auto bits = static_cast<uint32_t>(block.seen[key + i] >> (first + v) * LANES);
                            found = mask_of(bits) ? found : floats(-HUGE_VALF);
                        }
                        highest[v] = larger(highest[v], found);
                    }
                }
            }
            for (int v = 0; v < TOGETHER; ++v) {
                const Floats maximum = larger(maxima[first + v], exponents(highest[v]));
                shrink[first + v] = exp2(maxima[first + v] - maximum);
                maxima[first + v] = maximum;
            }
        }
    }

    // Products of some vectors of rows and some keys. Not inlined: it needs all registers.
    [[gnu::noinline]] void multiply_keys(const Part* keys, int64_t stride, int first, Floats* to) const {
        Floats sums[OTHERS][TOGETHER] = {};
        multiply(sums, scratch.query.get() + first, VECTORS, keys, stride, IN_NUMBER, scratch.key_numbers);
#pragma GCC unroll 16
        for (int i = 0; i < OTHERS; ++i)
#pragma GCC unroll 16
            for (int v = 0; v < TOGETHER; ++v) to[i * VECTORS + v] = sums[i][v];
    }

    // Behind each other, so that nothing is left out, and nothing behind the last key is read.
    const Part* copy_keys(const Heads& source, const KeyBlock& block, int64_t keys) {
        Part* copied = scratch.copied.get();
        for (int64_t key = 0; key < keys; ++key)
            copy_parts(copied + key * source.dim, source.at(rows.head, block.keys[key]), source.dim);
        return copied;
    }

    ScoreScratch& scratch;
    const int64_t key_dim;
};
