// Attention weights of a sequence's queries, mean over heads, for those who observe attention. A tile keeps the scores of
// all keys until it knows their maxima.
#pragma once

#include "wide_scores.h"

// One thread's memory, for queries that see so many keys or fewer.
struct MeanScratch {
    MeanScratch(const Call& call, int64_t keys)
        : queries(call), scores(allocate<Floats>((keys + KEY_BLOCK) * TILE_ROWS / LANES)),
          columns(allocate<int64_t>(keys + KEY_BLOCK)) {}

    ScoreScratch queries;
    const std::unique_ptr<Floats, Free> scores;    // [keys][vectors]
    const std::unique_ptr<int64_t, Free> columns;  // [keys] positions
};

// Computes the rows of some queries, whole groups of heads, for one key head. The bundle has one member.
class MeanTile : public WideScores<TILE_ROWS> {
  public:
    MeanTile(const Rows& rows, MeanScratch& scratch)
        : WideScores(rows, scratch.queries, rows.call.sinks != nullptr), scores(scratch.scores.get()),
          columns(scratch.columns.get()) {}

    void compute_block(const Visit& visit, const KeyBlock& block) {
        const Segment& segment = rows.call.segments[visit.segment];
        score(segment.key, block, round_up(block.count, WIDE_KEYS), scores + count * VECTORS, [](int64_t) {});
        const View& view = rows.call.views[visit.first_view];
        for (int64_t key = 0; key < block.count; ++key) {
            const int64_t place = block.keys[key];
            columns[count++] = view.positions ? view.positions[place] : view.start + place;
        }
    }

    // Adds the rows' weights, times a factor, to those of their queries: means [queries][length].
    void add_weights(float* means, int64_t length, float factor) {
        for (int v = 0; v * LANES < rows.count; ++v) {
            const Floats total = weigh(v);
            const Floats factors = total > 0.0f ? factor / total : Floats{};
            for (int64_t key = 0; key < count; key += LANES) {
                Words found[LANES];
                for (int i = 0; i < LANES; ++i) found[i] = (Words)(scores[(key + i) * VECTORS + v] * factors);
                transpose(found);
                const bool neighbours = are_neighbours(columns + key, count - key);
                for (int64_t lane = 0; lane < std::min<int64_t>(rows.count - v * LANES, LANES); ++lane) {
                    float* to = means + rows.query_of[v * LANES + lane] * length;
                    if (neighbours)
                        store(to + columns[key], load<Floats>(to + columns[key]) + (Floats)found[lane]);
                    else
                        for (int64_t i = 0; i < std::min<int64_t>(count - key, LANES); ++i)
                            to[columns[key + i]] += ((Floats)found[lane])[i];
                }
            }
        }
    }

  private:
    // Scores become weights relative to the maxima. Returns their sums.
    Floats weigh(int v) {
        Floats total{};
        for (int lane = 0; rows.call.sinks && lane < LANES && v * LANES + lane < rows.count; ++lane)
            total[lane] = exp2(floats(rows.sink(v * LANES + lane) - maxima[v][lane]))[0];
        for (int64_t key = 0; key < count; ++key) {
            Floats& found = scores[key * VECTORS + v];
            found = exp2(exponents(found) - maxima[v]);
            total += found;
        }
        return total;
    }

    static bool are_neighbours(const int64_t* columns, int64_t count) {
        bool found = count >= LANES;
        for (int i = 1; found && i < LANES; ++i) found = columns[i] == columns[0] + i;
        return found;
    }

    Floats* const scores;
    int64_t* const columns;
    int64_t count = 0;  // keys so far
};
