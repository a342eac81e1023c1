"""Accounts and evicts in Lua, in one step on the server; the Redis medium runs these scripts.

Each script sees the accounting that all servers share: ``uses`` (a sorted set: chunk key, when it
was last used), ``sizes`` (a hash: chunk key, bytes) and ``totals`` (a hash: the sum of ``sizes``,
and the clock of ``uses``). A blob is a hash of parts of equal length by number, the last one
shorter, with the size of the whole; it is written under another name and renamed, so that it
appears whole.

A Redis at its memory limit refuses a script's first write if that could take memory, and only that:
scripts that evict delete blobs first.
"""

from __future__ import annotations

_PRELUDE = """
local uses, sizes, totals = KEYS[1], KEYS[2], KEYS[3]
local blobs, key = ARGV[1], ARGV[2]
local blob = blobs .. key

local function use(name)
  redis.call('ZADD', uses, redis.call('HINCRBY', totals, 'clock', 1), name)
end

local function forget(name)
  local size = tonumber(redis.call('HGET', sizes, name)) or 0
  redis.call('ZREM', uses, name)
  redis.call('HDEL', sizes, name)
  if size ~= 0 then
    redis.call('HINCRBY', totals, 'bytes', -size)
  end
  return size
end

local function account(name, size)
  forget(name)
  use(name)
  redis.call('HSET', sizes, name, size)
  redis.call('HINCRBY', totals, 'bytes', size)
end

local function used()
  return tonumber(redis.call('HGET', totals, 'bytes') or '0')
    or error('the sum of sizes is not a number')
end

local function evict_down_to(limit, spared)
  local evicted = {}
  while used() > limit do
    local oldest = redis.call('ZRANGE', uses, 0, 0)[1]
    if not oldest or oldest == spared then
      break
    end
    local existed = redis.call('DEL', blobs .. oldest)
    local size = forget(oldest)
    if existed == 1 then
      evicted[#evicted + 1] = size
    end
  end
  return evicted
end
"""

EVICT = _PRELUDE + "return evict_down_to(tonumber(ARGV[3]), key)"
"""Evicts down to a number of bytes. Arguments: a key to spare, the bytes. Returns evicted sizes."""

MAKE_WAY = _PRELUDE + "return evict_down_to(used() - tonumber(ARGV[3]), key)"
"""Evicts a number of bytes. Arguments: a key to spare, the bytes. Returns evicted sizes."""

LOOK = (
    _PRELUDE
    + """
local size = redis.pcall('HGET', blob, 'size')
if not size then
  return false
end
size = type(size) ~= 'table' and tonumber(size)
if not size or redis.call('HLEN', blob) ~= math.ceil(size / tonumber(ARGV[3])) + 1 then
  return -1
end
if ARGV[4] == 'use' then
  local clock = redis.pcall('HINCRBY', totals, 'clock', 1)
  if type(clock) == 'number' and type(redis.pcall('ZADD', uses, clock, key)) == 'number' then
    if redis.call('HSETNX', sizes, key, size) == 1 then
      redis.call('HINCRBY', totals, 'bytes', size)
    end
  end
end
return size
"""
)
"""Looks at a blob. Arguments: key, bytes of a part, whether this is a use. Returns the blob's size,
-1 for what is none, or nothing.

A use that cannot be noted (no memory, read-only) is not: reading goes on.
"""

BEGIN = (
    _PRELUDE
    + """
local size, budget = tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('EXISTS', blob) == 1 then
  use(key)
  return false
end
forget(key)
local evicted = evict_down_to(budget - size, key)
account(key, size)
return evicted
"""
)
"""Takes the room for a blob that is about to be written. Arguments: key, bytes, budget. Returns
evicted sizes, or nothing if it is there already."""

COMMIT = (
    _PRELUDE
    + """
local temporary = KEYS[4]
local wanted = redis.call('HEXISTS', sizes, key) == 1 and redis.call('EXISTS', temporary) == 1
if not wanted then
  redis.call('DEL', temporary)
  return 0
end
redis.call('PERSIST', temporary)
redis.call('RENAME', temporary, blob)
return 1
"""
)
"""Puts a written blob in its place, unless it was deleted or evicted meanwhile. Arguments: key.
Returns 1, or 0."""

ABANDON = (
    _PRELUDE
    + """
redis.call('DEL', KEYS[4])
if redis.call('EXISTS', blob) == 0 then
  forget(key)
end
"""
)
"""Cancels a write. Arguments: key."""

DELETE = (
    _PRELUDE
    + """
redis.call('DEL', blob)
forget(key)
"""
)
"""Deletes a blob. Arguments: key."""

SIZES = _PRELUDE + "return redis.call('HMGET', sizes, unpack(ARGV, 3))"
"""Reads sizes. Arguments: nothing, keys. Returns what is accounted for each, or nothing."""

USAGE = _PRELUDE + "return {used(), redis.call('ZCARD', uses)}"
"""Reads how full the medium is. No arguments. Returns bytes and blobs."""

MEND = (
    _PRELUDE
    + """
local function is(name, kind)
  local found = redis.call('TYPE', name).ok
  return found == kind or found == 'none'
end
local sound = is(uses, 'zset') and is(sizes, 'hash') and is(totals, 'hash')
if sound then
  local bytes, clock = unpack(redis.call('HMGET', totals, 'bytes', 'clock'))
  sound = (not bytes or tonumber(bytes)) and (not clock or tonumber(clock))
end
if sound then
  return 0
end
redis.call('DEL', uses, sizes, totals)
return 1
"""
)
"""Removes overwritten accounting. No arguments. Returns whether it did."""

RECONCILE = (
    _PRELUDE
    + """
for position = 4, #ARGV do
  local name = ARGV[position]
  local size = redis.pcall('HGET', blobs .. name, 'size')
  if not size then
    forget(name)
  elseif type(size) ~= 'table' and tonumber(size) and redis.call('HGET', sizes, name) ~= size then
    account(name, tonumber(size))
  end
end
if ARGV[3] == 'last' then
  local bytes = 0
  for _, size in ipairs(redis.call('HVALS', sizes)) do
    bytes = bytes + (tonumber(size) or 0)
  end
  redis.call('HSET', totals, 'bytes', bytes)
end
"""
)
"""Makes the accounting of keys agree with their blobs, and at last the sum with the sizes.
Arguments: nothing, "last" or anything else, keys."""
