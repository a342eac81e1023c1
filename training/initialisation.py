"""Initial weights that already hold two circuits: one for copying, one for binding.

From random weights a model of this size spends most of a short training finding out that text
repeats and that a fact belongs to the name before it. Here layer 0 starts with a head that notes
the previous token and one that notes the last surname; layer 1 starts with heads that attend to
tokens whose first note equals the current token (an induction head), and layer 2 with heads that
attend to tokens with the same surname in their notes; both copy what they find. Everything else is
random, and everything is trained. Called by `train`.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.model import Attention, ModelSettings, Reader
from training.vocabulary import SURNAMES

_CONTENT = slice(0, 192)  # dimensions of the residual stream that hold a token's identity
_NOTE = slice(192, 224)  # the previous token's identity, written by layer 0
_SUBJECT = slice(224, 254)  # the last surname's identity, written by layer 0
_SURNAME = 254  # the same for every surname, zero for other tokens
_CONSTANT = 255  # the same for every token: lets attention depend on positions alone
_SCALE = 0.25  # standard deviation of the embeddings
_FAST = 6  # rotary planes that tell neighbouring positions apart
_RECENT = slice(4, 12)  # rotary planes that together prefer near to far, up to some hundred tokens
_SLOW = 8  # the first rotary plane that hardly turns within a thousand tokens


def initial_reader(tokenizer: Tokenizer, seed: int) -> Reader:
    """A fresh model; a word's tokens with and without leading space start out alike."""
    torch.manual_seed(seed)
    reader = Reader(ModelSettings())
    with torch.no_grad():
        _set_embeddings(reader, tokenizer)
        projection = _orthonormal(32, 192)
        _set_previous_token_head(reader.model.attention(0), projection)
        _set_surname_head(reader.model.attention(0))
        parts = (slice(0, 16), slice(16, 32))
        _set_copying_heads(reader.model.attention(1), projection, _CONTENT, _NOTE, parts, 1.7)
        same = torch.eye(30)
        parts = (slice(0, 16), slice(14, 30))
        _set_copying_heads(reader.model.attention(2), same, _SUBJECT, _SUBJECT, parts, 1.5)
    return reader


def _orthonormal(rows: int, columns: int) -> Tensor:
    """Random orthonormal rows."""
    basis: Tensor = torch.linalg.qr(torch.randn(columns, rows))[0]
    return basis.T


def _set_embeddings(reader: Reader, tokenizer: Tokenizer) -> None:
    """Embeddings with a note left blank and a constant; the head is parallel to their content."""
    embeddings = reader.model.embed_tokens.weight
    embeddings.normal_(std=_SCALE)
    embeddings[:, _NOTE.start :] = 0.0
    vocabulary = tokenizer.get_vocab()
    for token, spaced in vocabulary.items():
        bare = vocabulary.get(token.removeprefix("Ġ"))
        if token.startswith("Ġ") and bare is not None:
            embeddings[bare] = 0.8 * embeddings[spaced] + 0.6 * embeddings[bare]
    reader.lm_head.weight.zero_()
    reader.lm_head.weight[:, _CONTENT] = embeddings[:, _CONTENT] * 0.15
    embeddings[:, _CONSTANT] = _SCALE * 192**0.5
    surnames = [vocabulary["Ġ" + name] for name in SURNAMES]
    embeddings[surnames, _SURNAME] = _SCALE * 192**0.5


def _set_previous_token_head(attention: Attention, projection: Tensor) -> None:
    """Query head 0 looks one position back, and writes the token's projection into the note."""
    settings = attention.settings
    half = settings.head_dim // 2
    turns = settings.rope_theta ** (-torch.arange(_FAST) / half)  # radians per position
    strength = 0.63
    q, k, v, o = _weights(attention)
    q[: settings.head_dim] = 0.0
    q[:_FAST, _CONSTANT] = strength
    k[: settings.head_dim] = 0.0
    k[:_FAST, _CONSTANT] = strength * turns.cos()
    k[half : half + _FAST, _CONSTANT] = strength * turns.sin()
    v[: settings.head_dim] = 0.0
    v[: settings.head_dim, _CONTENT] = projection
    o[_NOTE, : settings.head_dim] = torch.eye(settings.head_dim)


def _set_surname_head(attention: Attention) -> None:
    """Query head 2 looks at the nearest surname, and notes a projection of it."""
    settings = attention.settings
    size, half = settings.head_dim, settings.head_dim // 2
    q, k, v, o = _weights(attention)
    head, group = slice(2 * size, 3 * size), slice(size, 2 * size)
    planes = torch.zeros(size)
    planes[_RECENT] = 0.42
    planes[half - 1] = 0.8  # hardly turns: all surnames before all other tokens
    q[head] = 0.0
    q[head, _CONSTANT] = planes
    k[group] = 0.0
    k[group, _SURNAME] = planes
    v[group] = 0.0
    v[size : size + 30, _CONTENT] = _orthonormal(30, 192)
    o[_SUBJECT, 2 * size : 2 * size + 30] = torch.eye(30)


def _set_copying_heads(
    attention: Attention,
    projection: Tensor,
    asked: slice,
    noted: slice,
    parts: tuple[slice, slice],
    strength: float,
) -> None:
    """Query heads 0 to 3 attend where `noted` equals the projection of `asked`, and copy content.

    Heads 0 and 1 compare the first of `parts` (of the noted dimensions), heads 2 and 3 the second.
    """
    settings = attention.settings
    size, half = settings.head_dim, settings.head_dim // 2
    planes = torch.cat((torch.arange(_SLOW, half), torch.arange(half + _SLOW, size)))
    copied = _orthonormal(2 * size, 192)
    q, k, v, o = _weights(attention)
    for group, part in enumerate(parts):
        rows = slice(size * group, size * (group + 1))
        k[rows] = 0.0
        k[size * group + planes, noted] = strength * torch.eye(len(projection))[part]
        v[rows] = 0.0
        v[rows, _CONTENT] = copied[rows]
        for head in (2 * group, 2 * group + 1):
            q[size * head : size * (head + 1)] = 0.0
            q[size * head + planes, asked] = strength * projection[part]
            o[_CONTENT, size * head : size * (head + 1)] = copied[rows].T


def _weights(attention: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
        attention.o_proj.weight,
    )
