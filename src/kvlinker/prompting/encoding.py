"""Encodes text as token ids: as data, for chunks and for splitting, or as part of a prompt; and
refuses texts that cannot fit into a context window before it encodes them, which takes time and
memory."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tokenizers import Encoding, Tokenizer, models
from tokenizers.decoders import DecodeStream

from kvlinker.base.errors import ContextLengthError, InvalidRequestError
from kvlinker.prompting.segments import TokenPlaces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


LEAST_CHARACTERS = 32
"""The characters that a token is taken to stand for at the least: some tokenizers drop whitespace,
or write an unknown word as one token."""

SAMPLED_CHARACTERS = 16
"""The beginning of a long text that is encoded first, in characters for each token of the
window."""

SAMPLE_EXCESS = 2
"""The multiple of the window's tokens beyond which a beginning has its whole text refused: a text
has hardly fewer tokens than its beginning, but a tokenizer may merge across the cut."""


def _spelt_bytes() -> dict[str, int]:
    """Return the bytes by the characters with which GPT-2's vocabulary spells them: those that can
    be seen spell themselves, the others follow from 256 on (Radford et al. 2019)."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTES = _spelt_bytes()


class TextEncoder:
    """Encodes text with private copies of a tokenizer's backend, so that threads may share it.

    The copies share the vocabulary, which does not change.
    ``opening`` and ``closing`` are the special tokens that the tokenizer puts around a prompt of
    its own accord, such as BOS. ``vocab_size`` is the largest token id + 1; ``longest_token`` is
    the length of the longest token in characters, as the vocabulary spells it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend: Tokenizer = tokenizer.backend_tokenizer
        self._prompt = _unlimited_copy(backend)
        self._prompt.encode_special_tokens = False
        self._continued = _without_leading_space(self._prompt)
        self._data = _unlimited_copy(backend)
        self._data.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_tokens = {i: token.content for i, token in added.items() if token.special}
        self.opening, self.closing = _special_tokens_around(self._prompt)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=0)

    def encode_data(self, text: str, *, param: str = "chunks") -> tuple[int, ...]:
        """Encode a chunk's text, without special tokens even where it spells one: documents are
        data.

        Raises InvalidRequestError (``param``) where the tokenizer knows no other way to write such
        a text.
        """
        ids = _encoded(self._data, text).ids
        if not self._special_tokens.keys().isdisjoint(ids):
            ids = self._spelled_apart(text, ids, param=param)
        return tuple(ids)

    def decode_data(self, token_ids: Sequence[int]) -> str:
        """Return the text that ``encode_data`` encoded, as far as the tokenizer's normalisation
        keeps it.

        Special tokens, such as BOS before a chunk, are left out.
        """
        return self._data.decode(list(token_ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token alone, which may be a part of a character's: as GPT-2's and
        as SentencePiece's vocabularies spell them, else those of its text."""
        spelt = self._data.id_to_token(token_id) or ""
        if (byte := re.fullmatch(r"<0x([0-9A-F]{2})>", spelt)) is not None:
            return bytes([int(byte[1], 16)])
        text = self._data.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text and all(char in _BYTES for char in spelt):
            return bytes(_BYTES[char] for char in spelt)
        return text.encode()

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token, special ones included; joined, they are the text of all.

        A character of several tokens is the last one's; bytes that make no character in the end
        become U+FFFD.
        """
        stream = DecodeStream(skip_special_tokens=False)
        texts = [stream.step(self._data, token) or "" for token in token_ids]
        if texts:
            begun = "".join(texts)
            texts[-1] += self._data.decode(list(token_ids), skip_special_tokens=False)[len(begun) :]
        return texts

    def count_data(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of ``encode_data`` for each text. Raises the errors of that
        (``input``)."""
        encodings = self._data.encode_batch_fast(list(texts), add_special_tokens=False)
        pairs = zip(texts, encodings, strict=True)
        return [len(self._spelled_apart(text, each.ids, param="input")) for text, each in pairs]

    def count_roughly(self, text: str) -> int:
        """Count the tokens of ``text`` with special tokens that it spells as they come: for
        estimates."""
        return len(_encoded(self._data, text))

    def token_starts(self, text: str) -> list[int]:
        """Return the index of the first character of each token of ``text``, ascending; bytes of
        one character share it."""
        return [begin for begin, _ in _spans(_encoded(self._data, text, offsets=True))]

    def encode_prompt(self, text: str, *, continued: bool = False) -> tuple[int, ...]:
        """Encode a prompt's own text; special tokens that it spells are special tokens, and no
        others are added.

        With ``continued``, other tokens stand before it, and no space is put before its first word.
        """
        ids = _encoded(self._prompt, text).ids
        if not continued or self._continued is None:
            return tuple(ids)
        if self._first_added(ids) is None:
            return tuple(_encoded(self._continued, text).ids)
        return self.encode_prompt_with_places(text, continued=True)[0]

    def encode_prompt_with_places(
        self, text: str, *, continued: bool = False
    ) -> tuple[tuple[int, ...], TokenPlaces]:
        """Return what ``encode_prompt`` does, and the places of the tokens."""
        encoding = _encoded(self._prompt, text, offsets=True)
        ids, spans = encoding.ids, _spans(encoding)
        if continued and self._continued is not None:
            # Only what comes before the first added token was encoded as the start of a text.
            added = self._first_added(ids)
            head = text if added is None else text[: spans[added][0]]
            begun = _encoded(self._continued, head, offsets=True)
            behind = len(ids) if added is None else added
            ids, spans = [*begun.ids, *ids[behind:]], [*_spans(begun), *spans[behind:]]
        edges = np.maximum.accumulate(np.array(spans, dtype=np.int64).reshape(-1, 2))
        return tuple(ids), TokenPlaces(edges[:, 0], edges[:, 1])

    def _first_added(self, ids: Sequence[int]) -> int | None:
        """Return the index of the first token that was added to the vocabulary; None if there is
        none."""
        return next((i for i, token in enumerate(ids) if token in self._added_ids), None)

    def encode_word(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Encode a word as it may stand within a text: without a space before it, and with one."""
        spellings = (self.encode_prompt(spelled, continued=True) for spelled in (word, f" {word}"))
        return tuple(dict.fromkeys(ids for ids in spellings if ids))

    def _spelled_apart(self, text: str, ids: list[int], *, param: str) -> list[int]:
        """Return the ``ids`` of a text, with special tokens that ``text`` spells taken apart.

        ``encode_special_tokens`` keeps added tokens from being matched, but a word-level or unigram
        vocabulary may hold the same string as an ordinary entry.
        """
        if self._special_tokens.keys().isdisjoint(ids):
            return ids
        spelled = self._spelled(text)
        if not spelled:
            return ids
        cuts = [0, *(start + 1 for start, _ in spelled), len(text)]
        apart: list[int] = []
        for start, end in pairwise(cuts):
            piece = text[start:end]
            if still := self._spelled(piece):
                raise InvalidRequestError(
                    f"The tokenizer cannot write the special token {still[0][1]!r} as plain text. "
                    "Remove it from the text.",
                    param=param,
                )
            apart += _encoded(self._data, piece).ids
        return apart

    def _spelled(self, text: str) -> list[tuple[int, str]]:
        """Find where ``text`` spells special tokens that are in its encoding, and which: as it is,
        or once it is normalised, by which ``＜s＞`` may become ``<s>``."""
        encoding = _encoded(self._data, text, offsets=True)
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        names = ((self._special_tokens.get(token), start, end) for token, (start, end) in tokens)
        return [
            (start, name)
            for name, start, end in names
            if name is not None
            and (name in text[start:end] or name in self._normalised(text[start:end]))
        ]

    def _normalised(self, text: str) -> str:
        normalizer = self._data.normalizer
        return text if normalizer is None else cast(str, normalizer.normalize_str(text))


class LengthLimit:
    """Checks the texts of one prompt, or of one chunk, against a context window of ``max_tokens``
    tokens, in little time."""

    def __init__(self, encoder: TextEncoder, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.max_characters = max_tokens * max(encoder.longest_token, LEAST_CHARACTERS)
        self._encoder = encoder

    def check_texts(self, texts: Sequence[str], *, param: str) -> None:
        """Check texts that are to stand in the window together.

        Raises ContextLengthError for more characters than the window's tokens can stand for, and
        for a long text whose beginning alone has far too many tokens. Texts that pass may be too
        long all the same.
        """
        characters = sum(map(len, texts))
        if characters > self.max_characters:
            raise ContextLengthError(
                f"The text has {characters:,} characters; the context window of {self.max_tokens:,}"
                f" tokens takes at most {self.max_characters:,}. Shorten it, or split it into"
                " chunks.",
                param=param,
            ).exceeding(self.max_tokens * characters // self.max_characters + 1, self.max_tokens)
        sampled = self.max_tokens * SAMPLED_CHARACTERS
        for text in texts:
            if len(text) > sampled:
                tokens = self._encoder.count_roughly(text[:sampled])
                if tokens > self.max_tokens * SAMPLE_EXCESS:
                    raise ContextLengthError(
                        f"The text has {len(text):,} characters, of which the first {sampled:,}"
                        f" alone are {tokens:,} tokens; the context window takes"
                        f" {self.max_tokens:,}. Shorten it, or split it into chunks.",
                        param=param,
                    ).exceeding(tokens, self.max_tokens)

    def check_prompt(self, tokens: int) -> None:
        """Check the number of tokens of a whole prompt. Raises ContextLengthError."""
        if tokens > self.max_tokens:
            raise ContextLengthError(
                f"The prompt has {tokens:,} tokens; the context window takes {self.max_tokens:,}."
                " Shorten the prompt.",
                param="messages",
            ).exceeding(tokens, self.max_tokens)

    def check_ids(self, count: int, *, param: str) -> None:
        """Check the number of token ids of one prompt. Raises ContextLengthError."""
        if count > self.max_tokens:
            raise ContextLengthError(
                f"There are {count:,} token ids; the context window takes {self.max_tokens:,}. Send"
                " fewer.",
                param=param,
            )


def require_unicode(*texts: str, param: str) -> None:
    """Raise InvalidRequestError for texts with lone surrogates, which no tokenizer can encode."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"Invalid Unicode in {param!r}: lone surrogate U+{ord(text[error.start]):04X} at"
                f" character {error.start}. Send valid UTF-8, and surrogates in JSON escapes only"
                " in pairs.",
                param=param,
            ) from None


def _encoded(tokenizer: Tokenizer, text: str, *, offsets: bool = False) -> Encoding:
    """Encode one text without special tokens around it; all offsets are 0 unless they are asked
    for.

    ``Tokenizer.encode`` keeps Python's lock until it is done, so that a long text would hold up
    every other thread; batches release it.
    """
    encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    (encoding,) = encode([text], add_special_tokens=False)
    return encoding


def _spans(encoding: Encoding) -> list[tuple[int, int]]:
    """Return the characters [begin, end) of each token, one by one, so that other threads run in
    between."""
    spans: list[tuple[int, int]] = []
    for token in range(len(encoding)):
        spans.append(encoding.token_to_chars(token) or (0, 0))
    return spans


def _unlimited_copy(backend: Tokenizer) -> Tokenizer:
    result = _copy(backend)
    result.no_truncation()
    result.no_padding()
    return result


def _copy(backend: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose own state is separate, and that has the model of ``backend``, with
    its vocabulary: to copy that takes a second where it is large."""
    result = Tokenizer(backend.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(backend, name)
        if part is not None:
            setattr(result, name, part)
    added = sorted(backend.get_added_tokens_decoder().items())
    for is_special, tokens in groupby((token for _, token in added), lambda each: each.special):
        add = result.add_special_tokens if is_special else result.add_tokens
        add(list(tokens))
    if result.get_added_tokens_decoder() != dict(added):  # ids that have gaps
        return copy.deepcopy(backend)
    return result


def _special_tokens_around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find, with a probe, what the tokenizer adds before and after a text."""
    probe = "a"
    inner = tokenizer.encode(probe, add_special_tokens=False).ids
    outer = tokenizer.encode(probe, add_special_tokens=True).ids
    start = (
        next((i for i in range(len(outer)) if outer[i : i + len(inner)] == inner), 0)
        if inner
        else len(outer)
    )
    return tuple(outer[:start]), tuple(outer[start + len(inner) :])


def _without_leading_space(tokenizer: Tokenizer) -> Tokenizer | None:
    """Copy ``tokenizer`` so that it puts nothing before a text; None if it puts nothing there
    anyway.

    Tokenizers of SentencePiece's kind, such as Llama 2's, encode ``word`` as ``▁word``. That is
    right for a text that begins a prompt, and wrong for one that follows a cached chunk, where it
    would add a space.
    """
    parts = {name: _state(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer")}
    bare = {name: _without_space(state) for name, state in parts.items()}
    if bare == parts:
        return None
    shell = json.loads(Tokenizer(models.BPE()).to_str())
    donor = Tokenizer.from_str(json.dumps(shell | bare))
    result = _copy(tokenizer)
    result.encode_special_tokens = tokenizer.encode_special_tokens
    result.normalizer = donor.normalizer
    result.pre_tokenizer = donor.pre_tokenizer
    return result


def _state(component: Any) -> dict[str, Any] | None:
    """Return the part of ``tokenizer.json`` for a normalizer or pre-tokenizer."""
    return None if component is None else cast(dict[str, Any], json.loads(component.__getstate__()))


def _without_space(state: dict[str, Any] | None) -> dict[str, Any] | None:
    if state is None:
        return None
    match state:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return state | {"prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return state | {"add_prefix_space": False}
        case {"normalizers": list(steps)}:
            return state | {"normalizers": _each(steps)}
        case {"pretokenizers": list(steps)}:
            return state | {"pretokenizers": _each(steps)}
        case _:
            return state


def _each(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kept for step in steps if (kept := _without_space(step)) is not None]
