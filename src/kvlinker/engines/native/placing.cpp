// Places tokens of chunks in a cache of blocks: keys are rotated, and both keys and values laid out as the cache has them.
// A few tokens of a head are taken at a time, so that their parts of the cache are still near when the next ones come.
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t WINDOW = 32;  // tokens

// Keys and values [heads, rows, dim] of a chunk in a layer.
struct Part {
    const void *key, *value;
    int64_t key_head, key_row, value_head, value_row;  // strides
};

// Keys or values [blocks, block_size, heads, dim] of a layer.
struct Cache {
    void* data;
    int64_t block, slot, head, number;  // strides: that of numbers or that of slots is 1
    int64_t dim;
};

struct Placing {
    const Part* parts;      // [layers, each]
    const Cache* caches;    // [layers, 2]
    const int64_t* tokens;  // [4, count]: part, row in it, position, slot
    const void *cos, *sin;  // [positions, pairs], each row so many numbers behind the last one
    int64_t pairs, angles;
    int64_t interleaved;  // 1: pair i is dimensions 2i and 2i + 1; 0: i and i + pairs
    int64_t layers, each, heads, count, block_size;
    int64_t threads;
};

inline Floats take(const bf16* from, int64_t count) { return load_bf16(from, count); }
inline Floats take(const float* from, int64_t count) { return load_some<Floats>(from, count); }
inline void put(bf16* to, Floats numbers, int64_t count) { store_bf16(to, numbers, count); }
inline void put(float* to, Floats numbers, int64_t count) { store_some(to, numbers, count); }

// Rotates pairs of numbers that lie beside each other.
inline void rotate_beside(const bf16* key, const bf16* cos, const bf16* sin, int64_t pairs, bf16* to) {
    for (int64_t i = 0; i < pairs; i += LANES) {
        const int64_t left = pairs - i;
        const Words both = load_some<Words>(key + 2 * i, 2 * left);
        const Floats x = low_of(both), y = high_of(both), c = take(cos + i, left), s = take(sin + i, left);
        store_some(to + 2 * i, pairs_of(x * c - y * s, y * c + x * s), 2 * left);
    }
}

inline void rotate_beside(const float* key, const float* cos, const float* sin, int64_t pairs, float* to) {
    for (int64_t i = 0; i < pairs; ++i) {
        const float x = key[2 * i], y = key[2 * i + 1];
        to[2 * i] = x * cos[i] - y * sin[i];
        to[2 * i + 1] = y * cos[i] + x * sin[i];
    }
}

template <typename T>
void rotate(const Placing& placing, const T* key, int64_t position, int64_t dim, T* to) {
    const int64_t pairs = placing.pairs;
    const T* cos = static_cast<const T*>(placing.cos) + position * placing.angles;
    const T* sin = static_cast<const T*>(placing.sin) + position * placing.angles;
    if (placing.interleaved)
        rotate_beside(key, cos, sin, pairs, to);
    else
        for (int64_t i = 0; i < pairs; i += LANES) {
            const int64_t left = pairs - i;
            const Floats x = take(key + i, left), y = take(key + pairs + i, left);
            const Floats c = take(cos + i, left), s = take(sin + i, left);
            put(to + i, x * c - y * s, left);
            put(to + pairs + i, y * c + x * s, left);
        }
    std::memcpy(to + 2 * pairs, key + 2 * pairs, (dim - 2 * pairs) * sizeof(T));
}

// Stores a vector past the caches where it is a whole line of them: placed KV is more than they hold, and is not read here.
template <typename T>
inline void store_past(T* to, Words vector) {
#if defined(__AVX512F__)
    if (reinterpret_cast<uintptr_t>(to) % sizeof vector == 0) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)vector);
        return;
    }
#endif
    store(to, vector);
}

template <typename T>
void copy_past(const T* from, int64_t count, T* to) {
    constexpr int64_t AT_ONCE = sizeof(Words) / sizeof(T);
    const int64_t whole = count / AT_ONCE * AT_ONCE;
    for (int64_t i = 0; i < whole; i += AT_ONCE) store_past(to + i, load<Words>(from + i));
    std::memcpy(to + whole, from + whole, (count - whole) * sizeof(T));
}

template <typename T>
inline void store_column(T* to, Words vector, int64_t count) {
    if (count * sizeof(T) >= sizeof vector)
        store_past(to, vector);
    else
        store_some(to, vector, count);
}

// Stores what words of `count` rows have: a number, or two, where a vector has every other row.
inline void store_turned(float* to, int64_t, const Words (*words)[LANES], int64_t word, int64_t count) {
    store_column(to, words[0][word], count);
}
inline void store_turned(bf16* to, int64_t number, const Words (*words)[LANES], int64_t word, int64_t count) {
    const Words even = words[0][word], odd = words[1][word];
    const Words low = (even & 0xffff) | odd << 16;
    const Words high = (even >> 16 & 0xffff) | (odd & static_cast<int32_t>(0xffff0000));
    store_column(to, low, count);
    store_column(to + number, high, count);
}

// Copies rows [count, dim] to columns: number i of row j to `to[i * number + j]`.
template <typename T>
void copy_turned(const T* rows, int64_t stride, int64_t count, int64_t dim, T* to, int64_t number) {
    constexpr int64_t IN_WORD = sizeof(int32_t) / sizeof(T), AT_ONCE = LANES * IN_WORD;
    const int64_t wide = dim / AT_ONCE * AT_ONCE;
    for (int64_t j = 0; j < count; j += AT_ONCE)
        for (int64_t i = 0; i < wide; i += AT_ONCE) {
            Words words[IN_WORD][LANES];
            for (int64_t every = 0; every < IN_WORD; ++every) {
                for (int64_t lane = 0; lane < LANES; ++lane) {
                    const int64_t row = std::min(j + lane * IN_WORD + every, count - 1);
                    words[every][lane] = load<Words>(rows + row * stride + i);
                }
                transpose(words[every]);
            }
            for (int64_t word = 0; word < LANES; ++word)
                store_turned(to + (i + word * IN_WORD) * number + j, number, words, word, count - j);
        }
    for (int64_t i = wide; i < dim; ++i)
        for (int64_t j = 0; j < count; ++j) to[i * number + j] = rows[j * stride + i];
}

// Tokens [first, last) whose rows in a part, and slots in a block, follow each other.
struct Run {
    int64_t first, last;
};

// The runs of all tokens, each of them in as few lines of the caches as its tokens have.
std::vector<Run> runs_of(const Placing& placing) {
    const int64_t *part = placing.tokens, *row = part + placing.count, *slot = row + 2 * placing.count;
    std::vector<Run> runs;
    for (int64_t token = 0; token < placing.count; ++token) {
        const bool goes_on = token && part[token] == part[token - 1] && row[token] == row[token - 1] + 1 &&
                             slot[token] == slot[token - 1] + 1 && slot[token] % placing.block_size % WINDOW;
        if (goes_on)
            runs.back().last = token + 1;
        else
            runs.push_back({token, token + 1});
    }
    return runs;
}

template <typename T>
void copy_rows(const T* rows, int64_t stride, int64_t count, const Cache& cache, T* to) {
    if (cache.number != 1)
        copy_turned(rows, stride, count, cache.dim, to, cache.number);
    else if (stride == cache.dim && cache.slot == cache.dim)
        copy_past(rows, count * cache.dim, to);
    else
        for (int64_t j = 0; j < count; ++j) copy_past(rows + j * stride, cache.dim, to + j * cache.slot);
}

template <typename T>
void place_run(const Placing& placing, int64_t layer, int64_t head, Run run, T* rotated) {
    const Part& part = placing.parts[layer * placing.each + placing.tokens[run.first]];
    const int64_t* positions = placing.tokens + 2 * placing.count;
    const int64_t row = placing.tokens[placing.count + run.first];
    const int64_t slot = placing.tokens[3 * placing.count + run.first];
    const int64_t count = run.last - run.first;
    const auto place_in = [&](const Cache& cache) {
        return static_cast<T*>(cache.data) + slot / placing.block_size * cache.block +
               slot % placing.block_size * cache.slot + head * cache.head;
    };
    const Cache &keys = placing.caches[2 * layer], &values = placing.caches[2 * layer + 1];
    const T* key = static_cast<const T*>(part.key) + head * part.key_head + row * part.key_row;
    const bool direct = keys.number == 1;
    T* const turned = direct ? nullptr : place_in(keys);
    T* const to = direct ? place_in(keys) : rotated;
    for (int64_t j = 0; j < count; ++j)
        rotate(placing, key + j * part.key_row, positions[run.first + j], keys.dim, to + j * (direct ? keys.slot : keys.dim));
    if (turned) copy_turned(rotated, keys.dim, count, keys.dim, turned, keys.number);
    const T* value = static_cast<const T*>(part.value) + head * part.value_head + row * part.value_row;
    copy_rows(value, part.value_row, count, values, place_in(values));
}

template <typename T>
void place(const Placing& placing) {
    const std::vector<Run> runs = runs_of(placing);
    const int64_t count = runs.size();
#pragma omp parallel num_threads(static_cast<int>(placing.threads))
    {
        const auto rotated = allocate<T>(WINDOW * placing.caches->dim);
#pragma omp for schedule(static)
        for (int64_t work = 0; work < placing.layers * placing.heads * count; ++work)
            place_run<T>(placing, work / count / placing.heads, work / count % placing.heads, runs[work % count], rotated.get());
#if defined(__AVX512F__)
        _mm_sfence();
#endif
    }
}

}  // namespace

extern "C" void kvlinker_place_bf16(const Placing* placing) { place<bf16>(*placing); }
extern "C" void kvlinker_place_fp32(const Placing* placing) { place<float>(*placing); }
