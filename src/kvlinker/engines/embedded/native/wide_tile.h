// A tile of up to 64 rows, which lie in the lanes of vectors, 16 to each, in scores as well as in outputs:
//
//   scores[key][row] += query[pair][row] * key[pair]           pairs of key_dim; keys are broadcast from the segment
//   output[dim][row] += weight[pair][row] * value[pair][dim]   pairs of keys; values are packed in pairs first
//
// So both are the same micro-kernel, and maximum and sum of the softmax need no work across lanes.
#pragma once

#include <cmath>

#include "rows.h"

constexpr int SUMS = 16;  // accumulators of the micro-kernel

// The micro-kernel. For every step, row vector v and i: sums[i][v] += the dot products of the pairs in
// rows[step * VECTORS + v] with the pair at others + i * other_stride + step * step_stride.
template <int VECTORS>
inline void multiply(__m512 (&sums)[SUMS / VECTORS][VECTORS], const __m512i* rows, const bf16* others,
                     int64_t other_stride, int64_t step_stride, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step, rows += VECTORS, others += step_stride) {
        __m512bh row_pairs[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) row_pairs[v] = (__m512bh)rows[v];
#pragma GCC unroll 16
        for (int i = 0; i < SUMS / VECTORS; ++i) {
            const __m512bh other = broadcast_pair(others + i * other_stride);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) sums[i][v] = _mm512_dpbf16_ps(sums[i][v], row_pairs[v], other);
        }
    }
}

// One thread's memory, large enough for every tile of a call.
class WideScratch {
  public:
    static constexpr int VECTORS = TILE_ROWS / LANES;

    explicit WideScratch(const Call& call)
        : value_dim(round_up(call.output.dim, 2 * LANES)), memory(allocate<float>(LANES * vectors(call))) {
        query = reinterpret_cast<__m512i*>(memory.get());
        output = reinterpret_cast<__m512*>(query + VECTORS * call.query.dim / 2);
        scores = output + VECTORS * value_dim;
        weights = reinterpret_cast<__m512i*>(scores + VECTORS * KEY_BLOCK);
        values = weights + VECTORS * KEY_BLOCK / 2;
        keys = reinterpret_cast<bf16*>(values + KEY_BLOCK / 2 * value_dim / LANES);
    }

    const int64_t value_dim;  // rounded up to whole vectors of bf16
    __m512i* query;           // [key_dim / 2][vectors], pairs of key_dim
    __m512* output;           // [value_dim][vectors], relative to the maxima so far
    __m512* scores;           // [KEY_BLOCK][vectors], times log2(e)
    __m512i* weights;         // [KEY_BLOCK / 2][vectors], pairs of keys
    __m512i* values;          // [KEY_BLOCK / 2][value_dim], pairs of keys
    bf16* keys;               // [KEY_BLOCK][key_dim], copied, or queries

  private:
    int64_t vectors(const Call& call) const {
        const int64_t per_vector = call.query.dim / 2 + value_dim + KEY_BLOCK + KEY_BLOCK / 2;
        return VECTORS * per_vector + KEY_BLOCK / 2 * value_dim / LANES + KEY_BLOCK * call.query.dim / (2 * LANES);
    }

    std::unique_ptr<float, Free> memory;
};

// Computes at most VECTORS * LANES rows over some of a bundle's keys.
template <int VECTORS>
class WideTile {
  public:
    // A sink is a key with that score and value 0, seen first.
    WideTile(const Rows& rows, WideScratch& scratch, bool with_sinks) : rows(rows), call(rows.call), scratch(scratch) {
        alignas(64) float sinks[WIDTH];
        for (int64_t row = 0; row < WIDTH; ++row) sinks[row] = with_sinks && row < rows.count ? rows.sink(row) : LOWEST;
        for (int v = 0; v < VECTORS; ++v) {
            maxima[v] = _mm512_load_ps(sinks + v * LANES);
            totals[v] = _mm512_set1_ps(with_sinks ? 1.0f : 0.0f);
        }
        std::fill(scratch.output, scratch.output + scratch.value_dim * VECTORS, _mm512_setzero_ps());
    }

    // Where a row's rotated query is to be written before `take_queries`.
    bf16* query(int64_t row) { return scratch.keys + row * call.query.dim; }

    void take_queries() {
        const int64_t pairs = call.query.dim / 2;
        for (int v = 0; v < VECTORS; ++v)
            for (int64_t pair = 0; pair < pairs; pair += LANES) {
                __m512i packed[LANES];
                for (int64_t i = 0; i < LANES; ++i) {
                    const int64_t row = v * LANES + i;
                    packed[i] = load_row(query(row) + 2 * pair, row < rows.count ? 2 * (pairs - pair) : 0);
                }
                transpose(packed);
                for (int64_t i = 0; i < std::min<int64_t>(pairs - pair, LANES); ++i)
                    scratch.query[(pair + i) * VECTORS + v] = packed[i];
            }
    }

    void compute_block(const Segment& segment, const KeyBlock& block) {
        if (block.some_hidden)
            score<true>(segment.key, block);
        else
            score<false>(segment.key, block);
        weigh(round_up(block.count, SUMS));
        pack_values(segment.value, block);
        accumulate(round_up(block.count, SUMS));
    }

    void write_outputs() {
        for (int v = 0; v * LANES < rows.count; ++v) {
            const __mmask16 empty = _mm512_cmp_ps_mask(totals[v], _mm512_setzero_ps(), _CMP_EQ_OQ);
            const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), totals[v]);
            const int64_t lanes = std::min<int64_t>(rows.count - v * LANES, LANES);
            bf16* targets[LANES];
            for (int64_t lane = 0; lane < lanes; ++lane) targets[lane] = rows.output(v * LANES + lane);
            alignas(32) bf16 rounded[LANES];
            for (int64_t dim = 0; dim < call.output.dim; ++dim) {
                const __m512 found = _mm512_maskz_mul_ps(~empty, scratch.output[dim * VECTORS + v], inverse);
                _mm256_store_si256(reinterpret_cast<__m256i*>(rounded), (__m256i)_mm512_cvtneps_pbh(found));
                for (int64_t lane = 0; lane < lanes; ++lane) targets[lane][dim] = rounded[lane];
            }
        }
    }

    // `first_place` is that of the bundle's first query.
    void write_partials(const Partials& partials, int64_t first_place) {
        alignas(64) float highest[WIDTH], sums[WIDTH];
        for (int v = 0; v < VECTORS; ++v) {
            _mm512_store_ps(highest + v * LANES, maxima[v]);
            _mm512_store_ps(sums + v * LANES, totals[v]);
        }
        const auto* outputs = reinterpret_cast<const float*>(scratch.output);
        for (int64_t lane = 0; lane < rows.count; ++lane) {
            const int64_t place = rows.place(lane, first_place), head = rows.head_of[lane];
            float* to = partials.outputs(place, head);
            for (int64_t dim = 0; dim < call.output.dim; ++dim) to[dim] = outputs[dim * WIDTH + lane];
            partials.maximum(place, head) = highest[lane];
            partials.total(place, head) = sums[lane];
        }
    }

  private:
    static constexpr int OTHERS = SUMS / VECTORS;  // keys or dims that the micro-kernel takes at once
    static constexpr int WIDTH = VECTORS * LANES;

    // Scores of a block's keys, -inf where hidden, and the maxima that follow.
    template <bool SOME_HIDDEN>
    void score(const Heads& source, const KeyBlock& block) {
        const int64_t keys = round_up(block.count, SUMS);
        const bool in_place = block.neighbours && block.keys[0] + keys <= source.rows;
        const bf16* rows_of_keys = in_place ? source.at(rows.head, block.keys[0]) : copy_keys(source, block, keys);
        const int64_t stride = in_place ? source.row_stride : source.dim;
        const __m512 factor = _mm512_set1_ps(call.softcap ? call.scale / call.softcap : call.scale * LOG2E);
        __m512 highest[VECTORS];
        std::copy(maxima, maxima + VECTORS, highest);
        for (int64_t key = 0; key < keys; key += OTHERS) {
            __m512 sums[OTHERS][VECTORS] = {};
            multiply<VECTORS>(sums, scratch.query, rows_of_keys + key * stride, stride, 2, call.query.dim / 2);
#pragma GCC unroll 16
            for (int i = 0; i < OTHERS; ++i) {
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; ++v) {
                    __m512 found = _mm512_mul_ps(sums[i][v], factor);
                    if (call.softcap) found = _mm512_mul_ps(tanh(found), _mm512_set1_ps(call.softcap * LOG2E));
                    if (SOME_HIDDEN) {
                        const auto seen = static_cast<__mmask16>(block.seen[key + i] >> v * LANES);
                        found = _mm512_mask_mov_ps(_mm512_set1_ps(-HUGE_VALF), seen, found);
                    }
                    highest[v] = _mm512_max_ps(highest[v], found);
                    scratch.scores[(key + i) * VECTORS + v] = found;
                }
            }
        }
        for (int v = 0; v < VECTORS; ++v) {
            shrink[v] = exp2(_mm512_sub_ps(maxima[v], highest[v]));
            maxima[v] = highest[v];
        }
    }

    // Behind each other, so that nothing is left out, and nothing behind the last key is read.
    const bf16* copy_keys(const Heads& source, const KeyBlock& block, int64_t keys) {
        for (int64_t key = 0; key < keys; ++key)
            std::memcpy(scratch.keys + key * source.dim, source.at(rows.head, block.keys[key]),
                        source.dim * sizeof(bf16));
        return scratch.keys;
    }

    // Scores become weights in pairs of keys, relative to the maxima; the totals follow.
    void weigh(int64_t keys) {
        const __m512i in_pairs = alternating(0, LANES);
        for (int v = 0; v < VECTORS; ++v) {
            __m512 total = _mm512_mul_ps(totals[v], shrink[v]);
            for (int64_t key = 0; key < keys; key += 2) {
                const __m512* scores = scratch.scores + key * VECTORS + v;
                const __m512 even = exp2(_mm512_sub_ps(scores[0], maxima[v]));
                const __m512 odd = exp2(_mm512_sub_ps(scores[VECTORS], maxima[v]));
                total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
                const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
                scratch.weights[key / 2 * VECTORS + v] = _mm512_permutexvar_epi16(in_pairs, both);
            }
            totals[v] = total;
        }
    }

    // A block's values, in pairs of keys; zeros for the keys and dims that fill up.
    void pack_values(const Heads& source, const KeyBlock& block) {
        const __m512i low = alternating(0, 2 * LANES), high = alternating(LANES, 2 * LANES);
        __m512i* packed = scratch.values;
        for (int64_t key = 0; key < round_up(block.count, SUMS); key += 2) {
            const bf16* even = source.at(rows.head, block.keys[key]);
            const bf16* odd = source.at(rows.head, block.keys[key + 1]);
            for (int64_t dim = 0; dim < scratch.value_dim; dim += 2 * LANES, packed += 2) {
                const __m512i one = load_row(even + dim, key < block.count ? source.dim - dim : 0);
                const __m512i other = load_row(odd + dim, key + 1 < block.count ? source.dim - dim : 0);
                packed[0] = _mm512_permutex2var_epi16(one, low, other);
                packed[1] = _mm512_permutex2var_epi16(one, high, other);
            }
        }
    }

    void accumulate(int64_t keys) {
        const auto* packed = reinterpret_cast<const bf16*>(scratch.values);
        for (int64_t dim = 0; dim < call.output.dim; dim += OTHERS) {
            __m512* output = scratch.output + dim * VECTORS;
            __m512 sums[OTHERS][VECTORS];
#pragma GCC unroll 16
            for (int i = 0; i < OTHERS; ++i)
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; ++v) sums[i][v] = _mm512_mul_ps(output[i * VECTORS + v], shrink[v]);
            multiply<VECTORS>(sums, scratch.weights, packed + 2 * dim, 2, 2 * scratch.value_dim, keys / 2);
#pragma GCC unroll 16
            for (int i = 0; i < OTHERS; ++i)
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; ++v) output[i * VECTORS + v] = sums[i][v];
        }
    }

    const Rows& rows;
    const Call& call;
    WideScratch& scratch;
    __m512 maxima[VECTORS];  // of the scores so far
    __m512 totals[VECTORS];  // of the weights so far
    __m512 shrink[VECTORS];  // what the weights before this block are multiplied by
};
