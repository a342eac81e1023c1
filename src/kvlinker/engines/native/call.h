// The structures that functions of attention.cpp take; attention/native_kernel.py has the same.
#pragma once

#include <cstdint>

using bf16 = uint16_t;

// bf16 [heads, rows, dim]. Strides count elements; that of dim is 1.
struct Heads {
    bf16* data;
    int64_t heads, rows, dim, head_stride, row_stride;

    bf16* at(int64_t head, int64_t row) const { return data + head * head_stride + row * row_stride; }
};

// Rotary embedding.
struct Rotation {
    const float* cos;  // [positions, pairs]; of a negative position: cos(-p) = cos(p), sin(-p) = -sin(p)
    const float* sin;
    int64_t pairs;        // pairs of dimensions that are rotated, from dimension 0 on
    int64_t interleaved;  // 1: pair i is dimensions 2i and 2i + 1; 0: i and i + pairs
};

struct Segment {
    Heads key, value;  // key.dim is even
};

// What a member sees of a segment: keys [first, last) but for hidden ones, up to each query's position.
struct View {
    int64_t start, offset;  // position of key 0; position from which the keys' rotary embedding counts
    int64_t first, last;
    const uint64_t* hidden;    // a bit per key and at least one word more, or null
    const int64_t* positions;  // of every key, ascending, instead of start; or null
};

struct Visit {
    int64_t segment;
    int64_t first, last;  // keys that any member sees
    int64_t first_view;   // of as many views as there are members
};

// Queries [first_query, first_query + queries) of a sequence.
struct Member {
    int64_t first_query, queries;
};

struct Bundle {
    int64_t first_member, members, first_visit, visits;
};

struct Call {
    Heads query, output;       // [heads, queries, dim]; the query has no rotary embedding
    const int64_t* positions;  // [queries], ascending within a member
    Rotation rotation;
    const Segment* segments;
    const View* views;
    const Visit* visits;
    const Member* members;
    const Bundle* bundles;
    int64_t bundle_count;
    const float* sinks;  // [query.heads] logits, or null
    float scale;
    float softcap;   // 0: none
    int64_t window;  // a query sees keys behind position - window; 0: all
    int64_t threads;
};

// New keys and values [heads, tokens, dim], to be written to slots of a pool [heads, slots, dim].
struct Write {
    Heads key, value, pool_key, pool_value;  // new keys have no rotary embedding, those of the pool have
    const int64_t *positions, *slots;        // [tokens]
    Rotation rotation;
    int64_t threads;
};

// Products of few queries with the keys of several parts of a sequence, one part after the other. Every part has the same
// queries, as they ask it: query.rows / parts of them, both rotated alike.
struct Dots {
    Heads query;
    const Heads* keys;  // [parts]
    int64_t parts;
    float* products;  // [query.heads, query.rows / parts, keys of all parts]
    int64_t threads;
};

// Attention weights of a call with one bundle of one member, whose query heads are at most 64 times its key heads. Its
// output is not written.
struct MeanWeights {
    Call call;
    float* means;    // [queries, length], mean over heads, zeros so far
    int64_t length;  // more than any query's position
};
