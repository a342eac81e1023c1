"""A model that was loaded and checked once starts without the checks, as long as it is the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlinker.engines.contract import file_hashes
from kvlinker.engines.contract.known_models import remembered_fingerprint
from kvlinker.engines.embedded import model_loading, verdicts
from kvlinker.engines.embedded.execution import compiling
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.model.weights.native_quantized import NativeInt8Matrix
from kvlinker.engines.embedded.model_loading import load_model, prepare_model
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.settings import Settings, load_settings
from tests.toy_models import tiny_model


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes the checks that run."""
    ran: list[str] = []

    def noted(check: Any) -> Any:
        def noting(*given: Any) -> Any:
            ran.append(check.__name__)
            return check(*given)

        return noting

    for module, name in ((model_loading, "require_exact"), (compiling, "program_error")):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    monkeypatch.setattr(file_hashes, "SETTLED_SECONDS", -60.0)
    return ran


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = tmp_path / "model"
    tiny_model("llama").bfloat16().save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    return load_settings(model=str(model), state_dir=tmp_path / "state")


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Return what the model's modules compute, with the weights as they are arranged."""
    model = loaded.model
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        computed: torch.Tensor = model(torch.arange(9)[None]).logits
    return computed


def test_the_second_load_repeats_no_check(settings: Settings, checks: list[str]) -> None:
    assert remembered_fingerprint(settings) is None
    first = load_model(settings)
    assert checks[0] == "require_exact"
    checks.clear()
    second = load_model(settings)
    assert checks == []
    assert first.fingerprint == second.fingerprint == remembered_fingerprint(settings)
    assert first.computes_steps == second.computes_steps
    assert torch.equal(logits(first), logits(second))


def test_a_changed_byte_is_seen_though_size_and_time_are_as_they_were(
    settings: Settings, checks: list[str]
) -> None:
    first = load_model(settings)
    (weights,) = Path(settings.model).glob("*.safetensors")
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (
        before.st_size,
        before.st_mtime_ns,
    )
    assert remembered_fingerprint(settings) is None
    checks.clear()
    assert load_model(settings).fingerprint != first.fingerprint
    assert checks[0] == "require_exact"


def test_damaged_verdicts_and_other_settings_check_anew(
    settings: Settings, checks: list[str]
) -> None:
    load_model(settings)
    for file in (settings.state_dir / verdicts.FOLDER).iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    checks.clear()
    load_model(settings)
    assert "require_exact" in checks
    checks.clear()
    load_model(settings.model_copy(update={"native": "off"}))
    assert checks == ["require_exact"]


def test_inputs_that_weights_in_8_bits_have_seen_are_remembered(
    settings: Settings, checks: list[str]
) -> None:
    """By them it is decided which inputs are rounded."""
    in_bytes = settings.model_copy(update={"weights": "int8"})
    first = load_model(in_bytes)
    checks.clear()
    second = load_model(in_bytes)
    assert checks == []
    assert {each.form for each in int8_matrices(first)} == {"int8_int8"}
    assert errors(first) == errors(second)
    assert torch.equal(logits(first), logits(second))
    for file in (settings.state_dir / verdicts.FOLDER).glob("*.safetensors"):
        file.unlink()
    third = load_model(in_bytes)
    assert checks == ["require_exact"]
    assert errors(third) == errors(first)


@pytest.mark.parametrize("family", ["jamba-states-nope", "falcon_mamba-alone", "mixtral-moe"])
def test_inputs_of_any_layers_are_remembered(
    family: str, checks: list[str], tmp_path: Path
) -> None:
    """Of those with a state, some are transposed."""
    loads = []
    for _ in range(2):
        remembered = verdicts.Verdicts(tmp_path, {"content": family})
        model = tiny_model(family).bfloat16()
        loads.append(prepare_model(model, None, weights="int8", name="a", verdicts=remembered))
    assert checks.count("require_exact") == 1
    assert errors(loads[0]) == errors(loads[1]) != []


def int8_matrices(loaded: LoadedModel) -> list[NativeInt8Matrix]:
    return [each for each in loaded.model.modules() if isinstance(each, NativeInt8Matrix)]


def errors(loaded: LoadedModel) -> list[float]:
    return [each.rounding_error for each in int8_matrices(loaded)]


def test_a_model_that_fails_is_checked_each_time(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ArithmeticError

    with monkeypatch.context() as patched:
        patched.setattr(model_loading, "require_exact", fails)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                load_model(settings)
    assert not (settings.state_dir / verdicts.FOLDER).exists()


def test_progress_goes_forward_to_the_end(settings: Settings) -> None:
    said: list[tuple[str, float]] = []
    load_model(settings, lambda what, share: said.append((what, share)))
    assert [share for _, share in said] == sorted(share for _, share in said)
    assert list(dict.fromkeys(what for what, _ in said)) == ["reading", "checking", "arranging"]
    assert said[-1][1] <= 1.0
