"""Placing KV in Triton: one launch gathers tokens from any tensors of all layers, on the device or
in pinned memory, rotates the keys, and scatters both into a KV cache, which may be in fp8."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: N803, N806
import triton
import triton.language as tl


@triton.jit
def place_tokens(
    sources,
    caches,
    tokens,
    cos,
    sin,
    count,
    parts,
    heads,
    layers,
    table_stride,
    block_size,
    DTYPE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    ONE_ZERO: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGNED: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Place tokens, BLOCK_TOKENS of one head in one layer at a time; the layers come in order,
    however few programs share them.

    ``tokens`` [4, count]: each token's part, row in it, position and slot; those with a negative
    slot are left out. ``sources`` [layers, parts, 6]: addresses of key and value [heads, rows,
    dim], and the strides of heads and rows of both. ``caches`` [layers, 10]: addresses of the
    caches of keys and values, in which slot s is row s % block_size of block s // block_size, the
    strides of blocks, rows and heads of both, and the addresses of their scales. The first WIDTH
    dimensions of a key are rotated by ``cos`` and ``sin`` [positions, WIDTH / 2], whose rows are
    ``table_stride`` apart; negative positions turn backwards. Caches are of DTYPE where MANTISSA is
    0, else in fp8 as ``_fp8`` has it.
    """
    PAIRS: tl.constexpr = WIDTH // 2
    REST: tl.constexpr = KEY_DIM - WIDTH
    TO: tl.constexpr = tl.uint8 if MANTISSA else DTYPE
    blocks = tl.cdiv(count, BLOCK_TOKENS)
    for work in range(tl.program_id(0), blocks * heads * layers, tl.num_programs(0)):
        index = work % blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        head = work // blocks % heads
        layer = (work // (blocks * heads)).to(tl.int64)
        there = index < count

        source = sources + (layer * parts + tl.load(tokens + index, there, 0)) * 6
        row = tl.load(tokens + count + index, there, 0)
        slot = tl.load(tokens + 3 * count + index, there, -1)
        there = there & (slot >= 0)
        from_key = tl.load(source).to(tl.pointer_type(DTYPE))
        from_value = tl.load(source + 1).to(tl.pointer_type(DTYPE))
        key_offset = head * tl.load(source + 2) + row * tl.load(source + 3)
        value_offset = head * tl.load(source + 4) + row * tl.load(source + 5)
        cache = caches + layer * 10
        block, in_block = slot // block_size, slot % block_size
        key_to = block * tl.load(cache + 2) + in_block * tl.load(cache + 3)
        key_to += head * tl.load(cache + 4)
        value_to = block * tl.load(cache + 5) + in_block * tl.load(cache + 6)
        value_to += head * tl.load(cache + 7)
        to_key = tl.load(cache).to(tl.pointer_type(TO))
        to_value = tl.load(cache + 1).to(tl.pointer_type(TO))
        if MANTISSA:
            key_scale = tl.load(tl.load(cache + 8).to(tl.pointer_type(tl.float32)))
            value_scale = tl.load(tl.load(cache + 9).to(tl.pointer_type(tl.float32)))
        if ALIGNED:
            from_key, from_value = tl.multiple_of(from_key, 16), tl.multiple_of(from_value, 16)
            to_key, to_value = tl.multiple_of(to_key, 16), tl.multiple_of(to_value, 16)
            key_offset = tl.multiple_of(key_offset, 8)
            value_offset = tl.multiple_of(value_offset, 8)
            key_to, value_to = tl.multiple_of(key_to, 8), tl.multiple_of(value_to, 8)
        from_key, from_value = from_key + key_offset, from_value + value_offset
        to_key, to_value = to_key + key_to, to_value + value_to

        if PAIRS > 0:
            pairs = tl.arange(0, PAIRS_BLOCK)
            wanted = there[:, None] & (pairs < PAIRS)[None, :]
            if INTERLEAVED:
                x_dims, y_dims = (2 * pairs)[None, :], (2 * pairs + 1)[None, :]
            else:
                x_dims, y_dims = pairs[None, :], (PAIRS + pairs)[None, :]
            position = tl.load(tokens + 2 * count + index, there, 0)
            angle = tl.abs(position)[:, None] * table_stride + pairs[None, :]
            c = tl.load(cos + angle, wanted, 0.0).to(tl.float32)
            s = tl.load(sin + angle, wanted, 0.0).to(tl.float32)
            s = tl.where((position < 0)[:, None], -s, s)
            x = tl.load(from_key[:, None] + x_dims, wanted, 0.0).to(tl.float32)
            y = tl.load(from_key[:, None] + y_dims, wanted, 0.0).to(tl.float32)
            turned_x, turned_y = (x * c - y * s).to(DTYPE), (y * c + x * s).to(DTYPE)
            if MANTISSA:
                turned_x = _fp8(turned_x, key_scale, MANTISSA, BIAS, LARGEST, ONE_ZERO)
                turned_y = _fp8(turned_y, key_scale, MANTISSA, BIAS, LARGEST, ONE_ZERO)
            tl.store(to_key[:, None] + x_dims, turned_x, wanted)
            tl.store(to_key[:, None] + y_dims, turned_y, wanted)
        if REST > 0:
            rest = tl.arange(0, REST_BLOCK)
            wanted = there[:, None] & (rest < REST)[None, :]
            passed = tl.load(from_key[:, None] + WIDTH + rest[None, :], wanted, 0.0)
            if MANTISSA:
                passed = _fp8(passed, key_scale, MANTISSA, BIAS, LARGEST, ONE_ZERO)
            tl.store(to_key[:, None] + WIDTH + rest[None, :], passed, wanted)
        dims = tl.arange(0, VALUE_BLOCK)
        wanted = there[:, None] & (dims < VALUE_DIM)[None, :]
        values = tl.load(from_value[:, None] + dims[None, :], wanted, 0.0)
        if MANTISSA:
            values = _fp8(values, value_scale, MANTISSA, BIAS, LARGEST, ONE_ZERO)
        tl.store(to_value[:, None] + dims[None, :], values, wanted)


@triton.jit
def _fp8(
    values,
    scale,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    ONE_ZERO: tl.constexpr,
):
    """Return the bits of ``values`` / ``scale`` in fp8 with this number of bits of mantissa, to the
    nearest, ties to even, and no larger than LARGEST; with ONE_ZERO, zero has no sign.

    In whole numbers, since not all GPUs have instructions for it.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    SMALLEST: tl.constexpr = (128 - BIAS) << 23
    MAGIC: tl.constexpr = (128 - BIAS + SHIFT) << 23
    scaled = values.to(tl.float32) / scale
    size = tl.minimum(tl.abs(scaled), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + (1 << (SHIFT - 1)) - 1 + ((bits >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << MANTISSA
    magic = tl.full(bits.shape, MAGIC, tl.int32)
    small = (size + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - magic
    found = tl.where(bits < SMALLEST, small, normal)
    negative = scaled.to(tl.int32, bitcast=True) < 0
    if ONE_ZERO:
        negative = negative & (found > 0)
    return (found | tl.where(negative, 128, 0)).to(tl.uint8)
