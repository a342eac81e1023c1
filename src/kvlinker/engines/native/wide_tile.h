// A tile of up to 64 rows, which lie in the lanes of vectors, in scores as well as in outputs:
//
//   scores[key][row] += query[number][row] * key[number]         numbers of key_dim; keys are broadcast
//   output[dim][row] += weight[number][row] * value[number][dim]  numbers are keys; values are packed first
//
// So both are the same micro-kernel, and maximum and sum of the softmax need no work across lanes.
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

// One thread's memory, large enough for every tile of a call.
class WideScratch {
  public:
    static constexpr int VECTORS = TILE_ROWS / LANES;

    explicit WideScratch(const Call& call)
        : value_dim(round_up(call.output.dim, 2 * 16)), key_numbers(call.query.dim / IN_NUMBER),
          queries(allocate<bf16>(TILE_ROWS * call.query.dim)), query(allocate<Numbers>(VECTORS * key_numbers)),
          output(allocate<Floats>(VECTORS * value_dim)), scores(allocate<Floats>(VECTORS * KEY_BLOCK)),
          weights(allocate<Numbers>(MULTIPLIES_BF16 ? VECTORS * KEY_BLOCK / IN_NUMBER : 0)),
          packed(allocate<Part>(KEY_BLOCK * std::max(value_dim, call.query.dim))) {}

    const int64_t value_dim;  // rounded up to whole vectors of bf16
    const int64_t key_numbers;
    const std::unique_ptr<bf16, Free> queries;     // [rows][key_dim]
    const std::unique_ptr<Numbers, Free> query;    // [key_numbers][vectors]
    const std::unique_ptr<Floats, Free> output;    // [value_dim][vectors], relative to the maxima so far
    const std::unique_ptr<Floats, Free> scores;    // [KEY_BLOCK][vectors]
    const std::unique_ptr<Numbers, Free> weights;  // [KEY_BLOCK / IN_NUMBER][vectors], where scores have another form
    const std::unique_ptr<Part, Free> packed;      // keys [KEY_BLOCK][key_dim], copied, until there are scores; then
                                                   // values [KEY_BLOCK / IN_NUMBER][value_dim] numbers
};

// Computes at most ROWS rows over some of a bundle's keys.
template <int ROWS>
class WideTile {
  public:
    // A sink is a key with that score and value 0, seen first.
    WideTile(const Rows& rows, WideScratch& scratch, bool with_sinks)
        : rows(rows), call(rows.call), scratch(scratch), exponents(rows.call), output(scratch.output.get()),
          scores(scratch.scores.get()),
          weights(MULTIPLIES_BF16 ? scratch.weights.get() : reinterpret_cast<Numbers*>(scores)) {
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
            score<true>(segment, block, keys);
        else
            score<false>(segment, block, keys);
        if (exponents.capped())
            weigh<true>(keys);
        else
            weigh<false>(keys);
        pack_values(segment.value, block, keys);
        accumulate(segment.key, block, keys);
    }

    void write_outputs() {
        Floats inverse[VECTORS];
        for (int v = 0; v < VECTORS; ++v) inverse[v] = totals[v] == 0.0f ? Floats{} : 1.0f / totals[v];
        each_output(inverse, [&](int64_t row, int64_t dim, Floats found) {
            store_bf16(rows.output(row) + dim, found, call.output.dim - dim);
        });
    }

    // `first_place` is that of the bundle's first query.
    void write_partials(const Partials& partials, int64_t first_place) {
        Floats factors[VECTORS];
        std::fill(factors, factors + VECTORS, floats(1.0f));
        float* to[ROWS];
        for (int64_t row = 0; row < rows.count; ++row) {
            const int64_t place = rows.place(row, first_place), head = rows.head_of[row];
            to[row] = partials.outputs(place, head);
            partials.maximum(place, head) = maxima[row / LANES][row % LANES];
            partials.total(place, head) = totals[row / LANES][row % LANES];
        }
        each_output(factors, [&](int64_t row, int64_t dim, Floats found) {
            store_some(to[row] + dim, found, call.output.dim - dim);
        });
    }

  private:
    static constexpr int VECTORS = ROWS / LANES;
    // Vectors of rows that the micro-kernel takes, and keys or dims that it takes with them.
    static constexpr int TOGETHER = REGISTERS == 16 ? 2 : VECTORS % 4 == 0 ? 4 : VECTORS;
    static constexpr int OTHERS = TOGETHER == 3 ? 8 : SUMS / TOGETHER;

    // Has each row written what `output` has of it, times a factor: LANES dims from a first one on.
    template <typename Write>
    void each_output(const Floats (&factors)[VECTORS], Write write) {
        for (int v = 0; v * LANES < rows.count; ++v) {
            const int64_t lanes = std::min<int64_t>(rows.count - v * LANES, LANES);
            for (int64_t dim = 0; dim < call.output.dim; dim += LANES) {
                Words found[LANES];
                for (int i = 0; i < LANES; ++i) found[i] = (Words)(output[(dim + i) * VECTORS + v] * factors[v]);
                transpose(found);
                for (int64_t lane = 0; lane < lanes; ++lane) write(v * LANES + lane, dim, (Floats)found[lane]);
            }
        }
    }

    // Products of the rows and a block's keys, -inf where hidden, and the maxima that follow. The block's values are
    // fetched meanwhile.
    template <bool SOME_HIDDEN>
    void score(const Segment& segment, const KeyBlock& block, int64_t keys) {
        const Heads& source = segment.key;
        const bool in_place = MULTIPLIES_BF16 && block.neighbours && block.keys[0] + keys <= source.rows;
        const auto* parts = in_place ? reinterpret_cast<const Part*>(source.at(rows.head, block.keys[0]))
                                     : copy_keys(source, block, keys);
        const int64_t stride = in_place ? source.row_stride : source.dim;
        for (int first = 0; first < VECTORS; first += TOGETHER) {
            Floats highest[TOGETHER];
            std::fill(highest, highest + TOGETHER, floats(-HUGE_VALF));
            for (int64_t key = 0; key < keys; key += OTHERS) {
                for (int64_t i = key; first == 0 && i < key + OTHERS; ++i)
                    prefetch(segment.value.at(rows.head, block.keys[i]), segment.value.dim);
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
        Part* copied = scratch.packed.get();
        for (int64_t key = 0; key < keys; ++key)
            copy_parts(copied + key * source.dim, source.at(rows.head, block.keys[key]), source.dim);
        return copied;
    }

    // Scores become weights, relative to the maxima; the totals follow.
    template <bool CAPPED>
    void weigh(int64_t keys) {
        for (int v = 0; v < VECTORS; ++v) {
            const auto weight = [&](int64_t key) {
                return exp2(exponents.of<CAPPED>(scores[key * VECTORS + v]) - maxima[v]);
            };
            Floats total = totals[v] * shrink[v];
            for (int64_t key = 0; key < keys; key += 2) {
                const Floats even = weight(key), odd = weight(key + 1);
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
                put_rows(scratch.packed.get() + key * scratch.value_dim + IN_NUMBER * dim, scratch.value_dim, one, other);
            }
        }
    }

    // Adds weighted values to the output. The keys behind the block's last are fetched meanwhile.
    void accumulate(const Heads& source, const KeyBlock& block, int64_t keys) {
        const int64_t step_stride = IN_NUMBER * scratch.value_dim;
        const bf16* next = source.at(rows.head, block.keys[keys - 1] + 1);
        const int64_t fetched = std::min<int64_t>(KEY_BLOCK * OTHERS / call.output.dim + 1, KEY_BLOCK);  // at once
        for (int first = 0; first < VECTORS; first += TOGETHER)
            for (int64_t dim = 0; dim < call.output.dim; dim += OTHERS) {
                Floats* at = output + dim * VECTORS + first;
                for (int64_t i = 0; first == 0 && i < fetched; ++i, next += source.row_stride)
                    prefetch(next, source.dim);
                Floats sums[OTHERS][TOGETHER];
#pragma GCC unroll 16
                for (int i = 0; i < OTHERS; ++i)
#pragma GCC unroll 16
                    for (int v = 0; v < TOGETHER; ++v) sums[i][v] = at[i * VECTORS + v] * shrink[first + v];
                multiply(sums, weights + first, VECTORS, scratch.packed.get() + IN_NUMBER * dim, IN_NUMBER, step_stride,
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
    const Exponents exponents;
    Floats* const output;
    Floats* const scores;
    Numbers* const weights;
    Floats maxima[VECTORS];  // of the scores so far
    Floats totals[VECTORS];  // of the weights so far
    Floats shrink[VECTORS];  // what the weights before this block are multiplied by
};
