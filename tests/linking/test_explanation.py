"""An explanation says of each token what became of it, and shows it in a notebook."""

from __future__ import annotations

from dataclasses import replace

from kvlinker.linking.explanation import Explanation, LayerRange, LinkCost

EXPLANATION = Explanation(
    policy="cacheblend-50",
    settled="cacheblend-50",
    forecast=None,
    token_ids=(1, 2, 3, 4, 5),
    reused_tokens=0,
    fresh=((4, 5),),
    segments=(),
    layers=(LayerRange(0, 0, ((1, 4),)), LayerRange(1, 3, ((1, 2), (3, 4)))),
    scores=(),
    cost=LinkCost(1, 3, 1, 1.0, 2.0),
)


def test_a_token_that_any_layer_computes_again_is_recomputed() -> None:
    assert EXPLANATION.states == ("cached", "recomputed", "recomputed", "recomputed", "fresh")


def test_a_notebook_shows_neighbours_of_one_state_together() -> None:
    assert EXPLANATION._repr_html_() is None
    shown = replace(EXPLANATION, texts=("a", " <b>", "\n", "&", "?"))._repr_html_()
    assert shown is not None
    assert shown.count("<span") == 3
    assert '"recomputed"> &lt;b&gt;\n&amp;</span>' in shown
