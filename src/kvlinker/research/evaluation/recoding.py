"""Chunks as a tier with a codec would give them back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvlinker.llm import LLM
from kvlinker.store import ContextCache
from kvlinker.store.format.byte_source import BufferSource
from kvlinker.store.format.chunk_file import decode_chunk, encode_chunk
from kvlinker.store.format.codecs import Codec


def recode(llm: LLM, caches: Iterable[ContextCache], codec: Codec) -> None:
    """Replace the stored KV of these context caches by what ``codec`` makes of it.

    Doing it again changes next to nothing.
    """
    for key in {cache.chunk_key for cache in caches}:
        kv = llm.store.get(key)
        if kv is not None:
            data = bytearray().join(encode_chunk(key, kv, codec).pieces())
            llm.store.delete(key)
            llm.store.put(key, decode_chunk(BufferSource(np.frombuffer(data, dtype=np.uint8)), key))
