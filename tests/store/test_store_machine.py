"""Two threads at once on a store of memory over disk, against a model: budgets, accounts, deletions
and pins hold."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlinker.base.events import ChunkDamaged
from kvlinker.store import ChunkStore, open_store
from kvlinker.store.format.chunk_file import encode_chunk
from tests.properties import examples
from tests.store.store_chunks import Recorder, chunk_kv, key_of, run_threads, same_kv, sized

KV = {number: chunk_kv(number, tokens=8 * number + 4) for number in range(8)}
SIZES = {key_of(number): encode_chunk(key_of(number), kv).nbytes for number, kv in KV.items()}
PINNABLE = 2
"""So many chunks, the first ones, fit into the pinned share of every budget."""
HOST_BYTES = 3000
DISK_BYTES = 20_000

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete"]), st.integers(0, 3)), min_size=1, max_size=8
)


class StoreMachine(RuleBasedStateMachine):
    """Each thread has chunks of its own, so that the last call for each is known; budgets and locks
    are shared."""

    store: ChunkStore

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.fsync = mock.patch("os.fsync")  # the disk's own speed is not the subject
        self.fsync.start()
        self.recorder = Recorder()
        self.pinned: frozenset[str] = frozenset()
        self.deleted: set[int] = set(KV)  # or never put
        self.kept: set[int] = set()  # put while pinned, and pinned since
        self.open()

    def open(self) -> None:
        settings = sized(self.folder, HOST_BYTES, DISK_BYTES)
        self.store = open_store(settings, self.recorder.events, pinned=self.pinned)

    @rule(even=OPERATIONS, odd=OPERATIONS)
    def work(self, even: list[tuple[str, int]], odd: list[tuple[str, int]]) -> None:
        run_threads(lambda: self.run(even, 0), lambda: self.run(odd, 1))
        self.store.flush()

    def run(self, operations: list[tuple[str, int]], offset: int) -> None:
        for name, index in operations:
            number = 2 * index + offset
            if name == "put":
                self.store.put(key_of(number), KV[number])
                self.deleted.discard(number)
                if key_of(number) in self.pinned:
                    self.kept.add(number)
            elif name == "delete":
                self.store.delete(key_of(number))
                self.deleted.add(number)
                self.kept.discard(number)
            else:
                kv = self.store.get(key_of(number))
                assert kv is None or same_kv(kv, KV[number])
                assert kv is None or number not in self.deleted, "a deleted chunk came back"
                assert kv is not None or number not in self.kept, "a pinned chunk was evicted"

    @rule(numbers=st.sets(st.integers(0, PINNABLE - 1)))
    def pin(self, numbers: set[int]) -> None:
        self.pinned = frozenset(map(key_of, numbers))
        self.store.set_pinned(self.pinned)
        lying = self.store.keys()
        self.kept = {
            number
            for number in numbers
            if key_of(number) in lying & {key.stem for key in self.files()}
        }

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @rule()
    def check(self) -> None:
        assert all(not tier.damaged for tier in self.store.check())

    def files(self) -> list[Path]:
        return list(self.folder.glob("chunks/??/*"))

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def accounts_are_right(self) -> None:
        host, disk = self.store.usage()
        assert host.used_bytes <= HOST_BYTES
        assert disk.used_bytes <= DISK_BYTES
        assert disk.used_bytes == sum(path.stat().st_size for path in self.files())
        assert disk.chunks == len(self.files())
        assert all(path.stat().st_size == SIZES[path.stem] for path in self.files())
        keys = self.store.keys()
        assert not keys & {key_of(number) for number in self.deleted}
        assert keys >= {key_of(number) for number in self.kept}
        assert not self.recorder.of(ChunkDamaged)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.fsync.stop()
            shutil.rmtree(self.folder)


TestStore = StoreMachine.TestCase
TestStore.settings = examples(25, stateful_step_count=12, deadline=None)
