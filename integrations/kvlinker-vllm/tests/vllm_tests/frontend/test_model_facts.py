"""What is known of a model comes from vLLM's configuration and its files; no weights are loaded for
it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM

from kvlinker.base.errors import InvalidRequestError, ModelLoadError
from kvlinker_vllm.frontend.configuration import configure
from kvlinker_vllm.frontend.model_facts import (
    kv_changes,
    read_facts,
    sampling_defaults_of,
    tokenizer_of,
)
from kvlinker_vllm.options import ConnectorOptions, connector_settings
from vllm_tests.conftest import HEAD_DIM, vllm_settings_for


@pytest.fixture
def settings(vllm_settings, tmp_path):
    """Of a copy of the tiny model that a test may change."""
    return vllm_settings_for(
        shutil.copytree(vllm_settings.model, tmp_path / "tiny"), tmp_path / "state"
    )


def with_options(settings, **options):
    return settings.model_copy(update={"vllm_options": settings.vllm_options | options})


def test_nothing_is_loaded_to_know_a_model(settings, monkeypatch):
    def load(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    config = configure(settings)
    facts = read_facts(config, settings, tokenizer_of(config, settings))
    in_fp32 = 4 * sum(shape.values_per_token for shape in facts.layers)
    assert facts.kv_bytes_per_token == in_fp32
    assert {(shape.query_heads, shape.kv_heads, shape.key_dim) for shape in facts.layers} == {
        (4, 2, HEAD_DIM)
    }
    assert len(facts.layers) == 2
    assert facts.vocabulary == len(facts.tokenizer)
    assert kv_changes(config) == {}


def test_options_that_change_kv_change_the_fingerprint(settings):
    changed = with_options(settings, hf_overrides={"rms_norm_eps": 0.1})
    names = {
        read_facts(configure(each), each, None).fingerprint
        for each in (settings, changed, settings)
    }
    assert len(names) == 2


def test_workers_follow_the_settings_that_are_given_as_options(settings):
    """They read variables and files themselves, and see no options."""
    given = {"disk_codec": "int8", "native": "off", "chunk_scores": False}
    config = configure(settings.model_copy(update=given | {"host_memory": 12345}))
    options = dict(config.kv_transfer_config.kv_connector_extra_config)
    ConnectorOptions.pop_from(options)
    workers = connector_settings(options)
    assert workers.state_dir == settings.state_dir
    assert {name: getattr(workers, name) for name in given} == given
    assert workers.host_memory == 12345


def test_prefixes_are_kept_unless_the_setting_says_otherwise(settings):
    for prefix_cache, kept in (("on", True), ("off", False)):
        config = configure(settings.model_copy(update={"prefix_cache": prefix_cache}))
        assert config.cache_config.enable_prefix_caching is kept


def test_generation_defaults_are_vllms(settings):
    (Path(settings.model) / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_k": 7})
    )
    assert sampling_defaults_of(configure(settings)) == {"top_k": 7}
    assert sampling_defaults_of(configure(with_options(settings, generation_config="vllm"))) == {}


def test_a_quantised_checkpoint_runs_in_the_dtype_that_vllm_chooses(settings, monkeypatch):
    file = Path(settings.model) / "config.json"
    written = json.loads(file.read_text()) | {"dtype": "float16"}
    quantised = {
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
        }
    }
    for config, dtype in ((written, torch.float32), (written | quantised, torch.float16)):
        file.write_text(json.dumps(config))
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        assert configure(settings.model_copy(update={"dtype": "auto"})).model_config.dtype == dtype


@pytest.mark.parametrize(
    ("rope", "max_model_len", "change"),
    [
        ({"rope_type": "llama3"}, 4096, None),
        ({"rope_type": "dynamic", "factor": 4.0}, 256, "dynamic"),
        ({"rope_type": "longrope"}, 256, None),
        ({"rope_type": "longrope"}, 257, "longrope"),
        ({"full": {"rope_type": "longrope"}, "sliding": {"rope_type": "default"}}, 257, "longrope"),
    ],
)
def test_a_rotary_embedding_by_length_has_chunks_of_its_own(rope, max_model_len, change):
    text = SimpleNamespace(rope_parameters=rope, original_max_position_embeddings=256)
    model = SimpleNamespace(
        hf_overrides={}, quantization=None, hf_text_config=text, max_model_len=max_model_len
    )
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(cache_dtype="auto"))
    assert kv_changes(config).get("rope") == change


def test_what_vllm_does_not_take_is_one_line(settings):
    with pytest.raises(InvalidRequestError, match="sets it itself"):
        configure(with_options(settings, dtype="float16"))
    with pytest.raises(InvalidRequestError, match="no_such_option"):
        configure(with_options(settings, no_such_option=1))
    with pytest.raises(InvalidRequestError, match="in the place of kvlinker's"):
        configure(with_options(settings, kv_offloading_size=1))
    with pytest.raises(ModelLoadError, match="No model at") as caught:
        configure(settings.model_copy(update={"model": "/nowhere"}))
    assert "\n" not in caught.value.message
