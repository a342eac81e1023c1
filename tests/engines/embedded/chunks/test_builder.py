"""Chunks are computed once, for all who ask."""

from __future__ import annotations

from unittest import mock

import pytest

from kvlinker.base.types.chunks import chunk_key
from kvlinker.store import ChunkStore
from tests.engines.embedded.conftest import linked_prompt


@pytest.mark.parametrize("begun", ["before", "meanwhile"])
def test_whoever_found_none_takes_what_others_stored_meanwhile(bench, begun):
    made = bench()
    (chunk,) = linked_prompt(40).chunks
    key = chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
    builder, computed = made.engine._chunks, []
    put = ChunkStore.put

    def putting(store, key, kv):
        computed.append(key)
        return put(store, key, kv)

    with mock.patch.object(ChunkStore, "put", putting):
        first = builder.build(key, chunk, tenant="default")
        if begun == "before":
            first.kvs.result()
        second = builder.build(key, chunk, tenant="default")
        kvs = second.kvs.result()
        assert (first.begun, second.begun) == (True, False)
        assert kvs[0].scores is not None
        assert first.kvs.result()[0].layers[0].key.equal(kvs[0].layers[0].key)
        assert computed == [key]
    made.close()


def test_a_chunk_without_scores_is_computed_again_where_they_are_needed(bench):
    made = bench()
    (chunk,) = linked_prompt(40).chunks
    key = chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
    builder = made.engine._chunks
    bare = builder.build(key, chunk, tenant="default", with_scores=False)
    assert bare.kvs.result()[0].scores is None
    again = builder.build(key, chunk, tenant="default", with_scores=True)
    assert again.begun
    assert again.kvs.result()[0].scores is not None
    made.close()
