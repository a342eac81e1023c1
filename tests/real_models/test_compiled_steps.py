"""Real models run by compiled steps, in any number of bits: activations are large and far from
random ones, so that rounding moves results by some percent."""

import pytest

from kvlinker.engines.embedded.model_loading import load_model
from kvlinker.settings import load_settings
from tests.real_models.conftest import GEMMA, QWEN, SMOLLM2, model_path


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("name", [SMOLLM2, GEMMA, QWEN])
def test_steps_are_compiled(name, weights, state):
    settings = load_settings(model=model_path(name), weights=weights, state_dir=state)
    assert load_model(settings).computes_steps == "compiled"
