// Places tokens of chunks in a cache of blocks: keys are rotated, and both keys and values laid out as the cache has them.
// A few tokens of a head are taken at a time, so that their parts of the cache are still near when the next ones come.
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

// Stores what tokens have in a word: a number, or two that are in a row each.
inline void store_turned(float* to, int64_t, Words word) { store(to, word); }
inline void store_turned(bf16* to, int64_t stride, Words word) {
    store(to, __builtin_convertvector(word, Rounded));
    store(to + stride, __builtin_convertvector(word >> 16, Rounded));
}

// Copies rows [count, dim] to columns: number i of row j to `to[i * number + j]`.
template <typename T>
void copy_turned(const T* rows, int64_t stride, int64_t count, int64_t dim, T* to, int64_t number) {
    constexpr int64_t IN_WORD = sizeof(int32_t) / sizeof(T), AT_ONCE = LANES * IN_WORD;
    const int64_t turned = count / LANES * LANES, wide = dim / AT_ONCE * AT_ONCE;
    for (int64_t i = 0; i < wide; i += AT_ONCE)
        for (int64_t j = 0; j < turned; j += LANES) {
            Words words[LANES];
            for (int64_t lane = 0; lane < LANES; ++lane) words[lane] = load<Words>(rows + (j + lane) * stride + i);
            transpose(words);
            for (int64_t word = 0; word < LANES; ++word)
                store_turned(to + (i + word * IN_WORD) * number + j, number, words[word]);
        }
    for (int64_t i = 0; i < dim; ++i)
        for (int64_t j = i < wide ? turned : 0; j < count; ++j) to[i * number + j] = rows[j * stride + i];
}

// Tokens [first, last) whose rows in a part, and slots in a block, follow each other.
struct Run {
    int64_t first, last;
};

inline Run next_run(const Placing& placing, int64_t first, int64_t end) {
    const int64_t *part = placing.tokens, *row = part + placing.count, *slot = row + 2 * placing.count;
    int64_t last = first + 1;
    while (last < end && part[last] == part[first] && row[last] == row[last - 1] + 1 && slot[last] == slot[last - 1] + 1 &&
           slot[last] % placing.block_size)
        ++last;
    return {first, last};
}

template <typename T>
void copy_rows(const T* rows, int64_t stride, int64_t count, const Cache& cache, T* to) {
    if (cache.number != 1)
        copy_turned(rows, stride, count, cache.dim, to, cache.number);
    else if (stride == cache.dim && cache.slot == cache.dim)
        std::memcpy(to, rows, count * cache.dim * sizeof(T));
    else
        for (int64_t j = 0; j < count; ++j) std::memcpy(to + j * cache.slot, rows + j * stride, cache.dim * sizeof(T));
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
    for (int64_t i = 0; turned && i < keys.dim; ++i) __builtin_prefetch(turned + i * keys.number, 1);
    for (int64_t j = 0; j < count; ++j)
        rotate(placing, key + j * part.key_row, positions[run.first + j], keys.dim, to + j * (direct ? keys.slot : keys.dim));
    if (turned) copy_turned(rotated, keys.dim, count, keys.dim, turned, keys.number);
    const T* value = static_cast<const T*>(part.value) + head * part.value_head + row * part.value_row;
    copy_rows(value, part.value_row, count, values, place_in(values));
}

template <typename T>
void place(const Placing& placing) {
    const int64_t windows = round_up(placing.count, WINDOW) / WINDOW;
#pragma omp parallel num_threads(static_cast<int>(placing.threads))
    {
        const auto rotated = allocate<T>(WINDOW * placing.caches->dim);
#pragma omp for schedule(static)
        for (int64_t work = 0; work < placing.layers * placing.heads * windows; ++work) {
            const int64_t begin = work % windows * WINDOW, end = std::min(begin + WINDOW, placing.count);
            const int64_t head = work / windows % placing.heads, layer = work / windows / placing.heads;
            for (Run run = next_run(placing, begin, end);; run = next_run(placing, run.last, end)) {
                place_run<T>(placing, layer, head, run, rotated.get());
                if (run.last == end) break;
            }
        }
    }
}

}  // namespace

extern "C" void kvlinker_place_bf16(const Placing* placing) { place<bf16>(*placing); }
extern "C" void kvlinker_place_fp32(const Placing* placing) { place<float>(*placing); }
