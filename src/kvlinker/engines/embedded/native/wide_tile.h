// A tile of up to 64 rows, which lie in the lanes of vectors, in scores as well as in outputs:
//
//   scores[key][row] += query[number][row] * key[number]         numbers of key_dim; keys are broadcast from the segment
//   output[dim][row] += weight[number][row] * value[number][dim]  numbers are keys; values are packed first
//
// So both are the same micro-kernel, and maximum and sum of the softmax need no work across lanes.
#pragma once

#include <cmath>

#include "numbers.h"
#include "rows.h"

constexpr int SUMS = REGISTERS == 32 ? 16 : 8;  // accumulators of the micro-kernel
constexpr int WIDE_KEYS = 16;                   // what a block's keys are rounded up to

// The micro-kernel. For every step, row vector v and i: sums[i][v] += rows[step * row_stride + v] times the number at
// others + i * other_stride + step * step_stride.
template <int OTHERS, int VECTORS>
inline void multiply(Floats (&sums)[OTHERS][VECTORS], const Numbers* rows, int64_t row_stride, const Part* others,
                     int64_t other_stride, int64_t step_stride, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step, rows += row_stride, others += step_stride) {
        Numbers numbers[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) numbers[v] = rows[v];
#pragma GCC unroll 16
        for (int i = 0; i < OTHERS; ++i) {
            const Numbers other = broadcast_number(others + i * other_stride);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) sums[i][v] = add_product(sums[i][v], numbers[v], other);
        }
    }
}

// One thread's memory, large enough for every tile of a call.
class WideScratch {
  public:
    static constexpr int VECTORS = TILE_ROWS / LANES;

    explicit WideScratch(const Call& call)
        : value_dim(round_up(call.output.dim, 2 * 16)), key_numbers(call.query.dim / IN_NUMBER),
          queries(allocate<bf16>(TILE_ROWS * call.query.dim)), query(allocate<Numbers>(VECTORS * key_numbers)),
          output(allocate<Floats>(VECTORS * value_dim)), scores(allocate<Floats>(VECTORS * KEY_BLOCK)),
          weights(allocate<Numbers>(VECTORS * KEY_BLOCK / IN_NUMBER)), values(allocate<Part>(KEY_BLOCK * value_dim)),
          keys(allocate<Part>(KEY_BLOCK * call.query.dim)) {}

    const int64_t value_dim;  // rounded up to whole vectors of bf16
    const int64_t key_numbers;
    const std::unique_ptr<bf16, Free> queries;     // [rows][key_dim]
    const std::unique_ptr<Numbers, Free> query;    // [key_numbers][vectors]
    const std::unique_ptr<Floats, Free> output;    // [value_dim][vectors], relative to the maxima so far
    const std::unique_ptr<Floats, Free> scores;    // [KEY_BLOCK][vectors], times log2(e)
    const std::unique_ptr<Numbers, Free> weights;  // [KEY_BLOCK / IN_NUMBER][vectors]
    const std::unique_ptr<Part, Free> values;      // [KEY_BLOCK / IN_NUMBER][value_dim] numbers
    const std::unique_ptr<Part, Free> keys;        // [KEY_BLOCK][key_dim], copied
};

// Computes at most ROWS rows over some of a bundle's keys.
template <int ROWS>
class WideTile {
  public:
    // A sink is a key with that score and value 0, seen first.
    WideTile(const Rows& rows, WideScratch& scratch, bool with_sinks)
        : rows(rows), call(rows.call), scratch(scratch), output(scratch.output.get()), scores(scratch.scores.get()),
          weights(scratch.weights.get()) {
        for (int64_t row = 0; row < ROWS; ++row) {
            const bool has_sink = with_sinks && row < rows.count;
            maxima[row / LANES][row % LANES] = has_sink ? rows.sink(row) : LOWEST;
        }
        for (int v = 0; v < VECTORS; ++v) totals[v] = floats(with_sinks ? 1.0f : 0.0f);
        std::fill(output, output + scratch.value_dim * VECTORS, Floats{});
    }

    // Where a row's rotated query is to be written before `take_queries`.
    bf16* query(int64_t row) { return scratch.queries.get() + row * call.query.dim; }

    void take_queries() {
        const int64_t pairs = call.query.dim / 2;
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

    void compute_block(const Segment& segment, const KeyBlock& block) {
        const int64_t keys = round_up(block.count, WIDE_KEYS);
        if (block.some_hidden)
            score<true>(segment.key, block, keys);
        else
            score<false>(segment.key, block, keys);
        weigh(keys);
        pack_values(segment.value, block, keys);
        accumulate(keys);
    }

    void write_outputs() {
        for (int v = 0; v * LANES < rows.count; ++v) {
            const Floats inverse = totals[v] == 0.0f ? Floats{} : 1.0f / totals[v];
            const int64_t lanes = std::min<int64_t>(rows.count - v * LANES, LANES);
            bf16* targets[LANES];
            for (int64_t lane = 0; lane < lanes; ++lane) targets[lane] = rows.output(v * LANES + lane);
            for (int64_t dim = 0; dim < call.output.dim; ++dim) {
                const Rounded found = rounded(output[dim * VECTORS + v] * inverse);
                for (int64_t lane = 0; lane < lanes; ++lane) targets[lane][dim] = found[lane];
            }
        }
    }

    // `first_place` is that of the bundle's first query.
    void write_partials(const Partials& partials, int64_t first_place) {
        const auto* outputs = reinterpret_cast<const float*>(output);
        for (int64_t row = 0; row < rows.count; ++row) {
            const int64_t place = rows.place(row, first_place), head = rows.head_of[row];
            float* to = partials.outputs(place, head);
            for (int64_t dim = 0; dim < call.output.dim; ++dim) to[dim] = outputs[dim * ROWS + row];
            partials.maximum(place, head) = maxima[row / LANES][row % LANES];
            partials.total(place, head) = totals[row / LANES][row % LANES];
        }
    }

  private:
    static constexpr int VECTORS = ROWS / LANES;
    static constexpr int TOGETHER = std::min(VECTORS, REGISTERS == 32 ? 4 : 2);  // vectors that the micro-kernel takes
    static constexpr int OTHERS = SUMS / TOGETHER;  // keys or dims that it takes with them

    // Scores of a block's keys, -inf where hidden, and the maxima that follow.
    template <bool SOME_HIDDEN>
    void score(const Heads& source, const KeyBlock& block, int64_t keys) {
        const bool in_place = MULTIPLIES_BF16 && block.neighbours && block.keys[0] + keys <= source.rows;
        const auto* parts = in_place ? reinterpret_cast<const Part*>(source.at(rows.head, block.keys[0]))
                                     : copy_keys(source, block, keys);
        const int64_t stride = in_place ? source.row_stride : source.dim;
        const float factor = call.softcap ? call.scale / call.softcap : call.scale * LOG2E;
        for (int first = 0; first < VECTORS; first += TOGETHER) {
            Floats highest[TOGETHER];
            std::copy(maxima + first, maxima + first + TOGETHER, highest);
            for (int64_t key = 0; key < keys; key += OTHERS) {
                Floats sums[OTHERS][TOGETHER] = {};
                multiply(sums, scratch.query.get() + first, VECTORS, parts + key * stride, stride, IN_NUMBER,
                         scratch.key_numbers);
#pragma GCC unroll 16
                for (int i = 0; i < OTHERS; ++i) {
#pragma GCC unroll 16
                    for (int v = 0; v < TOGETHER; ++v) {
                        Floats found = sums[i][v] * factor;
                        if (call.softcap) found = tanh(found) * (call.softcap * LOG2E);
                        if (SOME_HIDDEN) {
                            const auto bits = static_cast<uint32_t>(block.seen[key + i] >> (first + v) * LANES);
                            found = mask_of(bits) ? found : floats(-HUGE_VALF);
                        }
                        highest[v] = larger(highest[v], found);
                        scores[(key + i) * VECTORS + first + v] = found;
                    }
                }
            }
            for (int v = 0; v < TOGETHER; ++v) {
                shrink[first + v] = exp2(maxima[first + v] - highest[v]);
                maxima[first + v] = highest[v];
            }
        }
    }

    // Behind each other, so that nothing is left out, and nothing behind the last key is read.
    const Part* copy_keys(const Heads& source, const KeyBlock& block, int64_t keys) {
        Part* copied = scratch.keys.get();
        for (int64_t key = 0; key < keys; ++key)
            copy_parts(copied + key * source.dim, source.at(rows.head, block.keys[key]), source.dim);
        return copied;
    }

    // Scores become weights, relative to the maxima; the totals follow.
    void weigh(int64_t keys) {
        for (int v = 0; v < VECTORS; ++v) {
            Floats total = totals[v] * shrink[v];
            for (int64_t key = 0; key < keys; key += 2) {
                const Floats even = exp2(scores[key * VECTORS + v] - maxima[v]);
                const Floats odd = exp2(scores[(key + 1) * VECTORS + v] - maxima[v]);
                total += even + odd;
                put_pairs(weights + key / IN_NUMBER * VECTORS + v, VECTORS, even, odd);
            }
            totals[v] = total;
        }
    }

    // A block's values, as numbers of keys; zeros for the keys and dims that fill up.
    void pack_values(const Heads& source, const KeyBlock& block, int64_t keys) {
        for (int64_t key = 0; key < keys; key += 2) {
            const bf16* even = source.at(rows.head, block.keys[key]);
            const bf16* odd = source.at(rows.head, block.keys[key + 1]);
            for (int64_t dim = 0; dim < scratch.value_dim; dim += 2 * LANES) {
                const Halves one = load_some<Halves>(even + dim, key < block.count ? source.dim - dim : 0);
                const Halves other = load_some<Halves>(odd + dim, key + 1 < block.count ? source.dim - dim : 0);
                put_rows(scratch.values.get() + key * scratch.value_dim + IN_NUMBER * dim, scratch.value_dim, one, other);
            }
        }
    }

    void accumulate(int64_t keys) {
        const int64_t step_stride = IN_NUMBER * scratch.value_dim;
        for (int first = 0; first < VECTORS; first += TOGETHER)
            for (int64_t dim = 0; dim < call.output.dim; dim += OTHERS) {
                Floats* at = output + dim * VECTORS + first;
                Floats sums[OTHERS][TOGETHER];
#pragma GCC unroll 16
                for (int i = 0; i < OTHERS; ++i)
#pragma GCC unroll 16
                    for (int v = 0; v < TOGETHER; ++v) sums[i][v] = at[i * VECTORS + v] * shrink[first + v];
                multiply(sums, weights + first, VECTORS, scratch.values.get() + IN_NUMBER * dim, IN_NUMBER, step_stride,
                         keys / IN_NUMBER);
#pragma GCC unroll 16
                for (int i = 0; i < OTHERS; ++i)
#pragma GCC unroll 16
                    for (int v = 0; v < TOGETHER; ++v) at[i * VECTORS + v] = sums[i][v];
            }
    }

    const Rows& rows;
    const Call& call;
    WideScratch& scratch;
    Floats* const output;
    Floats* const scores;
    Numbers* const weights;
    Floats maxima[VECTORS];  // of the scores so far
    Floats totals[VECTORS];  // of the weights so far
    Floats shrink[VECTORS];  // what the weights before this block are multiplied by
};
