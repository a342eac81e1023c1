// A tile of few rows, as a sequence has that decodes: dims lie in the lanes of vectors, both of keys and of values, so
// that nothing is wasted on lanes without a row.
#pragma once

#include <cmath>

#include "rows.h"

constexpr int NARROW_ROWS = 4;
constexpr int CACHE_LINE = 64;  // bytes

// One thread's memory, large enough for every narrow tile of a call.
class NarrowScratch {
  public:
    explicit NarrowScratch(const Call& call)
        : key_dim(round_up(call.query.dim, 2 * LANES)), value_dim(round_up(call.output.dim, 4 * LANES)),
          memory(allocate<float>(NARROW_ROWS * (key_dim / 2 + value_dim + KEY_BLOCK + KEY_BLOCK / 2))) {
        output = memory.get();
        scores = output + NARROW_ROWS * value_dim;
        weights = reinterpret_cast<bf16*>(scores + NARROW_ROWS * KEY_BLOCK);
        query = weights + NARROW_ROWS * KEY_BLOCK;
    }

    const int64_t key_dim, value_dim;  // rounded up to what is computed at once
    float* output;                     // [rows][value_dim], relative to the maxima so far
    float* scores;                     // [rows][KEY_BLOCK], times log2(e)
    bf16* weights;                     // [rows][KEY_BLOCK]
    bf16* query;                       // [rows][key_dim]

  private:
    std::unique_ptr<float, Free> memory;
};

// A block's keys or values; the last one again behind the last. Where neighbours are is known without waiting for
// memory, so that more of them are on their way at once.
template <bool NEIGHBOURS>
class BlockRows {
  public:
    BlockRows(const Heads& source, const KeyBlock& block, int64_t head)
        : first(source.at(head, NEIGHBOURS ? block.keys[0] : 0)), stride(source.row_stride), last(block.count - 1),
          keys(block.keys) {}

    // Has the memory of a neighbour, which may be behind the block's last, fetched ahead.
    void prefetch(int64_t index, int64_t dim) const {
        if (!NEIGHBOURS) return;
        const char* row = reinterpret_cast<const char*>(first + stride * index);
        for (int64_t byte = 0; byte < dim * static_cast<int64_t>(sizeof(bf16)); byte += CACHE_LINE)
            _mm_prefetch(row + byte, _MM_HINT_T0);
    }

    const bf16* operator[](int64_t index) const {
        return first + stride * (NEIGHBOURS ? std::min(index, last) : keys[index]);
    }

  private:
    const bf16* const first;
    const int64_t stride, last;
    const int32_t* const keys;
};

// Computes ROWS rows or fewer over some of a bundle's keys.
template <int ROWS>
class NarrowTile {
  public:
    // A sink is a key with that score and value 0, seen first.
    NarrowTile(const Rows& rows, NarrowScratch& scratch, bool with_sinks)
        : rows(rows), call(rows.call), scratch(scratch) {
        for (int64_t row = 0; row < ROWS; ++row) {
            maxima[row] = with_sinks && row < rows.count ? rows.sink(row) : LOWEST;
            totals[row] = with_sinks ? 1.0f : 0.0f;
        }
        std::fill(scratch.output, scratch.output + ROWS * scratch.value_dim, 0.0f);
        std::fill(scratch.query, scratch.query + ROWS * scratch.key_dim, 0);
    }

    // Where a row's rotated query is to be written before `take_queries`.
    bf16* query(int64_t row) { return scratch.query + row * scratch.key_dim; }

    void take_queries() {}

    void compute_block(const Segment& segment, const KeyBlock& block) {
        if (block.neighbours)
            compute<true>(segment, block);
        else
            compute<false>(segment, block);
    }

    void write_outputs() {
        for (int64_t row = 0; row < rows.count; ++row) {
            const __m512 inverse = _mm512_set1_ps(totals[row] == 0.0f ? 0.0f : 1.0f / totals[row]);
            const float* from = scratch.output + row * scratch.value_dim;
            bf16* to = rows.output(row);
            for (int64_t dim = 0; dim < call.output.dim; dim += LANES)
                store_bf16(to + dim, lanes_below(call.output.dim - dim),
                           _mm512_mul_ps(_mm512_load_ps(from + dim), inverse));
        }
    }

    // `first_place` is that of the bundle's first query.
    void write_partials(const Partials& partials, int64_t first_place) {
        for (int64_t row = 0; row < rows.count; ++row) {
            const int64_t place = rows.place(row, first_place), head = rows.head_of[row];
            const float* from = scratch.output + row * scratch.value_dim;
            std::copy(from, from + call.output.dim, partials.outputs(place, head));
            partials.maximum(place, head) = maxima[row];
            partials.total(place, head) = totals[row];
        }
    }

  private:
    static constexpr int64_t DIMS = 4 * LANES;  // value dims that are summed at once
    static constexpr int KEYS = LANES / ROWS;   // that are scored at once

    template <bool NEIGHBOURS>
    void compute(const Segment& segment, const KeyBlock& block) {
        const BlockRows<NEIGHBOURS> keys(segment.key, block, rows.head), values(segment.value, block, rows.head);
        const int64_t count = round_up(block.count, 2 * LANES);
        for (int64_t key = 0; key < count; key += KEYS) {
            for (int64_t ahead = key; ahead < key + KEYS; ++ahead) values.prefetch(ahead, call.output.dim);
            score(keys, block, key);
        }
        for (int64_t row = 0; row < ROWS; ++row) weigh(row, count);
        for (int64_t dim = 0; dim < scratch.value_dim; dim += DIMS) accumulate(keys, values, block.count, dim);
    }

    // Scores of KEYS keys of a block for all rows, -inf where hidden.
    template <bool NEIGHBOURS>
    void score(const BlockRows<NEIGHBOURS>& block_keys, const KeyBlock& block, int64_t begin) {
        __m512 sums[LANES];  // of row and key: row * KEYS + key
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) sums[i] = _mm512_setzero_ps();
        for (int64_t dim = 0; dim < call.query.dim; dim += 2 * LANES) {
            __m512bh queries[ROWS];
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row)
                queries[row] = (__m512bh)_mm512_load_si512(scratch.query + row * scratch.key_dim + dim);
            const auto add = [&](__mmask32 dims) {
#pragma GCC unroll 16
                for (int i = 0; i < KEYS; ++i) {
                    const auto key = (__m512bh)_mm512_maskz_loadu_epi16(dims, block_keys[begin + i] + dim);
#pragma GCC unroll 4
                    for (int row = 0; row < ROWS; ++row)
                        sums[row * KEYS + i] = _mm512_dpbf16_ps(sums[row * KEYS + i], key, queries[row]);
                }
            };
            const int64_t left = call.query.dim - dim;
            if (left >= 2 * LANES)
                add(~__mmask32{0});
            else
                add((__mmask32{1} << left) - 1);
        }
        __m512 found = sums_of(sums);
        if (call.softcap) {
            found = tanh(_mm512_mul_ps(found, _mm512_set1_ps(call.scale / call.softcap)));
            found = _mm512_mul_ps(found, _mm512_set1_ps(call.softcap * LOG2E));
        } else {
            found = _mm512_mul_ps(found, _mm512_set1_ps(call.scale * LOG2E));
        }
        if (block.some_hidden)
            found = _mm512_mask_mov_ps(_mm512_set1_ps(-HUGE_VALF), seen_at(block.seen + begin), found);
        for (int64_t row = 0; row < ROWS; ++row) {
            const auto its = static_cast<__mmask16>(((1u << KEYS) - 1) << row * KEYS);
            _mm512_mask_storeu_ps(scratch.scores + row * KEY_BLOCK + begin - row * KEYS, its, found);
        }
    }

    // Which keys each row sees, in the order of `score`.
    static __mmask16 seen_at(const uint64_t* seen) {
        uint32_t found = 0;
        for (int row = 0; row < ROWS; ++row)
            for (int key = 0; key < KEYS; ++key) found |= static_cast<uint32_t>(seen[key] >> row & 1) << (row * KEYS + key);
        return static_cast<__mmask16>(found);
    }

    // A row's scores become weights relative to their maximum; total and output follow.
    void weigh(int64_t row, int64_t keys) {
        const float* scores = scratch.scores + row * KEY_BLOCK;
        __m512 highest = _mm512_set1_ps(maxima[row]), total = _mm512_setzero_ps();
        for (int64_t key = 0; key < keys; key += LANES) highest = _mm512_max_ps(highest, _mm512_load_ps(scores + key));
        const __m512 maximum = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
        for (int64_t key = 0; key < keys; key += 2 * LANES) {
            const __m512 low = exp2(_mm512_sub_ps(_mm512_load_ps(scores + key), maximum));
            const __m512 high = exp2(_mm512_sub_ps(_mm512_load_ps(scores + key + LANES), maximum));
            total = _mm512_add_ps(total, _mm512_add_ps(low, high));
            const auto rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            _mm512_store_si512(scratch.weights + row * KEY_BLOCK + key, rounded);
        }
        const __m512 shrunk = exp2(_mm512_sub_ps(_mm512_set1_ps(maxima[row]), maximum));
        shrink[row] = _mm512_cvtss_f32(shrunk);
        maxima[row] = _mm512_cvtss_f32(maximum);
        totals[row] = totals[row] * shrink[row] + _mm512_reduce_add_ps(total);
    }

    template <bool NEIGHBOURS>
    void accumulate(const BlockRows<NEIGHBOURS>& block_keys, const BlockRows<NEIGHBOURS>& values, int64_t keys,
                    int64_t dim) {
        const __m512i low = alternating(0, 2 * LANES), high = alternating(LANES, 2 * LANES);
        __m512 sums[ROWS][4];
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
                sums[row][i] = _mm512_mul_ps(_mm512_load_ps(scratch.output + row * scratch.value_dim + dim + i * LANES),
                                             _mm512_set1_ps(shrink[row]));
        const int64_t dims = call.output.dim - dim;
        for (int64_t key = 0; key < keys; key += 2) {  // one behind the last has weight 0
            if (dim == 0) {
                block_keys.prefetch(key + KEY_BLOCK, call.query.dim);
                block_keys.prefetch(key + 1 + KEY_BLOCK, call.query.dim);
            }
            const bf16* even = values[key] + dim;
            const bf16* odd = values[key + 1] + dim;
            __m512bh pairs[4];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const __m512i one = load_row(even + half * 2 * LANES, dims - half * 2 * LANES);
                const __m512i other = load_row(odd + half * 2 * LANES, dims - half * 2 * LANES);
                pairs[2 * half] = (__m512bh)_mm512_permutex2var_epi16(one, low, other);
                pairs[2 * half + 1] = (__m512bh)_mm512_permutex2var_epi16(one, high, other);
            }
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row) {
                const __m512bh weight = broadcast_pair(scratch.weights + row * KEY_BLOCK + key);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) sums[row][i] = _mm512_dpbf16_ps(sums[row][i], pairs[i], weight);
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
                _mm512_store_ps(scratch.output + row * scratch.value_dim + dim + i * LANES, sums[row][i]);
    }

    const Rows& rows;
    const Call& call;
    NarrowScratch& scratch;
    float maxima[ROWS], totals[ROWS], shrink[ROWS];  // as those of WideTile
};
