"""What the connector is told, and what it says of options that it cannot take."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store.store_chunks import key_of

from kvlinker.base.errors import InvalidRequestError
from kvlinker.settings import load_settings
from kvlinker.store import ChunkKV, LayerKV, StoreError
from kvlinker.store.format.codecs import find_codec
from kvlinker.store.format.sealing import NOT_SEALED
from kvlinker_vllm.frontend.source import VLLMSource
from kvlinker_vllm.options import ConnectorOptions, connector_settings
from kvlinker_vllm.worker.worker_chunks import WorkerChunks


def test_the_connectors_own_options_are_taken_out():
    options = {"slice_tokens": 9, "policy": "naive"}
    assert ConnectorOptions.pop_from(options).slice_tokens == 9
    assert connector_settings(options).policy == "naive"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"state_dri": "/data"},
            (
                r"no setting 'state_dri' \(from kv_connector_extra_config: state_dri\). Did you"
                r" mean 'state_dir'"
            ),
        ),
        ({"host_memory": "much"}, "host_memory is 'much' .from kv_connector_extra_config"),
        ({"port": -1}, "port is -1 .from kv_connector_extra_config"),
    ],
)
def test_bad_settings_are_named_in_one_line(options, told):
    with pytest.raises(InvalidRequestError, match=told) as caught:
        connector_settings(options)
    assert "\n" not in caught.value.message


def test_secrets_are_not_told():
    with pytest.raises(InvalidRequestError) as caught:
        connector_settings({"encryption_key": ["a-secret"]})
    assert "a-secret" not in caught.value.message


def test_variables_are_named_as_settings(monkeypatch):
    monkeypatch.setenv("KVLINKER_HOST_MEMORY", "much")
    with pytest.raises(InvalidRequestError, match="from variable KVLINKER_HOST_MEMORY"):
        connector_settings({})


def test_a_state_directory_that_cannot_be_used_is_named_with_the_way_out():
    with pytest.raises(
        StoreError, match=r"/proc/nope/chunks cannot be used: .* choose another state directory"
    ):
        WorkerChunks(Path("/proc/nope/chunks"), memory_bytes=0, sealing=NOT_SEALED)


def test_workers_write_files_as_the_disks_codec_has_it(tmp_path):
    layer = LayerKV(torch.ones(2, 512, 32), torch.ones(2, 512, 32))
    kv = ChunkKV((layer,))
    sizes = {}
    for name in ("raw", "int8"):
        chunks = WorkerChunks(
            tmp_path / name, memory_bytes=0, sealing=NOT_SEALED, codec=find_codec(name)
        )
        assert chunks.put(key_of(1), kv)
        assert chunks.get(key_of(1)) is not None
        sizes[name] = sum(file.stat().st_size for file in (tmp_path / name).rglob("*.safetensors"))
    assert sizes["int8"] < sizes["raw"] / 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"disk_space": 0}, "disk_space is 0"),
        ({"keep_answers": "answer"}, "leave keep_answers off"),
    ],
)
def test_settings_that_vllm_cannot_follow_are_refused_before_it_starts(options, told, tmp_path):
    source: Any = VLLMSource.__new__(VLLMSource)
    settings = load_settings(state_dir=tmp_path, **options)
    with pytest.raises(InvalidRequestError, match=told):
        source.make(None, None, None, settings, None)
