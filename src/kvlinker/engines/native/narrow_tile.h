// A tile of few rows, as a sequence has that decodes: dims lie in the lanes of vectors, both of keys and of values, so
// that nothing is wasted on lanes without a row. For more than four rows, keys are transposed instead, a key in each lane:
// that costs as much for one row as for eight, and no lanes are summed.
#pragma once

#include "exponents.h"
#include "numbers.h"
#include "rows.h"

constexpr int NARROW_ROWS = LANES == 16 ? 8 : 4;

// One thread's memory, large enough for every narrow tile of a call.
class NarrowScratch {
  public:
    explicit NarrowScratch(const Call& call)
        : key_dim(round_up(call.query.dim, 2 * LANES)), value_dim(round_up(call.output.dim, 4 * LANES)),
          outputs(allocate<float>(NARROW_ROWS * value_dim)), scores(allocate<float>(NARROW_ROWS * KEY_BLOCK)),
          weights(allocate<Part>(NARROW_ROWS * KEY_BLOCK)), rotated(allocate<bf16>(NARROW_ROWS * key_dim)),
          queries(allocate<Numbers>(NARROW_ROWS * key_dim / LANES)) {}

    float* output(int64_t row) const { return outputs.get() + row * value_dim; }

    const int64_t key_dim, value_dim;            // rounded up to what is computed at once
    const std::unique_ptr<float, Free> outputs;    // [rows][value_dim], relative to the maxima so far
    const std::unique_ptr<float, Free> scores;     // [rows][KEY_BLOCK], times log2(e)
    const std::unique_ptr<Part, Free> weights;     // [rows][KEY_BLOCK]
    const std::unique_ptr<bf16, Free> rotated;     // [rows][key_dim]
    const std::unique_ptr<Numbers, Free> queries;  // [key_dim / (2 * LANES)][rows][IN_WORDS], or lane after lane of it:
                                                   // [key_dim / IN_NUMBER][rows], a number each
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
        if (NEIGHBOURS) ::prefetch(first + stride * index, dim);
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
        : rows(rows), call(rows.call), scratch(scratch), exponents(rows.call) {
        for (int64_t row = 0; row < ROWS; ++row) {
            maxima[row] = with_sinks && row < rows.count ? rows.sink(row) : LOWEST;
            totals[row] = with_sinks ? 1.0f : 0.0f;
        }
        std::fill(scratch.output(0), scratch.output(ROWS), 0.0f);
        std::fill(query(0), query(ROWS), 0);
    }

    // Where a row's rotated query is to be written before `take_queries`.
    bf16* query(int64_t row) { return scratch.rotated.get() + row * scratch.key_dim; }

    void take_queries() {
        Numbers* to = scratch.queries.get();
        for (int64_t dim = 0; dim < scratch.key_dim; dim += 2 * LANES, to += ROWS * IN_WORDS)
            for (int64_t row = 0; row < ROWS; ++row) {
                Numbers numbers[IN_WORDS];
                put_pairs(numbers, 1, load<Words>(query(row) + dim));
                for (int64_t j = 0; j < IN_WORDS; ++j)
                    if (TRANSPOSES)
                        for (int64_t lane = 0; lane < LANES; ++lane) {
                            const int64_t at = (lane * IN_WORDS + j) * ROWS + row;
                            to[at / LANES][at % LANES] = numbers[j][lane];
                        }
                    else
                        to[row * IN_WORDS + j] = numbers[j];
            }
    }

    void compute_block(const Visit& visit, const KeyBlock& block) {
        const Segment& segment = call.segments[visit.segment];
        if (block.neighbours)
            compute<true>(segment, block);
        else
            compute<false>(segment, block);
    }

    void write_outputs() {
        for (int64_t row = 0; row < rows.count; ++row) {
            const float inverse = totals[row] == 0.0f ? 0.0f : 1.0f / totals[row];
            for (int64_t dim = 0; dim < call.output.dim; dim += LANES)
                store_bf16(rows.output(row) + dim, load<Floats>(scratch.output(row) + dim) * inverse,
                           call.output.dim - dim);
        }
    }

    // `first_place` is that of the bundle's first query.
    void write_partials(const Partials& partials, int64_t first_place) {
        for (int64_t row = 0; row < rows.count; ++row) {
            const int64_t place = rows.place(row, first_place), head = rows.head_of[row];
            const float* from = scratch.output(row);
            std::copy(from, from + call.output.dim, partials.outputs(place, head));
            partials.maximum(place, head) = maxima[row];
            partials.total(place, head) = totals[row];
        }
    }

  private:
    static constexpr int TOGETHER = ROWS > 4 || REGISTERS == 16 ? 2 : 4;  // vectors of value dims, summed at once
    static constexpr bool TRANSPOSES = ROWS > 4;                          // keys, so that each is in a lane
    static constexpr int KEYS = TRANSPOSES ? LANES : LANES / ROWS;        // that are scored at once

    template <bool NEIGHBOURS>
    void compute(const Segment& segment, const KeyBlock& block) {
        const BlockRows<NEIGHBOURS> keys(segment.key, block, rows.head), values(segment.value, block, rows.head);
        const int64_t count = round_up(block.count, KEYS_TOGETHER);
        for (int64_t key = 0; key < count; key += KEYS) {
            for (int64_t ahead = key; ahead < key + KEYS; ++ahead) values.prefetch(ahead, call.output.dim);
            score(keys, block, key);
        }
        for (int64_t row = 0; row < ROWS; ++row) weigh(row, count);
        for (int64_t dim = 0; dim < scratch.value_dim; dim += TOGETHER * LANES)
            accumulate(keys, values, block.count, dim);
    }

    // Scores of KEYS keys of a block for all rows, -inf where hidden.
    template <bool NEIGHBOURS>
    void score(const BlockRows<NEIGHBOURS>& block_keys, const KeyBlock& block, int64_t begin) {
        Floats sums[TRANSPOSES ? ROWS : LANES] = {};  // of each row, or of row and key: row * KEYS + key
        const bf16* at[KEYS];
        for (int i = 0; i < KEYS; ++i) at[i] = block_keys[begin + i];
        const Numbers* queries = scratch.queries.get();
        const auto add = [&](auto key_at) __attribute__((always_inline)) {
            if constexpr (TRANSPOSES)
                add_transposed(sums, queries, key_at);
            else
                add_rows(sums, queries, key_at);
        };
        int64_t dim = 0;
        for (; dim + 2 * LANES <= call.query.dim; dim += 2 * LANES, queries += ROWS * IN_WORDS)
            add([&](int i) __attribute__((always_inline)) { return load<Words>(at[i] + dim); });
        if (dim < call.query.dim) add([&](int i) { return load_some<Words>(at[i] + dim, call.query.dim - dim); });
        float* const scores = scratch.scores.get() + begin;
        if constexpr (TRANSPOSES) {
            Words seen{};
            if (block.some_hidden)
                for (int i = 0; i < LANES; ++i) seen[i] = static_cast<int32_t>(block.seen[begin + i]);
            each<ROWS>([&](auto row) __attribute__((always_inline)) {
                Floats found = exponents(sums[row]);
                if (block.some_hidden) found = (seen & 1 << row) != 0 ? found : floats(-HUGE_VALF);
                store(scores + row * KEY_BLOCK, found);
            });
        } else {
            Floats found = exponents(sums_of(sums));
            if (block.some_hidden) found = mask_of(seen_at(block.seen + begin)) ? found : floats(-HUGE_VALF);
            const auto* of_rows = reinterpret_cast<const float*>(&found);
            for (int row = 0; row < ROWS; ++row)
                std::memcpy(scores + row * KEY_BLOCK, of_rows + row * KEYS, KEYS * sizeof(float));
        }
    }

    // Adds the products of some dims of the queries and of each key, which `key_at` returns: a vector for each row and
    // key, whose lanes are to be summed.
    template <typename KeyAt>
    [[gnu::always_inline]] static void add_rows(Floats (&sums)[LANES], const Numbers* queries, KeyAt key_at) {
        each<KEYS>([&](auto i) __attribute__((always_inline)) {
            Numbers key[IN_WORDS];
            put_pairs(key, 1, key_at(i));
            each<ROWS>([&](auto row) __attribute__((always_inline)) {
                each<IN_WORDS>([&](auto j) __attribute__((always_inline)) {
                    Floats& sum = sums[row * KEYS + i];
                    sum = add_product(sum, key[j], queries[row * IN_WORDS + j]);
                });
            });
        });
    }

    // The same where keys are transposed: a vector for each row, with a key in each lane.
    template <typename KeyAt>
    [[gnu::always_inline]] static void add_transposed(Floats (&sums)[ROWS], const Numbers* queries, KeyAt key_at) {
        const auto* numbers = reinterpret_cast<const Part*>(queries);
        Words keys[LANES];
        each<LANES>([&](auto i) __attribute__((always_inline)) { keys[i] = key_at(i); });
        transpose(keys);
        each<LANES>([&](auto pair) __attribute__((always_inline)) {
            Numbers of_keys[IN_WORDS];
            put_pairs(of_keys, 1, keys[pair]);
            each<IN_WORDS>([&](auto j) __attribute__((always_inline)) {
                each<ROWS>([&](auto row) __attribute__((always_inline)) {
                    const Part* number = numbers + ((pair * IN_WORDS + j) * ROWS + row) * IN_NUMBER;
                    sums[row] = add_product(sums[row], of_keys[j], broadcast_number(number));
                });
            });
        });
    }

    // Which keys each row sees, in the order of `score`.
    static uint32_t seen_at(const uint64_t* seen) {
        uint32_t found = 0;
        for (int row = 0; row < ROWS; ++row)
            for (int key = 0; key < KEYS; ++key) found |= static_cast<uint32_t>(seen[key] >> row & 1) << (row * KEYS + key);
        return found;
    }

    // A row's scores become weights relative to their maximum; total and output follow.
    void weigh(int64_t row, int64_t keys) {
        const float* scores = scratch.scores.get() + row * KEY_BLOCK;
        Part* weights = scratch.weights.get() + row * KEY_BLOCK;
        Floats highest = floats(maxima[row]), total{};
        for (int64_t key = 0; key < keys; key += LANES) highest = larger(highest, load<Floats>(scores + key));
        const float maximum = largest_of(highest);
        for (int64_t key = 0; key < keys; key += LANES) {
            const Floats weight = exp2(load<Floats>(scores + key) - maximum);
            total += weight;
            put_parts(weights + key, weight);
        }
        shrink[row] = exp2(floats(maxima[row] - maximum))[0];
        maxima[row] = maximum;
        totals[row] = totals[row] * shrink[row] + sum_of(total);
    }

    template <bool NEIGHBOURS>
    void accumulate(const BlockRows<NEIGHBOURS>& block_keys, const BlockRows<NEIGHBOURS>& values, int64_t keys,
                    int64_t dim) {
        Floats sums[ROWS][TOGETHER];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; ++i)
                sums[row][i] = load<Floats>(scratch.output(row) + dim + i * LANES) * shrink[row];
        const int64_t dims = call.output.dim - dim;
        for (int64_t key = 0; key < keys; key += 2) {  // one behind the last has weight 0
            if (dim == 0) {
                block_keys.prefetch(key + KEY_BLOCK, call.query.dim);
                block_keys.prefetch(key + 1 + KEY_BLOCK, call.query.dim);
            }
            add_values(sums, values[key] + dim, values[key + 1] + dim, dims, scratch.weights.get() + key);
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; ++i) store(scratch.output(row) + dim + i * LANES, sums[row][i]);
    }

    // Adds what two keys' values, or as many of them as there are dims, are by their weights.
    [[gnu::always_inline]] static void add_values(Floats (&sums)[ROWS][TOGETHER], const bf16* even, const bf16* odd,
                                                  int64_t dims, const bf16* weights) {
        Words pairs[TOGETHER];
#pragma GCC unroll 2
        for (int half = 0; half < TOGETHER / 2; ++half) {
            const Halves one = load_some<Halves>(even + half * 2 * LANES, dims - half * 2 * LANES);
            const Halves other = load_some<Halves>(odd + half * 2 * LANES, dims - half * 2 * LANES);
            pairs[2 * half] = (Words)alternated(one, other, false);
            pairs[2 * half + 1] = (Words)alternated(one, other, true);
        }
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Words weight = broadcast_pair(weights + row * KEY_BLOCK);
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; ++i) sums[row][i] = add_dot(sums[row][i], pairs[i], weight);
        }
    }

    [[gnu::always_inline]] static void add_values(Floats (&sums)[ROWS][TOGETHER], const bf16* even, const bf16* odd,
                                                  int64_t dims, const float* weights) {
        for (const bf16* value : {even, odd}) {
            Floats numbers[TOGETHER];
#pragma GCC unroll 4
            for (int i = 0; i < TOGETHER; ++i) numbers[i] = load_bf16(value + i * LANES, dims - i * LANES);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
                for (int i = 0; i < TOGETHER; ++i) sums[row][i] += numbers[i] * weights[row * KEY_BLOCK];
            ++weights;
        }
    }

    const Rows& rows;
    const Call& call;
    NarrowScratch& scratch;
    const Exponents exponents;
    float maxima[ROWS], totals[ROWS], shrink[ROWS];  // as those of WideTile
};
