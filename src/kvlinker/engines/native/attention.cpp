// Attention over segments, in bf16: no mask in memory, and keys are read where they lie.
//
// A segment's keys have rotary embedding from a position of their own on, so a query is rotated for every segment
// that it sees. A bundle is one or more sequences (members) and the segments that they all see. The query heads that
// share a key head are folded into rows: row = query * group + head within the group, member after member. A tile of
// neighbouring rows goes through the keys in blocks with a running softmax, as flash attention does. What a row sees
// is a range of keys but for bits of hidden ones. Sums and softmax are fp32; weights are rounded to bf16.
//
// Rows that are in several bundles, or whose bundle's keys are divided among threads, leave partial results, which are
// merged in the end.

#include <atomic>
#include <cmath>
#include <vector>

#include "mean_tile.h"
#include "narrow_tile.h"
#include "wide_tile.h"

namespace {

constexpr int SHARES_PER_THREAD = 4;  // as large as the largest item is, so many make up a thread's work
constexpr int FEW_COPIES = 1024;      // that one thread writes to the pool
constexpr int SHORTEST_PART = 256;    // keys of a bundle that are not divided any further

// A tile of a bundle's rows for one key head, over a part of the keys.
struct Item {
    int64_t bundle, head, first_row, rows, part;
};

// Rows of the next tile where so many are left: those that fill vectors, and few besides in a tile of their own.
int64_t next_rows(int64_t left) {
    const int64_t besides = left % WIDE_ROWS;
    if (left >= TILE_ROWS) return TILE_ROWS;
    return besides <= NARROW_ROWS && besides < left ? left - besides : left;
}

// How a bundle is divided.
struct Share {
    int64_t queries = 0, rows = 0, keys = 0;
    int64_t parts = 1;
    bool partial = false;     // whether results are partial
    int64_t first_place = 0;  // of parts * queries
};

// How all work is divided: keys in as many parts as keep all threads busy.
class Division {
  public:
    explicit Division(const Call& call)
        : shares(call.bundle_count), places_of(call.query.rows), call(call), memberships(call.query.rows) {
        double work = 0;  // row-key pairs
        for (int64_t b = 0; b < call.bundle_count; ++b) {
            measure(call.bundles[b], shares[b]);
            work += static_cast<double>(shares[b].rows) * shares[b].keys * kv_heads(call.bundles[b]);
        }
        const double most = call.threads > 1 ? work / (call.threads * SHARES_PER_THREAD) : HUGE_VAL;
        for (int64_t b = 0; b < call.bundle_count; ++b) divide(b, shares[b], most);
        for (int64_t query = 0; query < call.query.rows; ++query)
            if (memberships[query] == 0 || !places_of[query].empty()) merged.push_back(query);
    }

    std::vector<Share> shares;  // of the bundles
    std::vector<Item> items;
    int64_t places = 0;
    std::vector<std::vector<int64_t>> places_of;  // of queries with partial results
    std::vector<int64_t> merged;                  // queries that are written by `merge`

  private:
    int64_t kv_heads(const Bundle& bundle) const {
        return call.segments[call.visits[bundle.first_visit].segment].key.heads;
    }

    template <typename Visitor>
    void each_query(const Bundle& bundle, Visitor visitor) const {
        int64_t index = 0;
        for (int64_t m = bundle.first_member; m < bundle.first_member + bundle.members; ++m)
            for (int64_t i = 0; i < call.members[m].queries; ++i) visitor(call.members[m].first_query + i, index++);
    }

    void measure(const Bundle& bundle, Share& share) {
        each_query(bundle, [&](int64_t query, int64_t) {
            ++memberships[query];
            ++share.queries;
        });
        share.rows = share.queries * (call.query.heads / kv_heads(bundle));
        for (int64_t v = bundle.first_visit; v < bundle.first_visit + bundle.visits; ++v)
            share.keys += call.visits[v].last - call.visits[v].first;
    }

    void divide(int64_t index, Share& share, double most) {
        const Bundle& bundle = call.bundles[index];
        const double tile = static_cast<double>(std::min<int64_t>(share.rows, TILE_ROWS)) * share.keys;
        const int64_t most_parts = std::max<int64_t>(share.keys / SHORTEST_PART, 1);
        share.parts = std::clamp<int64_t>(static_cast<int64_t>(std::ceil(tile / most)), 1, most_parts);
        share.partial = share.parts > 1;
        each_query(bundle, [&](int64_t query, int64_t) { share.partial |= memberships[query] > 1; });
        std::vector<int64_t> begins;
        for (int64_t row = 0; row < share.rows; row += next_rows(share.rows - row)) begins.push_back(row);
        for (int64_t head = 0; head < kv_heads(bundle); ++head)
            for (auto begin = begins.rbegin(); begin != begins.rend(); ++begin)  // the longest first
                for (int64_t part = 0; part < share.parts; ++part)
                    items.push_back({index, head, *begin, next_rows(share.rows - *begin), part});
        if (!share.partial) return;
        share.first_place = places;
        for (int64_t part = 0; part < share.parts; ++part)
            each_query(bundle, [&](int64_t query, int64_t) { places_of[query].push_back(places++); });
    }

    const Call& call;
    std::vector<int64_t> memberships;  // bundles that a query is in
};

// One thread's memory.
struct Scratch {
    explicit Scratch(const Call& call) : wide(call), narrow(call) {}

    WideScratch wide;
    NarrowScratch narrow;
};

void compute_item(const Call& call, Scratch& scratch, const Partials& partials, const Item& item, const Share& share) {
    Rows rows(call, call.bundles[item.bundle], item.head, item.first_row, item.rows);
    const auto compute = [&](auto tile) {
        rows.visit(tile, share.keys * item.part / share.parts, share.keys * (item.part + 1) / share.parts);
        if (share.partial)
            tile.write_partials(partials, share.first_place + item.part * share.queries);
        else
            tile.write_outputs();
    };
    const bool with_sinks = call.sinks && !share.partial;
    if (rows.count == 1)
        compute(NarrowTile<1>(rows, scratch.narrow, with_sinks));
    else if (rows.count == 2)
        compute(NarrowTile<2>(rows, scratch.narrow, with_sinks));
    else if (rows.count <= 4)
        compute(NarrowTile<4>(rows, scratch.narrow, with_sinks));
    else if (rows.count <= NARROW_ROWS)
        compute(NarrowTile<NARROW_ROWS>(rows, scratch.narrow, with_sinks));
    else if (rows.count <= WIDE_ROWS)
        compute(WideTile<WIDE_ROWS>(rows, scratch.wide, with_sinks));
    else if (rows.count <= 2 * WIDE_ROWS)
        compute(WideTile<2 * WIDE_ROWS>(rows, scratch.wide, with_sinks));
    else if (rows.count <= 3 * WIDE_ROWS)
        compute(WideTile<3 * WIDE_ROWS>(rows, scratch.wide, with_sinks));
    else
        compute(WideTile<TILE_ROWS>(rows, scratch.wide, with_sinks));
}

// Products of a query and as many keys as a vector has lanes, or as there are from `first` on.
void multiply(const bf16* query, const Heads& keys, int64_t key_head, int64_t first, float* products) {
    Floats sums[LANES] = {};
    for (int64_t begin = 0; begin < keys.dim; begin += 2 * LANES) {
        const Words part = load_some<Words>(query + begin, keys.dim - begin);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) {
            const int64_t key = std::min(first + i, keys.rows - 1);
            sums[i] = add_dot(sums[i], load_some<Words>(keys.at(key_head, key) + begin, keys.dim - begin), part);
        }
    }
    store_some(products, sums_of(sums), keys.rows - first);
}

// One query's attention over all keys, zero if it sees none.
void merge(const Call& call, const Partials& partials, const std::vector<int64_t>& places, int64_t query,
           int64_t head) {
    const float sink = call.sinks ? std::max(call.sinks[head] * LOG2E, LOWEST) : LOWEST;
    float highest = sink;
    for (const int64_t place : places) highest = std::max(highest, partials.maximum(place, head));
    float total = call.sinks ? std::exp2(sink - highest) : 0.0f;
    for (const int64_t place : places) {
        float& factor = partials.maximum(place, head);
        factor = std::exp2(factor - highest);
        total += factor * partials.total(place, head);
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    for (int64_t dim = 0; dim < call.output.dim; dim += LANES) {
        Floats sum{};
        for (const int64_t place : places)
            sum += load<Floats>(partials.outputs(place, head) + dim) * partials.maximum(place, head);
        store_bf16(call.output.at(head, query) + dim, sum * inverse, call.output.dim - dim);
    }
}

}  // namespace

extern "C" void kvlinker_write(const Write* write) {
    const int64_t heads = write->key.heads, items = heads * write->key.rows;
    const auto copy = [](const Heads& from, const Heads& to, int64_t head, int64_t token, int64_t slot) {
        std::memcpy(to.at(head, slot), from.at(head, token), from.dim * sizeof(bf16));
    };
#pragma omp parallel for num_threads(static_cast<int>(write->threads)) if (items > FEW_COPIES) schedule(static)
    for (int64_t item = 0; item < items; ++item) {
        const int64_t token = item / heads, head = item % heads, slot = write->slots[token];
        if (write->rotation.pairs)
            rotate(write->rotation, write->key.at(head, token), write->key.dim, write->positions[token],
                   write->pool_key.at(head, slot));
        else
            copy(write->key, write->pool_key, head, token, slot);
        copy(write->value, write->pool_value, head, token, slot);
    }
}

extern "C" void kvlinker_dots(const Dots* dots) {
    const Heads& query = dots->query;
    const int64_t queries = query.rows / dots->parts;
    int64_t columns = 0;
    for (int64_t part = 0; part < dots->parts; ++part) columns += dots->keys[part].rows;
#pragma omp parallel num_threads(static_cast<int>(dots->threads))
    for (int64_t part = 0, column = 0; part < dots->parts; column += dots->keys[part++].rows) {
        const Heads& keys = dots->keys[part];
        const int64_t group = query.heads / keys.heads, blocks = round_up(keys.rows, LANES) / LANES;
#pragma omp for collapse(2) schedule(static) nowait
        for (int64_t key_head = 0; key_head < keys.heads; ++key_head)
            for (int64_t block = 0; block < blocks; ++block)
                for (int64_t i = 0; i < group * queries; ++i) {
                    const int64_t head = key_head * group + i / queries, row = i % queries, first = block * LANES;
                    float* products = dots->products + (head * queries + row) * columns + column + first;
                    multiply(query.at(head, part * queries + row), keys, key_head, first, products);
                }
    }
}

extern "C" void kvlinker_attention(const Call* call) {
    const Division division(*call);
    const Partials partials(*call, division.places);
    const auto items = static_cast<int64_t>(division.items.size());
    const int64_t heads = call->query.heads, merges = static_cast<int64_t>(division.merged.size()) * heads;
    std::atomic<int64_t> next_item{0}, next_merge{0};
#pragma omp parallel num_threads(static_cast<int>(call->threads))
    {
        Scratch scratch(*call);
        for (int64_t i = next_item++; i < items; i = next_item++) {
            const Item& item = division.items[i];
            compute_item(*call, scratch, partials, item, division.shares[item.bundle]);
        }
#pragma omp barrier
        for (int64_t i = next_merge++; i < merges; i = next_merge++) {
            const int64_t query = division.merged[i / heads];
            merge(*call, partials, division.places_of[query], query, i % heads);
        }
    }
}

extern "C" void kvlinker_mean_weights(const MeanWeights* asked) {
    const Call& call = asked->call;
    const Bundle& bundle = *call.bundles;
    const Visit* visits = call.visits + bundle.first_visit;
    int64_t keys = 0;
    for (int64_t i = 0; i < bundle.visits; ++i) keys += visits[i].last - visits[i].first;
    const int64_t kv_heads = call.segments[visits->segment].key.heads, group = call.query.heads / kv_heads;
    const int64_t queries = call.query.rows, at_once = TILE_ROWS / group;
    const float factor = 1.0f / static_cast<float>(call.query.heads);
#pragma omp parallel num_threads(static_cast<int>(call.threads))
    {
        MeanScratch scratch(call, keys);
#pragma omp for schedule(dynamic)
        for (int64_t left = round_up(queries, at_once); left > 0; left -= at_once) {  // the longest first
            const int64_t first = left - at_once, count = std::min(at_once, queries - first);
            for (int64_t head = 0; head < kv_heads; ++head) {
                Rows rows(call, bundle, head, first * group, count * group);
                MeanTile tile(rows, scratch);
                rows.visit(tile, 0, keys);
                tile.add_weights(asked->means, asked->length, factor);
            }
        }
    }
}
