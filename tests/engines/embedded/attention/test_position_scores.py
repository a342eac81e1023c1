import pytest
import torch

from kvlinker.engines.embedded.attention.position_scores import PositionScores
from tests.engines.embedded.attention.scenes import Prompt, Shape, linked, make_scene

VARIANTS = [
    {},
    {"window": 40},
    {"softcap": 2.0},
    {"pairing": "interleaved", "factor": 1.37},
    {"pairing": None, "rotated": 8},
    {"rotated": 0},
]


def scores_of(scene, views, rows, length, **options):
    positions, window = scene.positions[rows], scene.options.window
    scores = PositionScores(views, positions, scene.rotary, window, length, **options)
    return scores.scores(scene.query[:, rows], scene.segments, scene.options)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("recompute", [0, 16])
def test_logits_over_all_positions(variant, recompute):
    chunks = [100, 37, 60]
    prompts = [
        Prompt(((None, 20),), queries=(19,)),
        linked([0, 1, 2, 1], chunks, behind=30, recompute=recompute),
    ]
    scene = make_scene(chunks, prompts, Shape(**{"key_dim": 16, "value_dim": 16} | variant))
    rows, views = scene.sequences[1]
    at = torch.from_numpy(scene.positions[rows])
    length = prompts[1].length
    scores = scores_of(scene, views, rows, length)
    key, _, there = scene.dense(views)
    expected = scene.dense_scores(at, scene.rotated(scene.query[:, rows], at), key, there)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_native_products_of_few_queries_are_pytorchs(variant, monkeypatch):
    shape = Shape(**{"key_dim": 48, "value_dim": 16} | variant)
    scene = make_scene(
        [100, 37], [linked([0, 1], [100, 37], behind=6)], shape, dtype=torch.bfloat16
    )
    rows, views = scene.sequences[0]
    scores = scores_of(scene, views, rows, 143)
    monkeypatch.setattr(
        "kvlinker.engines.embedded.attention.position_scores.dot_products",
        lambda *_: pytest.fail("native"),
    )
    expected = scores_of(scene, views, rows, 143, native=False)
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-3)


def test_positions_that_nobody_shows_are_not_seen():
    scene = make_scene([10], [Prompt(((0, 10), (None, 2)), queries=(10, 11))])
    _, views = scene.sequences[0]
    scores = scores_of(scene, views[1:], slice(None), 15)
    assert scores.shape == (4, 2, 15)
    assert (scores[0] > float("-inf")).int().tolist() == [
        [0] * 10 + [1, 0, 0, 0, 0],
        [0] * 10 + [1, 1, 0, 0, 0],
    ]
