"""llama.cpp as a peer, with the weights as they are and quantised by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvlinker.base.errors import ModelLoadError
from kvlinker.quality.bench.harness.measurement import Tokens, median_step
from kvlinker_lab.peers.llama_files import ARCHITECTURE, llama_file
from kvlinker_lab.peers.peer import STEP_TOKENS, PeerKind, Task, register

QUANTIZATIONS = {"llama.cpp": None, "llama.cpp-q8_0": "Q8_0", "llama.cpp-q4_0": "Q4_0"}

Logits = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
"""[rows, vocabulary]."""


class LlamaContext:
    """Holds the KV of some sequences, and computes tokens of them."""

    def __init__(self, pointer: Any, vocabulary: int) -> None:
        """Take a context of the library, which belongs to the caller."""
        self._pointer = pointer
        self._vocabulary = vocabulary

    def append(self, tokens: Tokens, position: int, *, last: int = 1) -> Logits:
        """Compute tokens of sequences 0, 1 … from ``position`` on; return the logits behind the
        last ``last`` tokens of each.

        ``tokens``: [sequences, tokens]; the logits: [sequences * last, vocabulary], a sequence's
        own together. Raises ModelLoadError where llama.cpp fails.
        """
        import llama_cpp

        sequences, length = tokens.shape
        batch = llama_cpp.llama_batch_init(tokens.size, 0, 1)
        try:
            batch.n_tokens = tokens.size
            for index, token in enumerate(tokens.flat):
                sequence, offset = divmod(index, length)
                batch.token[index] = int(token)
                batch.pos[index] = position + offset
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = offset >= length - last
            if status := llama_cpp.llama_decode(self._pointer, batch):
                raise ModelLoadError(
                    f"llama.cpp cannot compute {tokens.size} tokens: status {status}."
                )
        finally:
            llama_cpp.llama_batch_free(batch)
        logits = llama_cpp.llama_get_logits(self._pointer)
        return np.ctypeslib.as_array(logits, (sequences * last, self._vocabulary))

    def prefill(self, tokens: Tokens, position: int = 0) -> Logits:
        """Compute tokens of sequences 0, 1 … from ``position`` on, as many at once as a step may
        take; return the logits behind the last ones.

        ``tokens``: [sequences, tokens]; the logits: [sequences, vocabulary].
        """
        width = max(STEP_TOKENS // len(tokens), 1)
        for begin in range(0, tokens.shape[1], width):
            logits = self.append(tokens[:, begin : begin + width], position + begin)
        return logits

    def forget(self, position: int) -> None:
        """Free the KV of all sequences from ``position`` on."""
        import llama_cpp

        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._pointer), -1, position, -1)


class LlamaCppPeer:
    """Runs a model in llama.cpp, with a context of its own for each measurement."""

    def __init__(self, model: Any, task: Task) -> None:
        """Take a model of the library, which belongs to the caller."""
        self._model = model
        self._task = task

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float] | None:
        """Return the log probabilities of all tokens but the first, in nats."""
        with self._context(1, len(tokens)) as context:
            logits = context.append(np.array([tokens]), 0, last=len(tokens))[:-1].astype(np.float64)
        logprobs_found = logits[np.arange(len(tokens) - 1), list(tokens[1:])] - np.logaddexp.reduce(
            logits, axis=1
        )
        found: list[float] = logprobs_found.tolist()
        return found

    def prefill(self, tokens: Sequence[int]) -> float:
        """Return the seconds to the first token."""
        with self._context(1, len(tokens)) as context:
            begin = time.perf_counter()
            context.prefill(np.array([tokens])).argmax()
            return time.perf_counter() - begin

    def decode_step(self, tokens: Tokens, *, steps: int) -> float:
        """Return the median seconds of a step."""
        requests, length = tokens.shape
        with self._context(requests, length + steps + 1) as context:
            logits = context.prefill(tokens)
            times = []
            for step in range(steps + 1):
                chosen = logits.argmax(-1)
                times.append(time.perf_counter())
                logits = context.append(chosen[:, None], length + step)
        return median_step(times)

    def _context(self, sequences: int, tokens: int) -> AbstractContextManager[LlamaContext]:
        """Make a context of ``sequences`` with ``tokens`` each."""
        return llama_context(
            self._model, self._task.vocabulary, sequences, tokens, self._task.threads
        )


@contextmanager
def llama_context(
    model: Any, vocabulary: int, sequences: int, tokens: int, threads: int
) -> Iterator[LlamaContext]:
    """Make a context of ``sequences`` with ``tokens`` each, for a model of the library. Raises
    ModelLoadError where there is no memory for it."""
    import llama_cpp

    options = llama_cpp.llama_context_default_params()
    options.n_ctx = sequences * (
        -(-tokens // 256) * 256
    )  # of which each sequence has an equal part
    options.n_seq_max = sequences
    options.n_batch = STEP_TOKENS
    options.n_threads = options.n_threads_batch = threads
    pointer = llama_cpp.llama_init_from_model(model, options)
    if pointer is None:
        raise ModelLoadError(f"llama.cpp has no room for {sequences} × {tokens} tokens.")
    try:
        yield LlamaContext(pointer, vocabulary)
    finally:
        llama_cpp.llama_free(pointer)


@contextmanager
def llama_model(path: Path, *, gpu: bool = False) -> Iterator[Any]:
    """Load a GGUF file as a model of the library. Raises ModelLoadError where llama.cpp cannot."""
    import llama_cpp

    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = -1 if gpu else 0
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(bytes(path), options)
    if model is None:
        raise ModelLoadError(f"llama.cpp cannot load {path}.")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


@contextmanager
def start_llama_cpp(task: Task, *, quantization: str | None) -> Iterator[LlamaCppPeer]:
    """Load the task's GGUF file, or its model from one that is written where it is not there
    yet."""
    path = Path(task.gguf) if task.gguf else None
    path = path or llama_file(Path(task.model), Path(task.folder), quantization)
    with llama_model(path, gpu=task.device != "cpu") as model:
        yield LlamaCppPeer(model, task)


for _name, _quantization in QUANTIZATIONS.items():
    register(
        PeerKind(
            _name,
            partial(start_llama_cpp, quantization=_quantization),
            program="llama.cpp",
            modules=("llama_cpp", "gguf"),
            distributions=("llama-cpp-python",),
            installation="pip install 'kvlinker-lab[peers]', which compiles it",
            model_types=frozenset({ARCHITECTURE}),
            quantises=_quantization is not None,
        )
    )
