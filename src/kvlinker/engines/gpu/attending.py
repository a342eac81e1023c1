"""Attention over segments in Triton: tiles of queries over the keys that they see, and the merging
of partial results by their log-sum-exp."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803, N806
import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_tile(
    query,
    output,
    partials,
    lses,
    cos,
    sin,
    sinks,
    segments,
    rows,
    sights,
    visits,
    tiles,
    hidden,
    query_head_stride,
    query_row_stride,
    heads,
    group,
    scale,
    softcap,
    WIDTH: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LATENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Attend with one tile of queries to all that its visits show.

    A tile is [rows, query heads that share a key head]; ``tiles`` [tiles, 3] has its first visit,
    the number of them, and its first row in ``partials`` [rows, heads, value_dim], -1 if it writes
    ``output`` [queries, heads, value_dim] itself. ``rows`` [tiles, BLOCK_ROWS] are the queries'
    indices, -1 for none. ``visits`` [visits, 5]: segment, first and last key, number of its sights,
    and whether any of these hides keys. ``sights`` [visits, 4, BLOCK_ROWS]: the distance by which
    each query is rotated, the keys [low, high) that it sees, and where in ``hidden`` its bits
    begin, -1 for none. ``segments`` [segments, 6]: addresses of key and value, and the strides of
    heads and rows of both. The first WIDTH dimensions of a query are rotated by ``cos`` and ``sin``
    [distances, WIDTH / 2]. With LATENT, values are the keys' dimensions after WIDTH.
    """
    tile = tl.program_id(0)
    blocks = tl.cdiv(group, BLOCK_HEADS)
    kv_head = tl.program_id(1) // blocks
    member_head = tl.program_id(1) % blocks * BLOCK_HEADS
    PAIRS: tl.constexpr = WIDTH // 2
    REST: tl.constexpr = KEY_DIM - WIDTH
    dtype: tl.constexpr = query.dtype.element_ty

    tile_rows = tl.arange(0, BLOCK_ROWS * BLOCK_HEADS) // BLOCK_HEADS
    in_group = member_head + tl.arange(0, BLOCK_ROWS * BLOCK_HEADS) % BLOCK_HEADS
    head = kv_head * group + in_group
    row = tl.load(rows + tile * BLOCK_ROWS + tile_rows)
    there = (row >= 0) & (in_group < group)
    row = tl.maximum(row, 0)

    pairs = tl.arange(0, PAIRS_BLOCK)
    rest = tl.arange(0, REST_BLOCK)
    dims = tl.arange(0, VALUE_BLOCK)
    asked = query + head * query_head_stride + row * query_row_stride
    if INTERLEAVED:
        x_dims, y_dims = 2 * pairs, 2 * pairs + 1
    else:
        x_dims, y_dims = pairs, PAIRS + pairs
    if REST > 0:
        q_rest = tl.load(
            asked[:, None] + WIDTH + rest[None, :], there[:, None] & (rest < REST)[None, :], 0.0
        )

    most = tl.full([BLOCK_ROWS * BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS * BLOCK_HEADS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS * BLOCK_HEADS, VALUE_BLOCK], tl.float32)
    first_visit = tl.load(tiles + tile * 3)
    for visit in range(first_visit, first_visit + tl.load(tiles + tile * 3 + 1)):
        segment = segments + tl.load(visits + visit * 5) * 6
        begin = tl.load(visits + visit * 5 + 1).to(tl.int32)
        end = tl.load(visits + visit * 5 + 2).to(tl.int32)
        hides = tl.load(visits + visit * 5 + 4)
        sight = sights + tl.load(visits + visit * 5 + 3) * (4 * BLOCK_ROWS) + tile_rows
        low = tl.load(sight + BLOCK_ROWS).to(tl.int32)
        high = tl.load(sight + 2 * BLOCK_ROWS).to(tl.int32)
        bits = tl.load(sight + 3 * BLOCK_ROWS).to(tl.int32)
        key = tl.load(segment).to(tl.pointer_type(dtype))
        value = tl.load(segment + 1).to(tl.pointer_type(dtype))
        key_row, value_row = tl.load(segment + 3), tl.load(segment + 5)
        key_head, value_head = tl.load(segment + 2), tl.load(segment + 4)
        if ALIGNED:
            key, value = tl.multiple_of(key, 16), tl.multiple_of(value, 16)
            key_row, value_row = tl.multiple_of(key_row, 8), tl.multiple_of(value_row, 8)
            key_head, value_head = tl.multiple_of(key_head, 8), tl.multiple_of(value_head, 8)
        key += kv_head * key_head
        value += kv_head * value_head
        if PAIRS > 0:
            wanted = there[:, None] & (pairs < PAIRS)[None, :]
            x = tl.load(asked[:, None] + x_dims[None, :], wanted, 0.0).to(tl.float32)
            y = tl.load(asked[:, None] + y_dims[None, :], wanted, 0.0).to(tl.float32)
            distance = tl.load(sight).to(tl.int32)
            angle = tl.abs(distance)[:, None] * PAIRS + pairs[None, :]
            c = tl.load(cos + angle, wanted, 0.0)
            s = tl.load(sin + angle, wanted, 0.0)
            s = tl.where((distance < 0)[:, None], -s, s)
            q_x = (x * c - y * s).to(dtype)
            q_y = (y * c + x * s).to(dtype)
        for block in range(begin // 8 * 8, end, BLOCK_KEYS):
            keys = block + tl.arange(0, BLOCK_KEYS)
            inside = (keys >= begin) & (keys < end)
            at = key + keys.to(tl.int64) * key_row
            scores = tl.zeros([BLOCK_ROWS * BLOCK_HEADS, BLOCK_KEYS], tl.float32)
            if PAIRS > 0:
                wanted_keys = (pairs < PAIRS)[:, None] & inside[None, :]
                k_x = tl.load(at[None, :] + x_dims[:, None], wanted_keys, 0.0)
                scores = tl.dot(q_x, k_x, scores, input_precision="ieee")
                k_y = tl.load(at[None, :] + y_dims[:, None], wanted_keys, 0.0)
                scores = tl.dot(q_y, k_y, scores, input_precision="ieee")
            if REST > 0:
                k_rest = tl.load(
                    at[:, None] + WIDTH + rest[None, :],
                    inside[:, None] & (rest < REST)[None, :],
                    0.0,
                )
                scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
            scores *= scale
            if SOFTCAP:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            seen = inside[None, :] & (keys[None, :] >= low[:, None])
            seen = seen & (keys[None, :] < high[:, None])
            if hides != 0:
                octets = block // 8 + tl.arange(0, BLOCK_KEYS // 8)
                octet = tl.load(
                    hidden + (bits[:, None] + octets[None, :]),
                    (bits >= 0)[:, None] & (octets * 8 < end)[None, :],
                    0,
                ).to(tl.int32)
                bit = (octet[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
                seen = seen & (tl.reshape(bit, [BLOCK_ROWS * BLOCK_HEADS, BLOCK_KEYS]) == 0)
            scores = tl.where(seen, scores * LOG2_E, float("-inf"))
            new = tl.maximum(most, tl.max(scores, 1))
            finite = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(scores - finite[:, None])
            shrunk = tl.exp2(most - finite)
            total = total * shrunk + tl.sum(weights, 1)
            sums = sums * shrunk[:, None]
            if LATENT:
                values = k_rest
            else:
                values = tl.load(
                    value + (keys.to(tl.int64) * value_row)[:, None] + dims[None, :],
                    inside[:, None] & (dims < VALUE_DIM)[None, :],
                    0.0,
                )
            sums = tl.dot(weights.to(dtype), values, sums, input_precision="ieee")
            most = new

    finite = tl.where(most == float("-inf"), 0.0, most)
    kept = there[:, None] & (dims < VALUE_DIM)[None, :]
    partial = tl.load(tiles + tile * 3 + 2)
    if partial >= 0:
        divisor = tl.where(total == 0.0, 1.0, total)
        at_partial = (partial + tile_rows) * heads + head
        at_partials = partials + at_partial[:, None] * VALUE_DIM + dims[None, :]
        tl.store(at_partials, sums / divisor[:, None], kept)
        lse = tl.where(total == 0.0, float("-inf"), most + tl.log2(divisor))
        tl.store(lses + at_partial, lse, there)
    else:
        if SINKS:
            total += tl.exp2(tl.load(sinks + head, there, 0.0) * LOG2_E - finite)
        divisor = tl.where(total == 0.0, 1.0, total)
        SKIPPED: tl.constexpr = WIDTH if LATENT else 0
        at_output = output + (row * heads + head) * (VALUE_DIM + SKIPPED) + SKIPPED
        tl.store(at_output[:, None] + dims[None, :], (sums / divisor[:, None]).to(dtype), kept)


@triton.jit
def merge_partials(
    output,
    partials,
    lses,
    sinks,
    targets,
    begins,
    sources,
    heads,
    VALUE_DIM: tl.constexpr,
    SKIPPED: tl.constexpr,
    SINKS: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Merge one query's partial results of one head into ``output`` [queries, heads, SKIPPED +
    VALUE_DIM].

    Number i of ``targets`` is a query, -1 for none, and its partials are ``sources`` from
    ``begins[i]`` to ``begins[i + 1]``.
    """
    target, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, VALUE_BLOCK)
    kept = dims < VALUE_DIM
    begin, end = tl.load(begins + target), tl.load(begins + target + 1)
    most = -float("inf")
    for index in range(begin, end):
        most = tl.maximum(most, tl.load(lses + tl.load(sources + index) * heads + head))
    if SINKS:
        most = tl.maximum(most, tl.load(sinks + head) * LOG2_E)
    finite = tl.where(most == float("-inf"), 0.0, most)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([VALUE_BLOCK], tl.float32)
    for index in range(begin, end):
        at = tl.load(sources + index) * heads + head
        weight = tl.exp2(tl.load(lses + at) - finite)
        sums += weight * tl.load(partials + at * VALUE_DIM + dims, kept, 0.0)
        total += weight
    if SINKS:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E - finite)
    sums = sums / tl.where(total == 0.0, 1.0, total)
    row = tl.load(targets + target)
    at_output = output + (row * heads + head) * (SKIPPED + VALUE_DIM) + SKIPPED
    tl.store(at_output + dims, sums.to(output.dtype.element_ty), kept & (row >= 0))
