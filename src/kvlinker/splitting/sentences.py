"""Where sentences end: rules for punctuation, with care for abbreviations, initials and numbers.

No dictionary and no model: a wrong boundary costs a chunk that is shorter or longer than one sentence, nothing more.
"""

from __future__ import annotations

import re
import unicodedata

from kvlinker.splitting.paragraphs import paragraphs

_CLOSERS = r"""["'”’»)\]」』）】*_]*+"""
_STOP = re.compile(rf"(?:(?P<wide>[。！？｡]++)|[.!?…؟۔।॥]++){_CLOSERS}")
_GAP = re.compile(r"\s*+")
_WORD_START = re.compile(r"""[\s([\"'“‘«]""")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_LONGEST_WORD = 24

_BEFORE_NAMES = re.compile(
    r"mr|mrs|ms|mx|dr|prof|st|rev|hon|gen|col|maj|capt|lt|sgt|gov|sen|rep|pres|mt|ft|vs|cf|viz|hr|fr|bzw|sra?|mme",
    re.IGNORECASE,
)
_BEFORE_NUMBERS = re.compile(
    r"nos?|nr|figs?|eqs?|sec|ch|vol|pp|art|ca|approx|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec", re.IGNORECASE
)


def sentences(text: str) -> list[str]:
    """The text's sentences; joined, they are the text. A blank line ends a sentence, punctuated or not.

    Line breaks after a sentence belong to it; spaces belong to the next one, because that is how tokenizers see them.
    """
    return [sentence for paragraph in paragraphs(text) for sentence in _sentences_of_paragraph(paragraph)]


def _sentences_of_paragraph(text: str) -> list[str]:
    parts = []
    start = 0
    for stop in _STOP.finditer(text):
        gap = _GAP.match(text, stop.end())
        after = gap.end() if gap else stop.end()
        if after == len(text) or not _ends_sentence(text, stop, after):
            continue
        break_ = max(text.rfind("\n", stop.end(), after), text.rfind("\r", stop.end(), after))
        end = stop.end() if break_ < 0 else break_ + 1
        parts.append(text[start:end])
        start = end
    parts.append(text[start:])
    return parts


def _ends_sentence(text: str, stop: re.Match[str], after: int) -> bool:
    """Whether the sentence ends at ``stop``; ``after`` is where the text goes on."""
    if stop["wide"]:
        return not _continues_character(text[stop.end()])
    if after == stop.end() or text[after].islower():
        return False
    if stop.group() != ".":
        return True
    begin = max(0, stop.start() - _LONGEST_WORD)
    word = re.split(_WORD_START, text[begin : stop.start()])[-1]
    if word.isdigit():
        return not _begins_line(text, stop.start() - len(word))  # "1. First" is an enumeration
    if _INITIALS.fullmatch(word):
        return word == "I"
    abbreviated = _BEFORE_NAMES.fullmatch(word) or (text[after].isdigit() and _BEFORE_NUMBERS.fullmatch(word))
    return not abbreviated


def _begins_line(text: str, position: int) -> bool:
    return text[max(0, position - 8) : position].rstrip(" \t")[-1:] in ("", "\n", "\r")


def _continues_character(character: str) -> bool:
    return unicodedata.category(character).startswith("M") or character == "\u200d"
