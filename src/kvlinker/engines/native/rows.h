// The rows that one tile computes: which queries they are, and what they see.
#pragma once

#include <utility>

#include "vectors.h"

constexpr int TILE_ROWS = 64;  // the most rows of a tile
// Keys whose scores exist at once, a multiple of 64: scores, values and outputs of 64 rows fit the first cache.
constexpr int KEY_BLOCK = MULTIPLIES_BF16 ? 128 : 64;
constexpr int KEYS_TOGETHER = 2 * 16;  // what tiles round a block's count up to
constexpr float LOWEST = -1e30f;       // below all scores, but finite: differences of maxima are numbers
constexpr int CACHE_LINE = 64;         // bytes

// The 64 bits from `first` on.
inline uint64_t bits_at(const uint64_t* words, int64_t first) {
    const uint64_t low = words[first / 64] >> (first % 64);
    return first % 64 ? low | words[first / 64 + 1] << (64 - first % 64) : low;
}

// A query or key of `dim` numbers with the rotary embedding of `position`, rounded.
inline void rotate(const Rotation& rotation, const bf16* from, int64_t dim, int64_t position, bf16* rotated) {
    const int64_t pairs = rotation.pairs;
    const float* cos = rotation.cos + std::abs(position) * pairs;
    const float* sin = rotation.sin + std::abs(position) * pairs;
    const float sign = position < 0 ? -1.0f : 1.0f;
    for (int64_t pair = 0; pair < pairs; pair += LANES) {
        const int64_t left = pairs - pair;
        const Floats c = load_some<Floats>(cos + pair, left), s = load_some<Floats>(sin + pair, left) * sign;
        const auto turn = [&](Floats& x, Floats& y) {
            const Floats turned = x * c - y * s;
            y = x * s + y * c;
            x = turned;
        };
        if (rotation.interleaved) {
            const Words both = load_some<Words>(from + 2 * pair, 2 * left);
            Floats x = low_of(both), y = high_of(both);
            turn(x, y);
            store_some(rotated + 2 * pair, pairs_of(x, y), 2 * left);
        } else {
            Floats x = load_bf16(from + pair, left), y = load_bf16(from + pair + pairs, left);
            turn(x, y);
            store_bf16(rotated + pair, x, left);
            store_bf16(rotated + pair + pairs, y, left);
        }
    }
    const int64_t passed = dim - 2 * pairs;
    if (passed) std::memcpy(rotated + 2 * pairs, from + 2 * pairs, passed * sizeof(bf16));
}

// Partial results: for every place and head, outputs [value_dim] relative to a maximum, that maximum, and the sum of
// the weights.
class Partials {
  public:
    Partials(const Call& call, int64_t places)
        : heads(call.query.heads), value_dim(call.output.dim), width(round_up(value_dim + 2, LANES)),
          memory(allocate<float>(places * heads * width)) {}

    float* outputs(int64_t place, int64_t head) const { return memory.get() + (place * heads + head) * width; }
    float& maximum(int64_t place, int64_t head) const { return outputs(place, head)[value_dim]; }
    float& total(int64_t place, int64_t head) const { return outputs(place, head)[value_dim + 1]; }

  private:
    const int64_t heads, value_dim, width;
    std::unique_ptr<float, Free> memory;
};

// Has a key's or a value's memory fetched ahead, to the second cache: what is computed meanwhile fills the first. This and
// whatever does nothing else are to be inlined always: the compiler leaves out calls that have no other effect.
[[gnu::always_inline]] inline void prefetch(const bf16* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += CACHE_LINE / static_cast<int64_t>(sizeof(bf16))) __builtin_prefetch(row + i, 0, 2);
}

// Keys of a segment that are computed together.
struct KeyBlock {
    int64_t count;
    bool neighbours;                       // whether they follow one another
    bool some_hidden;                      // whether not all rows see all, or the block is to be filled up
    int32_t keys[KEY_BLOCK];               // ascending; the last one again behind the last
    alignas(64) uint64_t seen[KEY_BLOCK];  // if some are hidden: a bit per row; 0 behind the last
};

// Rows [first_row, first_row + count) of a bundle and key head.
class Rows {
  public:
    Rows(const Call& call, const Bundle& bundle, int64_t head, int64_t first_row, int64_t count)
        : call(call), bundle(bundle), head(head), count(count), first_row(first_row),
          group(call.query.heads / call.segments[call.visits[bundle.first_visit].segment].key.heads) {
        const Member* members = call.members + bundle.first_member;
        int64_t member = 0, before = 0;  // queries of members before
        for (int64_t row = 0; row < count; ++row) {
            const int64_t query = (first_row + row) / group;
            while (query - before >= members[member].queries) before += members[member++].queries;
            if (row == 0) first_member = member;
            last_member = member;
            member_of[row] = member;
            query_of[row] = members[member].first_query + query - before;
            head_of[row] = head * group + (first_row + row) % group;
        }
    }

    const Call& call;
    const Bundle& bundle;
    const int64_t head, count;
    int64_t query_of[TILE_ROWS], head_of[TILE_ROWS];

    float sink(int64_t row) const { return std::max(call.sinks[head_of[row]] * LOG2E, LOWEST); }

    bf16* output(int64_t row) const { return call.output.at(head_of[row], query_of[row]); }

    // Where a row's partial result is, if `first_place` is that of the bundle's first query.
    int64_t place(int64_t row, int64_t first_place) const { return first_place + (first_row + row) / group; }

    // Lets the tile go through keys [begin, end) of all that the bundle's visits have, one after the other.
    template <typename Tile>
    void visit(Tile& tile, int64_t begin, int64_t end) {
        const Visit* visits = call.visits + bundle.first_visit;
        for (int64_t i = 0, before = 0; i < bundle.visits; before += visits[i].last - visits[i].first, ++i) {
            const int64_t first = std::max(visits[i].first, visits[i].first + begin - before);
            const int64_t last = std::min(visits[i].last, visits[i].first + end - before);
            if (first >= last || !find_bounds(visits[i], first, last)) continue;
            if (!is_rotated(visits[i])) {
                for (int64_t row = 0; row < count; ++row) {
                    offsets[row] = view_of(visits[i], row).offset;
                    const int64_t position = call.rotation.pairs ? call.positions[query_of[row]] - offsets[row] : 0;
                    rotate(call.rotation, call.query.at(head_of[row], query_of[row]), call.query.dim, position,
                           tile.query(row));
                }
                tile.take_queries();
                rotated = true;
            }
            visit_blocks(tile, visits[i]);
        }
    }

  private:
    const View& view_of(const Visit& visit, int64_t row) const { return call.views[visit.first_view + member_of[row]]; }

    bool is_rotated(const Visit& visit) const {
        if (!rotated || call.rotation.pairs == 0) return rotated;
        for (int64_t row = 0; row < count; ++row)
            if (offsets[row] != view_of(visit, row).offset) return false;
        return true;
    }

    // Finds the keys of [first, last) that every row sees but for hidden ones. Tells whether there are any.
    bool find_bounds(const Visit& visit, int64_t first, int64_t last) {
        lowest_low = lowest_high = INT64_MAX;
        highest_low = highest_high = INT64_MIN;
        for (int64_t row = 0; row < count; ++row) {
            if (row && query_of[row] == query_of[row - 1] && member_of[row] == member_of[row - 1]) {
                lows[row] = lows[row - 1];
                spans[row] = spans[row - 1];
                continue;
            }
            const View& view = view_of(visit, row);
            const int64_t position = call.positions[query_of[row]];
            int64_t low = std::max(first, view.first), high = std::min(last, view.last);
            high = std::min(high, keys_until(view, high, position));
            if (call.window) low = std::max(low, keys_until(view, high, position - call.window));
            lows[row] = static_cast<int32_t>(low);
            spans[row] = static_cast<int32_t>(std::max<int64_t>(high - low, 0));
            highest_low = std::max(highest_low, low < high ? low : INT64_MAX);  // who sees nothing is masked everywhere
            lowest_high = std::min(lowest_high, high);
            if (low < high) {
                lowest_low = std::min(lowest_low, low);
                highest_high = std::max(highest_high, high);
            }
        }
        return lowest_low < highest_high;
    }

    // Keys before `last` at or before the position.
    static int64_t keys_until(const View& view, int64_t last, int64_t position) {
        if (!view.positions) return position + 1 - view.start;
        return std::upper_bound(view.positions, view.positions + std::max<int64_t>(last, 0), position) - view.positions;
    }

    // What one member hides is left out of the blocks; what some of several members hide is masked.
    template <typename Tile>
    void visit_blocks(Tile& tile, const Visit& visit) {
        const uint64_t* left_out = nullptr;
        bool masks = false;
        if (first_member == last_member)
            left_out = view_of(visit, 0).hidden;
        else
            for (int64_t m = first_member; m <= last_member; ++m)
                masks |= call.views[visit.first_view + m].hidden != nullptr;
        for (int64_t first = lowest_low; first < highest_high;) {
            const int64_t begin = first;
            first = collect(begin, left_out);
            if (block.count == 0) continue;
            const bool ends = block.keys[0] < highest_low || block.keys[block.count - 1] >= lowest_high;
            block.some_hidden = ends || masks || block.count % KEYS_TOGETHER;
            if (block.some_hidden) {
                std::fill(block.seen, block.seen + block.count, ends ? 0 : ~uint64_t{0});
                std::fill(block.seen + block.count, block.seen + KEY_BLOCK, 0);
            }
            if (ends) add_in_bounds();
            if (masks) remove_hidden(visit, begin);
            tile.compute_block(visit, block);
        }
    }

    // Fills the block with keys from `first` on. Returns where the next begins.
    int64_t collect(int64_t first, const uint64_t* left_out) {
        block.count = 0;
        while (first < highest_high && block.count < KEY_BLOCK) {  // as many neighbours as there are
            int64_t count = std::min<int64_t>(highest_high - first, KEY_BLOCK - block.count);
            if (left_out) {
                const uint64_t bits = bits_at(left_out, first);
                if (bits & 1) {
                    first += ~bits ? __builtin_ctzll(~bits) : 64;
                    continue;
                }
                count = std::min<int64_t>(count, bits ? __builtin_ctzll(bits) : 64);
            }
            for (int64_t i = 0; i < count; i += LANES)
                store_some(block.keys + block.count + i, counted() + static_cast<int32_t>(first + i), count - i);
            block.count += count;
            first += count;
        }
        if (block.count == 0) return first;
        const int32_t last = block.keys[block.count - 1];
        block.neighbours = last - block.keys[0] + 1 == block.count;
        std::fill(block.keys + block.count, block.keys + KEY_BLOCK, last);
        return first;
    }

    // Neighbouring rows that see the same keys are told at once.
    void add_in_bounds() {
        for (int64_t begin = 0, end = 0; begin < count; begin = end) {
            while (end < count && lows[end] == lows[begin] && spans[end] == spans[begin]) ++end;
            const uint64_t bits = (~uint64_t{0} >> (64 - (end - begin))) << begin;
            const int32_t *keys = block.keys, *behind = keys + block.count;
            const int64_t low = std::lower_bound(keys, behind, lows[begin]) - keys;
            const int64_t high = std::lower_bound(keys, behind, lows[begin] + spans[begin]) - keys;
            for (int64_t key = low; key < high; ++key) block.seen[key] |= bits;
        }
    }

    // The block's keys follow one another from `first` on.
    void remove_hidden(const Visit& visit, int64_t first) {
        for (int64_t begin = 0, end = 0; begin < count; begin = end) {  // rows of one member
            while (end < count && member_of[end] == member_of[begin]) ++end;
            const uint64_t* hidden = view_of(visit, begin).hidden;
            if (!hidden) continue;
            const uint64_t members = (~uint64_t{0} >> (64 - (end - begin))) << begin;
            for (int64_t key = 0; key < block.count; key += 64) {
                uint64_t bits = bits_at(hidden, first + key);
                if (block.count - key < 64) bits &= (uint64_t{1} << (block.count - key)) - 1;
                for (; bits; bits &= bits - 1) block.seen[key + __builtin_ctzll(bits)] &= ~members;
            }
        }
    }

    const int64_t first_row, group;
    int64_t first_member = 0, last_member = 0;
    int64_t member_of[TILE_ROWS], offsets[TILE_ROWS];
    bool rotated = false;
    int64_t lowest_low, highest_low, lowest_high, highest_high;
    int32_t lows[TILE_ROWS] = {}, spans[TILE_ROWS] = {};  // every row's first key and count of keys
    KeyBlock block;
};
