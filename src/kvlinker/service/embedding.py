"""Turns texts into vectors with an embedding model, for clients and for search by meaning.
The library ``sentence-transformers`` reads such models, and computes with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvlinker.base.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
)
from kvlinker.base.installing import install_command
from kvlinker.base.threads import compute_serially
from kvlinker.engines.contract.contract import engine_closed
from kvlinker.engines.contract.model_files import choose_device
from kvlinker.prompting.encoding import LengthLimit, TextEncoder, require_unicode
from kvlinker.settings import Settings

BATCH_TEXTS = 32
"""The most texts that are computed at once: those of other requests come in between."""

BATCH_TOKENS = 8192
"""The most tokens that are computed at once, padding included. A longer text is computed alone."""

NO_LIMIT = 2**20
"""The most tokens of a text where the model has no limit."""

Role = Literal["query", "document"]
"""The purpose of a text: models may have a prompt of its own for each."""

EmbeddingInput = str | Sequence[int]
"""A text, or token ids of the embedding model, which mean the text that they decode to."""


class Batch(NamedTuple):
    """Texts that are computed at once."""

    places: list[int]
    """Where they stand in their request."""

    texts: list[str]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed, in batches of about the same length."""

    batches: Sequence[Batch]
    role: Role | None

    tokens: int
    """The tokens of all texts, as the model reads them."""


class Embedder:
    """An embedding model. All methods may be called from any thread; a thread of its own computes,
    one batch after another, on the device of the settings, or in one CPU thread, so that the
    engine keeps the others."""

    def __init__(self, settings: Settings) -> None:
        """Load the model in the folder ``settings.embedding_model``. Raises ModelLoadError, and
        InvalidRequestError if the library is not installed."""
        folder = Path(settings.embedding_model or "").expanduser()
        if not folder.is_dir():
            raise ModelLoadError(
                f"No embedding model at {folder}: there is no such folder. Give one of"
                " sentence-transformers, or of a transformers encoder, whose tokens are averaged."
            )
        self.name = folder.resolve().name
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="kvlinker-embedding", initializer=compute_serially
        )
        try:
            self._model = self._thread.submit(_load, folder, settings).result()
            tokenizer = self._model.tokenizer
            self._encoder = TextEncoder(
                cast(Any, SimpleNamespace(backend_tokenizer=_backend(tokenizer, folder)))
            )
            self.dimensions: int = self._model.get_embedding_dimension()
            self.fingerprint = _fingerprint(folder)
        except BaseException:
            self._thread.shutdown()
            raise
        longest = self._model.max_seq_length
        self.max_tokens = NO_LIMIT if longest is None or math.isinf(longest) else int(longest)
        self._limit = LengthLimit(self._encoder, self.max_tokens)

    def prepare(
        self, texts: Sequence[EmbeddingInput], role: Role | None = None
    ) -> EmbeddingRequest:
        """Return the vectors that ``submit`` computes batch by batch. Without a ``role``, the
        model's default prompt stands before texts, if it has one.

        Raises InvalidRequestError for an empty text and an unknown token id, and ContextLengthError
        for a text that is too long (``input.<index>``); with a role, only its beginning counts.
        """
        prompts, default = self._model.prompts, self._model.default_prompt_name
        prompt = "" if role or default is None else prompts[default]
        written: list[str] = []
        counts: list[int] = []
        for index, text in enumerate(texts):
            try:
                written.append(self._written(text, whole=role is None))
                counts.append(self._count(prompt + written[-1], whole=role is None))
            except InvalidRequestError as error:
                error.param = f"input.{index}"
                raise
        batches = [
            Batch(places, [written[place] for place in places]) for places in _batches(counts)
        ]
        return EmbeddingRequest(batches, role, sum(counts))

    def submit(self, request: EmbeddingRequest, batch: Batch) -> Future[NDArray[np.float32]]:
        """Compute the vectors [texts, dimensions] of one batch, each of length 1; cancelling the
        future before its turn leaves it out. Raises EngineClosedError."""
        try:
            return self._thread.submit(self._compute, batch.texts, request.role)
        except RuntimeError as error:
            raise engine_closed() from error

    def embed(
        self,
        texts: Sequence[EmbeddingInput],
        role: Role | None = None,
        *,
        dimensions: int | None = None,
    ) -> NDArray[np.float32]:
        """Return the vectors [texts, dimensions] of texts, each of length 1, in their order: of all
        dimensions, or the first ones. Raises the errors of ``prepare`` and ``submit``, and
        InvalidRequestError for more dimensions than there are."""
        self.check_dimensions(dimensions)
        request = self.prepare(texts, role)
        vectors = np.empty((len(texts), self.dimensions), np.float32)
        for batch in request.batches:
            computing = self.submit(request, batch)
            try:
                vectors[batch.places] = computing.result()
            except CancelledError as error:
                raise engine_closed() from error
        return self.cut(vectors, dimensions)

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidRequestError unless vectors can be cut to these dimensions; None stands for
        all."""
        if dimensions is not None and not 0 < dimensions <= self.dimensions:
            raise InvalidRequestError(
                f"dimensions is {dimensions}, but vectors of {self.name!r} have 1 to"
                f" {self.dimensions}.",
                param="dimensions",
            )

    def cut(self, vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
        """Return vectors with their first ``dimensions`` alone, of length 1 again."""
        return vectors if dimensions is None else _of_length_1(vectors[:, :dimensions])

    def close(self) -> None:
        """Finish the batch that is being computed. Idempotent."""
        self._thread.shutdown(cancel_futures=True)

    def _written(self, text: EmbeddingInput, *, whole: bool) -> str:
        if not isinstance(text, str):
            if unknown := [each for each in text if not 0 <= each < self._encoder.vocab_size]:
                raise InvalidRequestError(
                    f"Token id {unknown[0]} is not in the vocabulary of {self.name!r}: ids go from"
                    f" 0 to {self._encoder.vocab_size - 1}."
                )
            self._limit.check_ids(len(text), param="input")
            text = self._encoder.decode_data(text)
        if whole and not text:
            raise InvalidRequestError("There is nothing to embed: the text is empty.")
        require_unicode(text, param="input")
        return text

    def _count(self, text: str, *, whole: bool) -> int:
        """Return the number of tokens that the model reads of a text, which must fit if it is to be
        read ``whole``."""
        if whole:
            self._limit.check_texts([text], param="input")
        else:
            text = text[: self._limit.max_characters]
        around = len(self._encoder.opening) + len(self._encoder.closing)
        count = len(self._encoder.encode_prompt(text)) + around
        if whole and count > self.max_tokens:
            raise ContextLengthError(
                f"The text has {count:,} tokens; the embedding model reads {self.max_tokens:,}."
                " Shorten it, or send its parts."
            )
        return min(count, self.max_tokens)

    def _compute(self, texts: list[str], role: Role | None) -> NDArray[np.float32]:
        model = self._model
        encode = {"query": model.encode_query, "document": model.encode_document}.get(
            role or "", model.encode
        )
        vectors = encode(texts, batch_size=len(texts), show_progress_bar=False)
        return _of_length_1(np.asarray(vectors, np.float32))


def embedder_of(embedder: Embedder | None) -> Embedder:
    """Return the embedder. Raises ModelNotFoundError if there is none."""
    if embedder is None:
        raise ModelNotFoundError(
            "There is no embedding model here. The operator names one: embedding_model=PATH of LLM,"
            " or kvlinker serve --embedding-model PATH.",
            code="embeddings_off",
        )
    return embedder


def _load(folder: Path, settings: Settings) -> Any:
    """Read the model in a folder, in float32. Its parts, pooling and prompts are those that its
    files name; an encoder alone is averaged."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise InvalidRequestError(
            "Embedding models need a library that is not installed:"
            f" {install_command('embeddings')}.",
            param="embedding_model",
        ) from error
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        return SentenceTransformer(
            str(folder),
            device=str(choose_device(settings.device)),
            trust_remote_code=settings.trust_remote_code,
            local_files_only=True,
            model_kwargs={"dtype": "float32"},
        ).eval()
    except Exception as error:  # whatever the library meets
        raise ModelLoadError(f"Cannot load the embedding model {folder}: {error}") from error


def _backend(tokenizer: Any, folder: Path) -> Any:
    """Return the tokenizer's backend, which threads may share. Raises ModelLoadError."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "encode_batch_fast"):
        raise ModelLoadError(f"The embedding model {folder} has no tokenizer.json; it needs one.")
    return backend


def _fingerprint(folder: Path) -> str:
    """Compute the fingerprint of a model's folder: BLAKE3 (hex) over its files, without those that
    are only for people."""
    digest = blake3()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and path.suffix != ".md" and not str(name).startswith("."):
            content = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
            digest.update(f"{name.as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _batches(counts: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places of texts, given the tokens of each, that are computed at once: those of like
    length together, so that there is little padding."""
    batch: list[int] = []
    for place in sorted(range(len(counts)), key=counts.__getitem__):
        if batch and (len(batch) == BATCH_TEXTS or (len(batch) + 1) * counts[place] > BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _of_length_1(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return cast(NDArray[np.float32], vectors / np.maximum(lengths, np.float32(1e-12)))
