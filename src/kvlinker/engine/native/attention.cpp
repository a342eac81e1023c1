// Causal attention by position for bf16 on CPUs with AVX512-BF16, without masks in memory and without packing keys.
//
// The query heads that share a key head are folded into rows: row = query * group + head in group. A tile of up to 64
// neighbouring rows goes through the keys in blocks, as flash attention does. Rows lie in the lanes of the vectors, 16
// to a vector, for scores as well as for outputs:
//
//   scores[key][row]  += query[pair][row] * key[pair]            pairs of key_dim; keys are broadcast from the pool
//   output[dim][row]  += weight[pair][row] * value[pair][dim]    pairs of keys; values are packed in pairs first
//
// so both are one micro-kernel, maximum and sum of the softmax are vertical, and a mask is a comparison of positions.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

constexpr int LANES = 16;        // rows in a vector
constexpr int REGISTERS = 16;    // accumulators of the micro-kernel
constexpr int KEY_BLOCK = 128;   // keys whose scores exist at once; a multiple of 2 * REGISTERS
constexpr float LOWEST = -1e30f; // finite, so that the difference of two maxima is never NaN
constexpr float LOG2E = 1.44269504f;

using bf16 = uint16_t;

inline int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

}  // namespace

// bf16 [heads, rows, dim]; strides in elements, that of dim is 1.
struct Heads {
    bf16* data;
    int64_t heads, rows, dim, head_stride, row_stride;

    bf16* at(int64_t head, int64_t row) const { return data + head * head_stride + row * row_stride; }
};

struct Call {
    Heads query, key, value, output;
    const int64_t* positions;  // [query.rows], ascending
    const float* sinks;        // [query.heads], or null
    float scale;
    float softcap;   // 0: none
    int64_t window;  // 0: none
    int64_t threads;
};

namespace {

inline __m512 exp2(__m512 x) {
    // 2^floor(x) * polynomial of the fraction, relative error 3e-6; 0 below -200. NaN stays.
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 power = _mm512_set1_ps(0.013534167781472206f);
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0.05201146379113197f));
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0.2414427548646927f));
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0.6930038332939148f));
    power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(1.0000026226043701f));
    return _mm512_scalef_ps(power, x);
}

inline __m512 tanh(__m512 x) {
    // 1 - 2 / (e^2x + 1)
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 power = exp2(_mm512_mul_ps(x, _mm512_set1_ps(2 * LOG2E)));
    return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one)));
}

// The 16-bit indices first, first + distance, first + 1, first + 1 + distance, …
inline __m512i alternating(int first, int distance) {
    const __m512i counted = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i twice = _mm512_mullo_epi32(counted, _mm512_set1_epi32(0x10001));
    return _mm512_add_epi32(twice, _mm512_set1_epi32(first * 0x10001 + distance * 0x10000));
}

inline __m512bh pair(const void* two) {
    int32_t bits;
    std::memcpy(&bits, two, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(bits);
}

// sums[i][v] += lanes[step][v] * others[i * other_stride + step * step_stride], products of pairs, for all steps.
template <int VECTORS>
inline void multiply(__m512 (&sums)[REGISTERS / VECTORS][VECTORS], const __m512i* lanes, const bf16* others,
                     int64_t other_stride, int64_t step_stride, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step, lanes += VECTORS, others += step_stride) {
        __m512bh rows[VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) rows[v] = (__m512bh)_mm512_load_si512(lanes + v);
#pragma GCC unroll 16
        for (int i = 0; i < REGISTERS / VECTORS; ++i) {
            const __m512bh other = pair(others + i * other_stride);
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) sums[i][v] = _mm512_dpbf16_ps(sums[i][v], rows[v], other);
        }
    }
}

// What a thread needs besides the tensors, for tiles of at most 64 rows.
struct Scratch {
    explicit Scratch(const Call& call) {
        const int64_t key_pairs = call.key.dim / 2, value_dim = round_up(call.value.dim, 2 * LANES);
        const int64_t vectors = REGISTERS / 4 * (key_pairs + value_dim + KEY_BLOCK + KEY_BLOCK / 2);
        const int64_t packed = KEY_BLOCK / 2 * value_dim / LANES, tail = REGISTERS * key_pairs / LANES + 1;
        memory.reset(static_cast<__m512i*>(std::aligned_alloc(64, (vectors + packed + tail) * sizeof(__m512i))));
        query = memory.get();
        output = reinterpret_cast<__m512*>(query + 4 * key_pairs);
        scores = output + 4 * value_dim;
        weights = reinterpret_cast<__m512i*>(scores + 4 * KEY_BLOCK);
        values = weights + 4 * KEY_BLOCK / 2;
        keys = reinterpret_cast<bf16*>(values + packed);
    }

    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<__m512i, Free> memory;
    __m512i* query;    // [key_dim / 2][vectors], pairs
    __m512* output;    // [value_dim][vectors]
    __m512* scores;    // [KEY_BLOCK][vectors], times log2(e)
    __m512i* weights;  // [KEY_BLOCK / 2][vectors], pairs
    __m512i* values;   // [KEY_BLOCK / 2][value_dim], pairs
    bf16* keys;        // [REGISTERS][key_dim]: the last ones, filled up with zeros
};

template <int VECTORS>
class Tile {
    static constexpr int OTHERS = REGISTERS / VECTORS;

  public:
    Tile(const Call& call, Scratch& scratch, int64_t head, int64_t first_row, int64_t rows)
        : call(call), scratch(scratch), head(head), first_row(first_row), rows(rows),
          group(call.query.heads / call.key.heads), value_dim(round_up(call.value.dim, 2 * LANES)) {
        first_position = position(0);
        last_position = position(rows - 1);
    }

    void run() {
        start();
        const int64_t begin = call.window ? std::max<int64_t>(first_position - call.window + 1, 0) : 0;
        for (int64_t first = begin; first <= last_position; first += KEY_BLOCK) {
            const int64_t keys = std::min<int64_t>(last_position + 1 - first, KEY_BLOCK);
            const bool hidden =
                first + KEY_BLOCK - 1 > first_position || (call.window && first <= last_position - call.window);
            const int64_t steps = round_up(keys, 2 * OTHERS > LANES ? LANES : 2 * OTHERS);
            if (hidden)
                score<true>(first, steps);
            else
                score<false>(first, steps);
            pack_values(first, keys, steps);
            weigh(steps);
            accumulate(steps);
        }
        finish();
    }

  private:
    int64_t position(int64_t row) const { return call.positions[(first_row + row) / group]; }
    int64_t query_head(int64_t row) const { return head * group + (first_row + row) % group; }

    void start() {
        alignas(64) int32_t row_positions[VECTORS * LANES];
        alignas(64) float row_sinks[VECTORS * LANES];
        auto* packed = reinterpret_cast<int32_t*>(scratch.query);
        for (int64_t row = 0; row < VECTORS * LANES; ++row) {
            const int64_t real = std::min(row, rows - 1);  // what fills the tile up repeats the last row
            row_positions[row] = static_cast<int32_t>(position(real));
            row_sinks[row] = call.sinks ? std::max(call.sinks[query_head(real)] * LOG2E, LOWEST) : LOWEST;
            const bf16* query = call.query.at(query_head(real), (first_row + real) / group);
            for (int64_t step = 0; step < call.key.dim / 2; ++step)
                std::memcpy(packed + step * VECTORS * LANES + row, query + 2 * step, sizeof(int32_t));
        }
        for (int v = 0; v < VECTORS; ++v) {
            positions[v] = _mm512_load_si512(row_positions + v * LANES);
            maxima[v] = _mm512_load_ps(row_sinks + v * LANES);
            totals[v] = _mm512_set1_ps(call.sinks ? 1.0f : 0.0f);
        }
        std::fill(scratch.output, scratch.output + value_dim * VECTORS, _mm512_setzero_ps());
    }

    // Scores of keys [first, first + keys) and the new maxima.
    template <bool HIDDEN>
    void score(int64_t first, int64_t keys) {
        const __m512 factor = _mm512_set1_ps(call.softcap ? call.scale / call.softcap : call.scale * LOG2E);
        __m512 highest[VECTORS];
        std::copy(maxima, maxima + VECTORS, highest);
        for (int64_t key = 0; key < keys; key += OTHERS) {
            const bf16* source = call.key.at(head, first + key);
            int64_t stride = call.key.row_stride;
            if (HIDDEN && first + key + OTHERS > call.key.rows) {
                source = last_keys(first + key);
                stride = call.key.dim;
            }
            __m512 sums[OTHERS][VECTORS] = {};
            multiply<VECTORS>(sums, scratch.query, source, stride, 2, call.key.dim / 2);
#pragma GCC unroll 16
            for (int i = 0; i < OTHERS; ++i) {
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; ++v) {
                    __m512 found = _mm512_mul_ps(sums[i][v], factor);
                    if (call.softcap) found = _mm512_mul_ps(tanh(found), _mm512_set1_ps(call.softcap * LOG2E));
                    if (HIDDEN) found = hide(found, first + key + i, positions[v]);
                    highest[v] = _mm512_max_ps(highest[v], found);
                    _mm512_store_ps(scratch.scores + (key + i) * VECTORS + v, found);
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
            const __m512i window = _mm512_set1_epi32(static_cast<int32_t>(call.window));
            seen &= _mm512_cmpgt_epi32_mask(_mm512_add_epi32(at, window), row_positions);
        }
        return _mm512_mask_mov_ps(_mm512_set1_ps(-HUGE_VALF), seen, scores);
    }

    const bf16* last_keys(int64_t first) {
        std::memset(scratch.keys, 0, OTHERS * call.key.dim * sizeof(bf16));
        for (int64_t key = first; key < call.key.rows; ++key)
            std::memcpy(scratch.keys + (key - first) * call.key.dim, call.key.at(head, key),
                        call.key.dim * sizeof(bf16));
        return scratch.keys;
    }

    // Scores become weights; the totals follow.
    void weigh(int64_t keys) {
        const __m512i interleaved = alternating(0, LANES);
        for (int v = 0; v < VECTORS; ++v) {
            __m512 total = _mm512_mul_ps(totals[v], shrink[v]);
            for (int64_t step = 0; step < keys / 2; ++step) {
                const __m512* scores = scratch.scores + 2 * step * VECTORS + v;
                const __m512 even = exp2(_mm512_sub_ps(scores[0], maxima[v]));
                const __m512 odd = exp2(_mm512_sub_ps(scores[VECTORS], maxima[v]));
                total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
                const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
                scratch.weights[step * VECTORS + v] = _mm512_permutexvar_epi16(interleaved, both);
            }
            totals[v] = total;
        }
    }

    void pack_values(int64_t first, int64_t keys, int64_t padded) {
        const __m512i low = alternating(0, 2 * LANES), high = alternating(LANES, 2 * LANES);
        for (int64_t step = 0; step < padded / 2; ++step) {
            __m512i* packed = scratch.values + step * value_dim / LANES;
            for (int64_t dim = 0; dim < value_dim; dim += 2 * LANES, packed += 2) {
                const __m512i even = some_values(first + 2 * step, dim, 2 * step < keys);
                const __m512i odd = some_values(first + 2 * step + 1, dim, 2 * step + 1 < keys);
                packed[0] = _mm512_permutex2var_epi16(even, low, odd);
                packed[1] = _mm512_permutex2var_epi16(even, high, odd);
            }
        }
    }

    __m512i some_values(int64_t key, int64_t dim, bool exists) const {
        const int64_t count = exists ? std::clamp<int64_t>(call.value.dim - dim, 0, 2 * LANES) : 0;
        const __mmask32 mask = count == 32 ? ~0u : (1u << count) - 1;
        return _mm512_maskz_loadu_epi16(mask, call.value.at(head, exists ? key : 0) + dim);
    }

    void accumulate(int64_t keys) {
        const auto* values = reinterpret_cast<const bf16*>(scratch.values);
        for (int64_t dim = 0; dim < value_dim; dim += OTHERS) {
            __m512* output = scratch.output + dim * VECTORS;
            __m512 sums[OTHERS][VECTORS];
#pragma GCC unroll 16
            for (int i = 0; i < OTHERS; ++i)
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; ++v) sums[i][v] = _mm512_mul_ps(output[i * VECTORS + v], shrink[v]);
            multiply<VECTORS>(sums, scratch.weights, values + 2 * dim, 2, 2 * value_dim, keys / 2);
#pragma GCC unroll 16
            for (int i = 0; i < OTHERS; ++i)
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; ++v) output[i * VECTORS + v] = sums[i][v];
        }
    }

    void finish() {
        __m512 inverse[VECTORS];
        for (int v = 0; v < VECTORS; ++v) inverse[v] = _mm512_div_ps(_mm512_set1_ps(1.0f), totals[v]);
        for (int64_t dim = 0; dim < call.value.dim; ++dim) {
            for (int v = 0; v < VECTORS; ++v) {
                const __m512 found = _mm512_mul_ps(scratch.output[dim * VECTORS + v], inverse[v]);
                alignas(32) bf16 rounded[LANES];
                _mm256_store_si256(reinterpret_cast<__m256i*>(rounded), (__m256i)_mm512_cvtneps_pbh(found));
                for (int64_t row = v * LANES; row < std::min<int64_t>(rows, (v + 1) * LANES); ++row)
                    call.output.at(query_head(row), (first_row + row) / group)[dim] = rounded[row % LANES];
            }
        }
    }

    const Call& call;
    Scratch& scratch;
    const int64_t head, first_row, rows, group, value_dim;
    int64_t first_position, last_position;
    __m512i positions[VECTORS];
    __m512 maxima[VECTORS], totals[VECTORS], shrink[VECTORS];
};

}  // namespace

extern "C" void kvlinker_attention(const Call* call) {
    const int64_t rows = call->query.rows * (call->query.heads / call->key.heads);
    const int64_t tiles = (rows + 4 * LANES - 1) / (4 * LANES);
    const int64_t items = tiles * call->key.heads;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(std::min(call->threads, items)))
    {
        Scratch scratch(*call);
        for (int64_t item = next++; item < items; item = next++) {
            const int64_t head = item / tiles;
            const int64_t first = (tiles - 1 - item % tiles) * 4 * LANES;  // the longest first
            const int64_t count = std::min<int64_t>(rows - first, 4 * LANES);
            if (count <= LANES)
                Tile<1>(*call, scratch, head, first, count).run();
            else if (count <= 2 * LANES)
                Tile<2>(*call, scratch, head, first, count).run();
            else
                Tile<4>(*call, scratch, head, first, count).run();
        }
    }
}
