// A tile of up to 64 rows, which lie in the lanes of vectors, in scores as well as in outputs:
//
//   scores[key][row] += query[number][row] * key[number]         numbers of key_dim; keys are broadcast
//   output[dim][row] += weight[number][row] * value[number][dim]  numbers are keys; values are packed first
//
// So both are the same micro-kernel, and maximum and sum of the softmax need no work across lanes.
#pragma once

#include "wide_scores.h"

// One thread's memory, large enough for every tile of a call.
struct WideScratch {
    static constexpr int VECTORS = TILE_ROWS / LANES;

    explicit WideScratch(const Call& call)
        : queries(call), value_dim(round_up(call.output.dim, 2 * 16)), output(allocate<Floats>(VECTORS * value_dim)),
          scores(allocate<Floats>(VECTORS * KEY_BLOCK)),
          weights(allocate<Numbers>(MULTIPLIES_BF16 ? VECTORS * KEY_BLOCK / IN_NUMBER : 0)),
          packed(allocate<Part>(KEY_BLOCK * value_dim)) {}

    ScoreScratch queries;
    const int64_t value_dim;                       // rounded up to whole vectors of bf16
    const std::unique_ptr<Floats, Free> output;    // [value_dim][vectors], relative to the maxima so far
    const std::unique_ptr<Floats, Free> scores;    // [KEY_BLOCK][vectors]
    const std::unique_ptr<Numbers, Free> weights;  // [KEY_BLOCK / IN_NUMBER][vectors], where scores have another form
    const std::unique_ptr<Part, Free> packed;      // values [KEY_BLOCK / IN_NUMBER][value_dim] numbers
};

// Computes at most ROWS rows over some of a bundle's keys.
template <int ROWS>
class WideTile : public WideScores<ROWS> {
    using Scores = WideScores<ROWS>;
    using Scores::VECTORS, Scores::TOGETHER, Scores::OTHERS;
    using Scores::rows, Scores::exponents, Scores::maxima, Scores::shrink;

  public:
    // A sink is a key with that score and value 0, seen first.
    WideTile(const Rows& rows, WideScratch& scratch, bool with_sinks)
        : Scores(rows, scratch.queries, with_sinks), call(rows.call), scratch(scratch), output(scratch.output.get()),
          scores(scratch.scores.get()),
          weights(MULTIPLIES_BF16 ? scratch.weights.get() : reinterpret_cast<Numbers*>(scores)) {
        for (int v = 0; v < VECTORS; ++v) totals[v] = floats(with_sinks ? 1.0f : 0.0f);
        std::fill(output, output + scratch.value_dim * VECTORS, Floats{});
    }

    void compute_block(const Visit& visit, const KeyBlock& block) {
        const Segment& segment = call.segments[visit.segment];
        const int64_t keys = round_up(block.count, WIDE_KEYS);
        this->score(segment.key, block, keys, scores, [&](int64_t key) __attribute__((always_inline)) {
            prefetch(segment.value.at(rows.head, block.keys[key]), segment.value.dim);
        });
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

    // Scores become weights, relative to the maxima; the totals follow.
    template <bool CAPPED>
    void weigh(int64_t keys) {
        for (int v = 0; v < VECTORS; ++v) {
            const auto weight = [&](int64_t key) {
                return exp2(exponents.template of<CAPPED>(scores[key * VECTORS + v]) - maxima[v]);
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

    const Call& call;
    WideScratch& scratch;
    Floats* const output;
    Floats* const scores;
    Numbers* const weights;
    Floats totals[VECTORS];  // of the weights so far
};
