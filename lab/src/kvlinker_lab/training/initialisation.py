"""Makes initial weights that already hold circuits for copying and for binding facts to their
subjects.

From random weights a model of this size spends most of a short training finding out that text
repeats and that a fact belongs to the name before it. Here layer 0 starts with a head that notes
the previous token and heads that note the last surname and the last city or company. Later layers
start with heads that attend to tokens whose note fits, and copy what they find: to tokens that
follow the current token elsewhere (layer 1, an induction head), to those with the same surname or
the same place in their notes (layer 2), to those that belong to a place which has been copied
(layer 3, the second hop of a bridge), and to the last surnames (layer 4, to choose one of them).
Words of one kind start out alike, and numbers in order. Everything else is random, and everything
is trained. Called by `train`.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvlinker_lab.training import vocabulary as words
from kvlinker_lab.training.model import Attention, ModelSettings, Reader
from kvlinker_lab.training.tokenizer import SPECIAL_TOKENS

_CONTENT = slice(0, 160)  # dimensions of the residual stream that hold a token's identity
_NOTE = slice(160, 192)  # the previous token's identity, written by layer 0
_SUBJECT = slice(192, 222)  # the last surname's identity, written by layer 0
_PLACE = slice(222, 252)  # the last city's or company's identity, written by layer 0
_IS_VALUE = 252  # the same for every word that can be a value, zero for other tokens
_IS_PLACE = 253  # the same for every city and company, zero for other tokens
_IS_SURNAME = 254  # the same for every surname, zero for other tokens
_CONSTANT = 255  # the same for every token: lets attention depend on positions alone
_WIDTH = 160  # of the content
_SCALE = 0.25  # standard deviation of the embeddings
_FAST = 4  # rotary planes that tell neighbouring positions apart
_RECENT = slice(2, 9)  # rotary planes that together prefer near to far, up to some hundred tokens
_SLOW = 8  # the first rotary plane that hardly turns within a thousand tokens

_NAMES = ((*words.WOMEN, *words.MEN), words.SURNAMES)
_VALUES = (
    words.CITIES,
    words.RIVERS,
    words.COMPANIES,
    words.JOBS,
    words.FOODS,
    words.ANIMALS,
    words.INSTRUMENTS,
    words.FIELDS,
    words.COLOURS,
    words.PRODUCTS,
    words.AGES,
)


def initial_reader(tokenizer: Tokenizer, seed: int) -> Reader:
    """Make a fresh model; a word's tokens with and without leading space start out alike."""
    torch.manual_seed(seed)
    reader = Reader(ModelSettings())
    with torch.no_grad():
        basis = _orthonormal(128, _WIDTH)
        place, size = basis[:30], basis[32]
        facts, others = basis[:64], basis[64:]
        surname, repeated = _orthonormal(30, _WIDTH), _orthonormal(32, _WIDTH)
        same = torch.eye(30)
        layers = [reader.model.attention(layer) for layer in range(5)]
        _set_embeddings(reader, tokenizer, place, size)
        _set_previous_token_head(layers[0], repeated)
        _set_last_word_head(layers[0], 1, _IS_SURNAME, surname, _SUBJECT)
        _set_last_word_head(layers[0], 2, _IS_PLACE, place, _PLACE)
        _set_copying_heads(layers[1], 0, repeated, _CONTENT, _NOTE, others, 1.7, 0.0)
        _set_copying_heads(layers[2], 0, same, _SUBJECT, _SUBJECT, facts, 1.7, 0.8)
        _set_copying_heads(layers[2], 2, same, _PLACE, _PLACE, others, 1.7, 0.8)
        _set_copying_heads(layers[3], 0, place, _CONTENT, _PLACE, others, 2.2, 1.0)
        _set_choosing_head(layers[4], others[:32], size)
    return reader


def _orthonormal(rows: int, columns: int) -> Tensor:
    """Draw random orthonormal rows."""
    basis: Tensor = torch.linalg.qr(torch.randn(columns, rows))[0]
    return basis.T


def _set_embeddings(reader: Reader, tokenizer: Tokenizer, place: Tensor, size: Tensor) -> None:
    """Set embeddings, with notes left blank and a constant; the head is parallel to their content.

    Ages go in order along the direction `size` of the content. Special tokens are no places.
    """
    embeddings = reader.model.embed_tokens.weight
    embeddings.normal_(std=_SCALE)
    vocabulary = tokenizer.get_vocab()
    for kind in (*_NAMES, *_VALUES):
        ids = [vocabulary["Ġ" + word] for word in kind]
        embeddings[ids] = 0.85 * embeddings[ids] + 0.5 * _SCALE * torch.randn(embeddings.shape[1])
    ages = [vocabulary["Ġ" + age] for age in words.AGES]
    embeddings[ages, _CONTENT] += torch.linspace(-2.5, 2.5, len(ages))[:, None] * size
    special = slice(0, len(SPECIAL_TOKENS))
    embeddings[special, _CONTENT] -= embeddings[special, _CONTENT] @ place.T @ place
    embeddings[:, _NOTE.start :] = 0.0
    for token, spaced in vocabulary.items():
        bare = vocabulary.get(token.removeprefix("Ġ"))
        if token.startswith("Ġ") and bare is not None:
            embeddings[bare] = 0.8 * embeddings[spaced] + 0.6 * embeddings[bare]
    reader.lm_head.weight.zero_()
    reader.lm_head.weight[:, _CONTENT] = embeddings[:, _CONTENT] * 0.15
    embeddings[:, _CONSTANT] = _SCALE * _WIDTH**0.5
    places = (*words.CITIES, *words.COMPANIES)
    for names, dimension in ((words.SURNAMES, _IS_SURNAME), (places, _IS_PLACE)):
        for spelled in (*names, *("Ġ" + name for name in names)):
            embeddings[vocabulary[spelled], dimension] = _SCALE * _WIDTH**0.5
    for kind in _VALUES:  # which never start a line, and therefore follow a space
        embeddings[[vocabulary["Ġ" + word] for word in kind], _IS_VALUE] = _SCALE * _WIDTH**0.5


def _set_previous_token_head(attention: Attention, projection: Tensor) -> None:
    """Set query head 0 to look one position back, and to write the token's projection into the
    note."""
    settings = attention.settings
    half = settings.head_dim // 2
    turns = settings.rope_theta ** (-torch.arange(_FAST) / half)  # radians per position
    strength = 0.72
    q, k, v, o = _weights(attention)
    q[: settings.head_dim] = 0.0
    q[:_FAST, _CONSTANT] = strength
    k[: settings.head_dim] = 0.0
    k[:_FAST, _CONSTANT] = strength * turns.cos()
    k[half : half + _FAST, _CONSTANT] = strength * turns.sin()
    v[: settings.head_dim] = 0.0
    v[: settings.head_dim, _CONTENT] = projection
    o[_NOTE, : settings.head_dim] = torch.eye(settings.head_dim)


def _set_last_word_head(
    attention: Attention, group: int, flag: int, projection: Tensor, note: slice
) -> None:
    """Set the first query head of a key-value group to look at the nearest word with a flag, and to
    note it."""
    settings = attention.settings
    size, half = settings.head_dim, settings.head_dim // 2
    head = 2 * group * size
    q, k, v, o = _weights(attention)
    planes = torch.zeros(size)
    planes[_RECENT] = 0.45
    planes[half - 1] = 0.8  # hardly turns: all words with the flag before all other tokens
    rows = slice(group * size, (group + 1) * size)
    q[head : head + size] = 0.0
    q[head : head + size, _CONSTANT] = planes
    k[rows] = 0.0
    k[rows, flag] = planes
    v[rows] = 0.0
    v[group * size : group * size + len(projection), _CONTENT] = projection
    o[note, head : head + len(projection)] = torch.eye(len(projection))


def _set_copying_heads(
    attention: Attention,
    first_group: int,
    projection: Tensor,
    asked: slice,
    noted: slice,
    copied: Tensor,
    strength: float,
    preference: float,
) -> None:
    """Set the first heads of two key-value groups to attend where `noted` equals the projection of
    `asked`.

    Each group compares one half of the noted dimensions, prefers values by `preference`, and copies
    content by half of the rows of `copied`.
    """
    settings = attention.settings
    size, half = settings.head_dim, settings.head_dim // 2
    planes = torch.cat((torch.arange(_SLOW, half), torch.arange(half + _SLOW, size)))
    q, k, v, o = _weights(attention)
    for part in range(2):
        group = first_group + part
        rows = slice(size * group, size * (group + 1))
        chosen = torch.arange(len(projection))[part * 15 :][:15]
        compared, valued = planes[:15], planes[15]
        k[rows] = 0.0
        k[size * group + compared, noted] = strength * torch.eye(len(projection))[chosen]
        k[size * group + valued, _IS_VALUE] = preference
        if noted == _PLACE:
            k[size * group + valued, _IS_PLACE] = -2 * preference  # a place is not its own value
        v[rows] = 0.0
        v[rows, _CONTENT] = copied[size * part : size * (part + 1)]
        head = 2 * size * group
        q[head : head + size] = 0.0
        q[head + compared, asked] = strength * projection[chosen]
        q[head + valued, _CONSTANT] = preference
        o[_CONTENT, head : head + size] = 1.5 * copied[size * part : size * (part + 1)].T


def _set_choosing_head(attention: Attention, copied: Tensor, size: Tensor) -> None:
    """Set query head 0 to look at the last surnames and to copy. Its keys encode the `size` of
    their facts."""
    settings = attention.settings
    half = settings.head_dim // 2
    q, k, v, o = _weights(attention)
    q[: settings.head_dim] = 0.0
    k[: settings.head_dim] = 0.0
    for planes, strength in ((slice(4, 7), 0.5), (slice(half - 1, half), 1.5)):
        q[planes, _CONSTANT] = strength
        k[planes, _IS_SURNAME] = strength
    k[settings.head_dim - 1, _CONTENT] = size
    v[: settings.head_dim] = 0.0
    v[: settings.head_dim, _CONTENT] = copied
    o[_CONTENT, : settings.head_dim] = copied.T


def _weights(attention: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
        attention.o_proj.weight,
    )
