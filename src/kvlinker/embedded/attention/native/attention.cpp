// Causal attention by position, in bf16, for CPUs with AVX512-BF16: no mask in memory, and keys are read where they lie.
//
// The query heads that share a key head are folded into rows: row = query * group + head within the group. A tile of
// up to 64 neighbouring rows goes through the keys in blocks with a running softmax, as flash attention does. Rows lie
// in the lanes of vectors, 16 to each, in scores as well as in outputs:
//
//   scores[key][row] += query[pair][row] * key[pair]           pairs of key_dim; keys are broadcast from the pool
//   output[dim][row] += weight[pair][row] * value[pair][dim]   pairs of keys; values are packed in pairs first
//
// So both are the same micro-kernel, maximum and sum of the softmax need no work across lanes, and a mask is a
// comparison with the rows' positions. Sums and softmax are fp32; weights are rounded to bf16.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

using bf16 = uint16_t;

// bf16 [heads, rows, dim]. Strides count elements; that of dim is 1.
struct Heads {
    bf16* data;
    int64_t heads, rows, dim, head_stride, row_stride;

    bf16* at(int64_t head, int64_t row) const { return data + head * head_stride + row * row_stride; }
};

// One call; kernels.py has the same structure. Query i sees keys 0 to positions[i], or the last `window` of them.
struct Call {
    Heads query, key, value, output;  // key_dim is even
    const int64_t* positions;         // [queries], ascending, all below key.rows
    const float* sinks;               // [query.heads] logits, or null
    float scale;
    float softcap;  // 0: none
    int64_t window;  // 0: none
    int64_t threads;
};

namespace {

constexpr int LANES = 16;         // rows in a vector
constexpr int MOST_VECTORS = 4;   // vectors of rows in a tile
constexpr int SUMS = 16;          // accumulators of the micro-kernel
constexpr int KEY_BLOCK = 128;    // keys whose scores exist at once; a multiple of SUMS
constexpr float LOWEST = -1e30f;  // below all scores, but finite: differences of maxima are numbers
constexpr float LOG2E = 1.44269504f;

int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// 2^x with a relative error of 3e-6; 0 below -200. NaN stays NaN.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 power = _mm512_set1_ps(0.0135341678f);
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0.0520114638f));
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0.241442755f));
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0.693003833f));
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(1.0000026f));
    return _mm512_scalef_ps(power, x);  // times 2^floor(x)
}

// 1 - 2 / (e^2x + 1)
inline __m512 tanh(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 power = exp2(_mm512_mul_ps(x, _mm512_set1_ps(2 * LOG2E)));
    return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one)));
}

// 16-bit indices that take from two halves in turn: first, first + distance, first + 1, first + 1 + distance, ...
inline __m512i alternating(int first, int distance) {
    const __m512i counted = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i both = _mm512_mullo_epi32(counted, _mm512_set1_epi32(0x10001));
    return _mm512_add_epi32(both, _mm512_set1_epi32(first * 0x10001 + distance * 0x10000));
}

inline __m512bh broadcast_pair(const bf16* two) {
    int32_t bits;
    std::memcpy(&bits, two, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(bits);
}

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
class Scratch {
  public:
    explicit Scratch(const Call& call) : value_dim(round_up(call.value.dim, 2 * LANES)) {
        const int64_t key_pairs = call.key.dim / 2, pairs = KEY_BLOCK / 2;
        const int64_t packed = pairs * value_dim / LANES, tail = round_up(SUMS * key_pairs, LANES) / LANES;
        const int64_t row_vectors = key_pairs + value_dim + KEY_BLOCK + pairs;
        const int64_t vectors = MOST_VECTORS * row_vectors + packed + tail;
        memory.reset(std::aligned_alloc(sizeof(__m512i), vectors * sizeof(__m512i)));
        query = static_cast<__m512i*>(memory.get());
        output = reinterpret_cast<__m512*>(query + MOST_VECTORS * key_pairs);
        scores = output + MOST_VECTORS * value_dim;
        weights = reinterpret_cast<__m512i*>(scores + MOST_VECTORS * KEY_BLOCK);
        values = weights + MOST_VECTORS * pairs;
        last_keys = reinterpret_cast<bf16*>(values + packed);
    }

    const int64_t value_dim;  // rounded up to whole vectors of bf16
    __m512i* query;           // [key_dim / 2][vectors], pairs of key_dim
    __m512* output;           // [value_dim][vectors], relative to the maxima so far
    __m512* scores;           // [KEY_BLOCK][vectors], times log2(e)
    __m512i* weights;         // [KEY_BLOCK / 2][vectors], pairs of keys
    __m512i* values;          // [KEY_BLOCK / 2][value_dim], pairs of keys
    bf16* last_keys;          // [SUMS][key_dim], filled up with zeros

  private:
    struct Free {
        void operator()(void* allocated) const { std::free(allocated); }
    };
    std::unique_ptr<void, Free> memory;
};

// Rows [first_row, first_row + rows) of one key head, at most VECTORS * LANES.
template <int VECTORS>
class Tile {
  public:
    Tile(const Call& call, Scratch& scratch, int64_t head, int64_t first_row, int64_t rows)
        : call(call), scratch(scratch), head(head), first_row(first_row), rows(rows),
          group(call.query.heads / call.key.heads) {}

    void compute() {
        start();
        const int64_t first_position = position(0), last_position = position(rows - 1);
        const int64_t first_seen = call.window ? std::max<int64_t>(first_position - call.window + 1, 0) : 0;
        for (int64_t first = first_seen; first <= last_position; first += KEY_BLOCK) {
            const int64_t keys = std::min<int64_t>(last_position + 1 - first, KEY_BLOCK);
            const int64_t padded = round_up(keys, SUMS);
            const bool too_late = first + padded - 1 > first_position;
            const bool too_early = call.window && first <= last_position - call.window;
            if (too_late || too_early)
                score<true>(first, padded);
            else
                score<false>(first, padded);
            weigh(padded);
            pack_values(first, keys, padded);
            accumulate(padded);
        }
        finish();
    }

  private:
    static constexpr int OTHERS = SUMS / VECTORS;  // keys or dims that the micro-kernel takes at once

    int64_t query_of(int64_t row) const { return (first_row + row) / group; }
    int64_t query_head(int64_t row) const { return head * group + (first_row + row) % group; }
    int64_t position(int64_t row) const { return call.positions[query_of(row)]; }

    // Packs the queries. A sink is a key with that score and value 0, seen first.
    void start() {
        alignas(64) int32_t row_positions[VECTORS * LANES];
        alignas(64) float row_sinks[VECTORS * LANES];
        auto* packed = reinterpret_cast<bf16*>(scratch.query);
        for (int64_t lane = 0; lane < VECTORS * LANES; ++lane) {
            const int64_t row = std::min(lane, rows - 1);  // lanes without a row repeat the last
            row_positions[lane] = static_cast<int32_t>(position(row));
            row_sinks[lane] = call.sinks ? std::max(call.sinks[query_head(row)] * LOG2E, LOWEST) : LOWEST;
            const bf16* query = call.query.at(query_head(row), query_of(row));
            for (int64_t dim = 0; dim < call.key.dim; dim += 2)
                std::memcpy(packed + dim * VECTORS * LANES + 2 * lane, query + dim, 2 * sizeof(bf16));
        }
        for (int v = 0; v < VECTORS; ++v) {
            positions[v] = _mm512_load_si512(row_positions + v * LANES);
            maxima[v] = _mm512_load_ps(row_sinks + v * LANES);
            totals[v] = _mm512_set1_ps(call.sinks ? 1.0f : 0.0f);
        }
        std::fill(scratch.output, scratch.output + scratch.value_dim * VECTORS, _mm512_setzero_ps());
    }

    // Scores of the keys from `first` on, -inf where hidden, and the maxima that follow.
    template <bool SOME_HIDDEN>
    void score(int64_t first, int64_t keys) {
        const __m512 factor = _mm512_set1_ps(call.softcap ? call.scale / call.softcap : call.scale * LOG2E);
        __m512 highest[VECTORS];
        std::copy(maxima, maxima + VECTORS, highest);
        for (int64_t key = 0; key < keys; key += OTHERS) {
            const bool ends = SOME_HIDDEN && first + key + OTHERS > call.key.rows;
            const bf16* source = ends ? copy_last_keys(first + key) : call.key.at(head, first + key);
            __m512 sums[OTHERS][VECTORS] = {};
            multiply<VECTORS>(sums, scratch.query, source, ends ? call.key.dim : call.key.row_stride, 2,
                              call.key.dim / 2);
#pragma GCC unroll 16
            for (int i = 0; i < OTHERS; ++i) {
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; ++v) {
                    __m512 found = _mm512_mul_ps(sums[i][v], factor);
                    if (call.softcap) found = _mm512_mul_ps(tanh(found), _mm512_set1_ps(call.softcap * LOG2E));
                    if (SOME_HIDDEN) found = hide(found, first + key + i, positions[v]);
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

    __m512 hide(__m512 scores, int64_t key, __m512i row_positions) const {
        const __m512i at = _mm512_set1_epi32(static_cast<int32_t>(key));
        __mmask16 seen = _mm512_cmple_epi32_mask(at, row_positions);
        if (call.window) {
            const __m512i leaves = _mm512_set1_epi32(static_cast<int32_t>(key + call.window));
            seen &= _mm512_cmpgt_epi32_mask(leaves, row_positions);
        }
        return _mm512_mask_mov_ps(_mm512_set1_ps(-HUGE_VALF), seen, scores);
    }

    // Nothing behind the last key may be read.
    const bf16* copy_last_keys(int64_t first) {
        std::memset(scratch.last_keys, 0, OTHERS * call.key.dim * sizeof(bf16));
        for (int64_t key = first; key < call.key.rows; ++key)
            std::memcpy(scratch.last_keys + (key - first) * call.key.dim, call.key.at(head, key),
                        call.key.dim * sizeof(bf16));
        return scratch.last_keys;
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

    // Values of `keys` keys from `first` on, in pairs; zeros for the keys and dims that fill up.
    void pack_values(int64_t first, int64_t keys, int64_t padded) {
        const __m512i low = alternating(0, 2 * LANES), high = alternating(LANES, 2 * LANES);
        __m512i* packed = scratch.values;
        for (int64_t key = 0; key < padded; key += 2) {
            for (int64_t dim = 0; dim < scratch.value_dim; dim += 2 * LANES, packed += 2) {
                const __m512i even = key < keys ? values(first + key, dim) : _mm512_setzero_si512();
                const __m512i odd = key + 1 < keys ? values(first + key + 1, dim) : _mm512_setzero_si512();
                packed[0] = _mm512_permutex2var_epi16(even, low, odd);
                packed[1] = _mm512_permutex2var_epi16(even, high, odd);
            }
        }
    }

    __m512i values(int64_t key, int64_t dim) const {
        const int64_t missing = std::max<int64_t>(dim + 2 * LANES - call.value.dim, 0);
        return _mm512_maskz_loadu_epi16(~__mmask32{0} >> missing, call.value.at(head, key) + dim);
    }

    void accumulate(int64_t keys) {
        const auto* packed = reinterpret_cast<const bf16*>(scratch.values);
        for (int64_t dim = 0; dim < call.value.dim; dim += OTHERS) {
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

    void finish() {
        alignas(32) bf16 rounded[LANES];
        for (int v = 0; v * LANES < rows; ++v) {
            const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), totals[v]);
            const int64_t lanes = std::min<int64_t>(rows - v * LANES, LANES);
            bf16* targets[LANES];
            for (int64_t lane = 0; lane < lanes; ++lane)
                targets[lane] = call.output.at(query_head(v * LANES + lane), query_of(v * LANES + lane));
            for (int64_t dim = 0; dim < call.value.dim; ++dim) {
                const __m512 found = _mm512_mul_ps(scratch.output[dim * VECTORS + v], inverse);
                _mm256_store_si256(reinterpret_cast<__m256i*>(rounded), (__m256i)_mm512_cvtneps_pbh(found));
                for (int64_t lane = 0; lane < lanes; ++lane) targets[lane][dim] = rounded[lane];
            }
        }
    }

    const Call& call;
    Scratch& scratch;
    const int64_t head, first_row, rows, group;
    __m512i positions[VECTORS];
    __m512 maxima[VECTORS];  // of the scores so far
    __m512 totals[VECTORS];  // of the weights so far
    __m512 shrink[VECTORS];  // what the weights before this block are multiplied by
};

void compute_tile(const Call& call, Scratch& scratch, int64_t head, int64_t first_row, int64_t rows) {
    if (rows <= LANES)
        Tile<1>(call, scratch, head, first_row, rows).compute();
    else if (rows <= 2 * LANES)
        Tile<2>(call, scratch, head, first_row, rows).compute();
    else
        Tile<MOST_VECTORS>(call, scratch, head, first_row, rows).compute();
}

}  // namespace

extern "C" void kvlinker_attention(const Call* call) {
    const int64_t rows = call->query.rows * (call->query.heads / call->key.heads);
    const auto tiles_of = [rows](int64_t size) { return (rows + size - 1) / size; };
    int64_t tile_rows = MOST_VECTORS * LANES;
    while (tile_rows > LANES && tiles_of(tile_rows) * call->key.heads < 2 * call->threads) tile_rows /= 2;
    const int64_t tiles = tiles_of(tile_rows), items = tiles * call->key.heads;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(call->threads))
    {
        Scratch scratch(*call);
        for (int64_t item = next++; item < items; item = next++) {
            const int64_t first_row = (tiles - 1 - item % tiles) * tile_rows;  // those that see most come first
            compute_tile(*call, scratch, item / tiles, first_row, std::min(rows - first_row, tile_rows));
        }
    }
}
