"""Embedding models: the library's own results, whatever the batches; limits, and search by
meaning."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlinker.base.errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    ModelLoadError,
)
from kvlinker.llm import LLM
from kvlinker.service.context_caches.texts import fused
from kvlinker.service.embedding import BATCH_TEXTS, Embedder
from kvlinker.settings import load_settings
from tests.doors.http.serving import tiny_model, tiny_settings
from tests.toy_embedders import LONGEST, encoder, sentence_model, synonyms
from tests.waiting import PATIENCE, wait_until

pytest.importorskip(
    "sentence_transformers", reason="needs the extra: pip install 'kvlinker[embeddings]'"
)

TEXTS = ("A cat.", "The dog sat on the mat, and was fine.", "alpha beta gamma")


@pytest.fixture
def embedder(tmp_path: Path) -> Any:
    made = Embedder(load_settings(embedding_model=str(sentence_model(tmp_path / "tiny"))))
    yield made
    made.close()


def reference(folder: Path, texts: Any, **options: Any) -> NDArray[np.float32]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    vectors: NDArray[np.float32] = model.encode(
        list(texts), normalize_embeddings=True, batch_size=1, **options
    )
    return vectors


@pytest.mark.parametrize(
    ("pooling", "normalized"), [("mean", True), ("cls", False), ("lasttoken", False)]
)
def test_vectors_are_the_librarys(pooling: str, normalized: bool, tmp_path: Path) -> None:
    folder = sentence_model(tmp_path / "tiny", pooling=pooling, normalized=normalized)
    embedder = Embedder(load_settings(embedding_model=str(folder)))
    texts = TEXTS * BATCH_TEXTS  # several batches, of texts of different lengths
    vectors = embedder.embed(texts)
    assert vectors.shape == (len(texts), 32)
    np.testing.assert_allclose(vectors, reference(folder, texts), atol=1e-5)
    embedder.close()


def test_who_waits_when_it_is_closed_learns_that(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing, goes_on = Event(), Event()
    compute = embedder._compute

    def slowly(*asked: Any) -> NDArray[np.float32]:
        computing.set()
        assert goes_on.wait(PATIENCE)
        return compute(*asked)

    monkeypatch.setattr(embedder, "_compute", slowly)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(embedder.embed, TEXTS[:1])
        assert computing.wait(PATIENCE)
        second = threads.submit(embedder.embed, TEXTS[:1])
        wait_until(lambda: embedder._thread._work_queue.qsize() == 1)
        closed = threads.submit(embedder.close)
        with pytest.raises(EngineClosedError):
            second.result(PATIENCE)
        goes_on.set()
        closed.result(PATIENCE)
        assert first.result(PATIENCE).shape == (1, 32)


def test_an_encoder_of_transformers_is_averaged(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = encoder(tmp_path / "plain")
    embedder = Embedder(load_settings(embedding_model=str(folder)))
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS[1], return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder)(**tokens).last_hidden_state[0]
    mean = hidden.mean(0).numpy()
    np.testing.assert_allclose(
        embedder.embed([TEXTS[1]])[0], mean / np.linalg.norm(mean), atol=1e-5
    )
    embedder.close()


def test_prompts_stand_before_texts(tmp_path: Path) -> None:
    prompts = {"query": "Ask: ", "document": "Passage: ", "plain": "Text: "}
    folder = sentence_model(tmp_path / "tiny", prompts=prompts, default_prompt_name="plain")
    embedder = Embedder(load_settings(embedding_model=str(folder)))
    for role, name in (("query", "query"), ("document", "document"), (None, "plain")):
        expected = reference(folder, TEXTS, prompt=prompts[name])
        np.testing.assert_allclose(embedder.embed(TEXTS, role), expected, atol=1e-5)  # type: ignore[arg-type]
    without = sentence_model(tmp_path / "without")
    bare = Embedder(load_settings(embedding_model=str(without)))
    more = embedder.prepare(TEXTS[:1]).tokens - bare.prepare(TEXTS[:1]).tokens
    assert more > 0, "the default prompt is counted"
    embedder.close()
    bare.close()


def test_token_ids_mean_their_text(embedder: Embedder) -> None:
    from tests.toy_tokenizers import byte_level

    ids = byte_level()(TEXTS[1], add_special_tokens=False)["input_ids"]
    np.testing.assert_array_equal(embedder.embed([ids]), embedder.embed([TEXTS[1]]))


def test_first_dimensions_have_length_1(embedder: Embedder) -> None:
    whole, cut = embedder.embed(TEXTS), embedder.embed(TEXTS, dimensions=4)
    assert cut.shape == (3, 4)
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(
        cut, whole[:, :4] / np.linalg.norm(whole[:, :4], axis=1, keepdims=True), atol=1e-6
    )


REFUSED: list[tuple[Any, Any, type[InvalidRequestError], str]] = [
    (["a", ""], {}, InvalidRequestError, "input.1"),
    ([[5, 100_000]], {}, InvalidRequestError, "100000"),
    (["a", "word " * LONGEST * 2], {}, ContextLengthError, f"reads {LONGEST}"),
    ([[5] * (LONGEST + 1)], {}, ContextLengthError, "input"),
    (["a"], {"dimensions": 33}, InvalidRequestError, "1 to 32"),
    (["a"], {"dimensions": 0}, InvalidRequestError, "1 to 32"),
]


def test_what_cannot_be_embedded_is_named(embedder: Embedder, subtests: pytest.Subtests) -> None:
    for texts, options, error, said in REFUSED:
        with subtests.test(said, options=options):
            with pytest.raises(error) as raised:
                embedder.embed(texts, **options)
            assert said in f"{raised.value.message} {raised.value.param}"


def test_of_long_documents_and_queries_the_beginning_counts(embedder: Embedder) -> None:
    text = "word " * 4 * LONGEST
    vectors = embedder.embed([text, f"{text} and more"], "document")
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert embedder.prepare([text, ""], "query").tokens <= 2 * LONGEST


@pytest.mark.parametrize("files", [None, {}, {"config.json": "{}"}])
def test_what_is_no_model_is_refused(files: dict[str, str] | None, tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(ModelLoadError, match="missing"):
        Embedder(load_settings(embedding_model=str(folder)))


def test_ranks_are_fused_by_their_reciprocals() -> None:
    scores = fused(["a", "b", "c"], ["c", "d", "a"])
    assert sorted(scores, key=lambda each: -scores[each]) == ["a", "c", "b", "d"]
    assert scores["a"] == pytest.approx(1 / 61 + 1 / 63)


CHUNKS = (
    "The automobile is red.",
    "My physician lives next door.",
    "A dwelling by the sea.",
    "It is late, and I have nothing to say.",
)


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts an LLM on the same state directory, with other settings."""
    opened: list[LLM] = []

    def start(**options: Any) -> LLM:
        for llm in opened:
            llm.close()
        settings = tiny_settings(tmp_path / "state", **options)
        opened.append(LLM.from_model(tiny_model(), settings))
        return opened[-1]

    yield start
    for llm in opened:
        llm.close()


Start = Callable[..., LLM]


def found(llm: LLM, query: str, **options: Any) -> list[str]:
    llm.caches.settle()
    return [hit.text for hit in llm.search(query, **options)]


def test_search_finds_by_meaning_what_words_do_not(start: Start, tmp_path: Path) -> None:
    query = "car or doctor?"
    assert CHUNKS[0] not in found(start(), query)
    llm = start(embedding_model=str(synonyms(tmp_path / "synonyms")))
    llm.generate_context_cache(CHUNKS)
    assert set(found(llm, query, limit=2)) == {CHUNKS[0], CHUNKS[1]}
    assert found(llm, "home", limit=1) == [CHUNKS[2]]
    assert found(llm, "nothing to say", limit=1) == [CHUNKS[3]], "words count as ever"
    hits = llm.search(query)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert all(hit.tokens == len(llm.read_cache(hit.id).token_ids) for hit in hits)


def test_chunks_of_before_get_vectors(start: Start, tmp_path: Path) -> None:
    llm = start()
    llm.generate_context_cache(CHUNKS)
    assert found(llm, "car") == []
    llm = start(embedding_model=str(synonyms(tmp_path / "synonyms")))
    assert found(llm, "car", limit=1) == [CHUNKS[0]]


def test_vectors_of_another_model_are_not_used(start: Start, tmp_path: Path) -> None:
    folder = str(synonyms(tmp_path / "synonyms"))
    llm = start(embedding_model=str(sentence_model(tmp_path / "tiny")))
    llm.generate_context_cache(CHUNKS)
    llm.caches.settle()
    others = llm.embedder
    assert others is not None
    llm = start(embedding_model=folder)
    assert found(llm, "car", limit=1) == [CHUNKS[0]], "they have other dimensions"
    assert llm.embedder is not None
    assert llm.embedder.fingerprint != others.fingerprint


def test_tenants_and_metadata_are_kept_apart(start: Start, tmp_path: Path) -> None:
    llm = start(embedding_model=str(synonyms(tmp_path / "synonyms")))
    llm.generate_context_cache(CHUNKS, tenant="anna", metadata={"page": "1"})
    llm.generate_context_cache(["No automobile here."], tenant="bert")
    assert found(llm, "car", tenant="bert") == ["No automobile here."]
    assert found(llm, "car", tenant="carl") == []
    assert found(llm, "car", tenant="anna", metadata={"page": "2"}) == []
    assert CHUNKS[0] in found(llm, "car", tenant="anna", metadata={"page": "1"})
    llm.generate_context_cache(["A shared vehicle."], scope="shared")
    assert found(llm, "car", tenant="bert", scope="shared") == ["A shared vehicle."]


def test_what_is_gone_is_not_found(start: Start, tmp_path: Path) -> None:
    llm = start(embedding_model=str(synonyms(tmp_path / "synonyms")))
    made = llm.generate_context_cache(CHUNKS)
    assert CHUNKS[0] in found(llm, "car")
    llm.expire_cache(made[0])
    assert CHUNKS[0] not in found(llm, "car")
    llm = start(embedding_model=str(tmp_path / "synonyms"), search="off")
    with pytest.raises(InvalidRequestError, match="Search is off"):
        llm.search("car")
    assert llm.embed("car").shape == (1, 4), "embeddings have nothing to do with it"
