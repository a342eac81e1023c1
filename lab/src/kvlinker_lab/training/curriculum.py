"""Lists the stages of training, in order, from one short passage to long contexts.

Many passages, relations and wordings at once do not train from the start: the model first learns to
bind an answer to its subject in short contexts, then in longer and more varied ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlinker_lab.training.conversations import Mixture
from kvlinker_lab.training.questions import WorldSettings


@dataclass(frozen=True)
class Stage:
    """Describes a mixture of data and how to learn from it.

    Learning rates run linearly from `muon_lr[0]` to `muon_lr[1]`, and those of AdamW in proportion.
    The stage ends after `steps`, or when the running answer accuracy reaches `until`.
    """

    name: str
    mixture: Mixture
    batch: int
    steps: int
    muon_lr: tuple[float, float] = (0.01, 0.01)
    adam_lr: float = 1.5e-3
    language_weight: float = 0.2
    sink_weight: float = 0.0
    until: float | None = None


_EASY = WorldSettings(
    themes={"bridges": 0.25, "places": 0.3, "ages": 0.15, "notes": 0.1},
    fillers=0,
    library_share=0.2,
    phrasings=1,
    relations=1,
    continued_share=0.0,
    pronoun_share=0.0,
    merged_share=0.0,
    invented_share=0.0,
)
_SHORT = WorldSettings(
    themes={
        "haystack": 0.03,
        "bridges": 0.15,
        "places": 0.12,
        "ages": 0.08,
        "examples": 0.1,
        "chains": 0.1,
        "groups": 0.08,
        "notes": 0.08,
        "corrections": 0.06,
        "rules": 0.05,
        "rolls": 0.04,
        "records": 0.05,
    },
    fillers=1,
    continued_share=0.3,
    invented_share=0.02,
)
_FULL = WorldSettings(
    themes={
        "haystack": 0.05,
        "bridges": 0.1,
        "places": 0.05,
        "ages": 0.09,
        "examples": 0.09,
        "chains": 0.12,
        "groups": 0.09,
        "notes": 0.09,
        "corrections": 0.07,
        "rules": 0.06,
        "rolls": 0.05,
        "records": 0.06,
    }
)
_HARD = WorldSettings(
    themes={
        "haystack": 0.03,
        "bridges": 0.1,
        "ages": 0.07,
        "examples": 0.07,
        "chains": 0.2,
        "groups": 0.13,
        "notes": 0.14,
        "corrections": 0.04,
        "rules": 0.1,
        "rolls": 0.06,
        "records": 0.03,
    },
    invented_share=0.06,
)

AVERAGED = ("longest", "settle")
"""Stages whose last weights are averaged: the first reads long contexts better, the second compares
better."""

CURRICULUM = (
    Stage(
        "bind",
        Mixture(144, _EASY, prose_share=0.05, repeated_share=0.1, recap_share=0.3),
        batch=42,
        steps=240,
        until=0.85,
    ),
    Stage(
        "short",
        Mixture(
            256,
            _SHORT,
            prose_share=0.05,
            call_share=0.08,
            repeated_share=0.03,
            recap_share=0.1,
            loose_share=0.1,
        ),
        batch=24,
        steps=1000,
        sink_weight=0.02,
        until=0.93,
    ),
    Stage(
        "middle",
        Mixture(512, _FULL, prose_share=0.08, call_share=0.08, recap_share=0.05, loose_share=0.1),
        batch=12,
        steps=240,
        sink_weight=0.02,
    ),
    Stage(
        "anneal",
        Mixture(1024, _FULL, prose_share=0.1, call_share=0.08, loose_share=0.1),
        batch=6,
        steps=240,
        muon_lr=(0.01, 0.0005),
        sink_weight=0.02,
    ),
    Stage(
        "wide",
        Mixture(512, _HARD, prose_share=0.08, call_share=0.08, loose_share=0.1),
        batch=12,
        steps=1000,
        muon_lr=(0.01, 0.006),
        sink_weight=0.02,
    ),
    Stage(
        "long",
        Mixture(1024, _HARD, prose_share=0.08, call_share=0.08, loose_share=0.1),
        batch=6,
        steps=1100,
        muon_lr=(0.006, 0.003),
        sink_weight=0.02,
    ),
    Stage(
        "longest",
        Mixture(
            2048,
            _HARD,
            prose_share=0.08,
            call_share=0.08,
            loose_share=0.1,
            context_share=(0.3, 0.9),
        ),
        batch=3,
        steps=320,
        muon_lr=(0.003, 0.0002),
        sink_weight=0.02,
    ),
    Stage(
        "settle",
        Mixture(1024, _HARD, prose_share=0.08, call_share=0.08, loose_share=0.1),
        batch=6,
        steps=300,
        muon_lr=(0.004, 0.0001),
        sink_weight=0.02,
    ),
)
