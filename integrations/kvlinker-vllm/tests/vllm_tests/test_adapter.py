import re
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from kvlinker.base.errors import KVLinkerError, UnsupportedModelError
from kvlinker_vllm import adapter
from kvlinker_vllm.adapter import BoundModel, attention_layers
from kvlinker_vllm.adapter.cache_groups import own_group


def test_the_installed_version_was_tested():
    adapter.require_tested_version()


def test_other_versions_are_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(KVLinkerError, match=r"0\.99\.1 .* 0\.32\.0 .*allow_untested"):
        adapter.require_tested_version()
    adapter.require_tested_version(allow_untested=True)


SCALED = SimpleNamespace(llama_4_scaling={"original_max_position_embeddings": 512, "beta": 0.1})
"""The configuration of a model whose queries are scaled by position."""


TUNED = SimpleNamespace(attn_temperature_tuning=True, floor_scale=256.0)
"""The same as Llama 4 has it."""


def config(*, speculative_config=None, lora_config=None, model=(), fast_prefill=False, **parallel):
    """The parts of vLLM's configuration that decide whether anything can be linked."""
    sizes = ("pipeline", "decode_context", "prefill_context", "data")
    defaults = {f"{name}_parallel_size": 1 for name in sizes}
    plain = {"is_moe": False, "is_hybrid": False, "is_attention_free": False, "use_mla": False}
    names = {"architecture": "SomeModel", "hf_text_config": SimpleNamespace(), "max_model_len": 512}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(defaults | parallel)),
        model_config=SimpleNamespace(**(plain | names | dict(model))),
        speculative_config=speculative_config,
        lora_config=lora_config,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, .* tensor_parallel_size"),
        (
            {"decode_context_parallel_size": 2},
            "decode_context_parallel_size is 2, .* tensor_parallel_size",
        ),
        (
            {"prefill_context_parallel_size": 4},
            "prefill_context_parallel_size is 4, .* tensor_parallel_size",
        ),
        (
            {"data_parallel_size": 2, "model": {"is_moe": True}},
            "data_parallel_size is 2, .* mixture of experts",
        ),
        (
            {"speculative_config": SimpleNamespace(method="eagle")},
            "by eagle, .* use ngram, or leave",
        ),
        ({"lora_config": True}, "leave enable_lora out"),
        ({"model": {"is_hybrid": True}}, "Layers of SomeModel keep a state .*--engine embedded"),
        (
            {"model": {"use_mla": True, "hf_text_config": SimpleNamespace(index_topk=2048)}},
            "An indexer of SomeModel picks .*--engine embedded",
        ),
        ({"model": {"is_attention_free": True}}, "All layers of SomeModel keep a state"),
        ({"fast_prefill": True}, "kv_sharing_fast_prefill, .* leave it out"),
        ({"model": {"hf_text_config": TUNED}}, "max_model_len is 512, .* set max_model_len to 255"),
        (
            {"model": {"hf_text_config": SCALED, "max_model_len": 513}},
            "max_model_len is 513, .* set max_model_len to 512",
        ),
    ],
)
def test_what_is_not_linked_is_refused_in_one_line_with_the_way_out(changes, told):
    adapter.require_linkable(
        config(data_parallel_size=2, speculative_config=SimpleNamespace(method="ngram"))
    )
    adapter.require_linkable(config(model={"hf_text_config": SCALED}))
    adapter.require_linkable(config(model={"use_mla": True}))
    with pytest.raises(UnsupportedModelError, match=told) as error:
        adapter.require_linkable(config(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        ({"attention_chunk_size": 511}, "is cut every 511 positions .*set max_model_len to 511"),
        ({"attention_chunk_size": 512}, None),
        ({"impl": SimpleNamespace()}, "choose another attention_backend"),
        ({"impl": SimpleNamespace(do_kv_cache_update=None, alibi_slopes=[0.5])}, "ALiBi"),
        ({}, None),
    ],
)
def test_layers_in_which_no_kv_can_be_placed_say_why(monkeypatch, layer, told):
    monkeypatch.setattr(attention_layers, "Attention", SimpleNamespace)
    plain = {"impl": SimpleNamespace(do_kv_cache_update=None)}
    reason = attention_layers.unplaceable(SimpleNamespace(**(plain | layer)), 512)
    assert (reason is None) == (told is None)
    assert re.search(told or "", reason or "")


class Reusing:
    """A metadata builder that keeps what it builds in a buffer, as FlashAttention 3's and
    FlashInfer's do."""

    requires_block_table_width = False

    def __init__(self, spec, layers, config, device):
        self.kv_cache_spec = spec
        self.buffer = torch.zeros(4, dtype=torch.int32)

    def build(self, common_prefix_len, common, **options):
        count = len(common.seq_lens)
        self.buffer[:count] = common.seq_lens
        return self.buffer[:count], common.block_table_tensor


@pytest.mark.parametrize("kernel_block", [32, 16])
def test_runs_leave_the_metadata_of_vllms_own_step_alone(kernel_block):
    """Also where the backend's blocks are smaller than the KV cache's: they are mapped once."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    backend = SimpleNamespace(
        get_builder_cls=lambda: Reusing,
        get_supported_kernel_block_sizes=lambda spec=None: [kernel_block],
    )
    model = SimpleNamespace(max_model_len=128)
    scheduler = SimpleNamespace(max_num_seqs=4)
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    settings = SimpleNamespace(
        model_config=model, scheduler_config=scheduler, parallel_config=parallel
    )
    theirs = AttentionGroup(backend, ["layer"], spec, 0)
    theirs.create_metadata_builders(settings, torch.device("cpu"), kernel_block)
    ours = own_group(theirs, settings, torch.device("cpu"))

    def common(length, blocks):
        return CommonAttentionMetadata(
            query_start_loc=torch.tensor([0, 1]),
            query_start_loc_cpu=torch.tensor([0, 1]),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            num_reqs=1,
            num_actual_tokens=1,
            max_query_len=1,
            max_seq_len=length,
            block_table_tensor=torch.tensor([blocks], dtype=torch.int32),
            slot_mapping=torch.tensor([0]),
        )

    of_step = theirs.build_metadata(common(33, [3, 1]))
    of_run = ours.build_metadata(common(5, [2]))
    assert of_step[0].tolist() == [33]
    assert of_run[0].tolist() == [5]
    ratio = 32 // kernel_block
    assert of_step[1].tolist() == [
        [block * ratio + part for block in (3, 1) for part in range(ratio)]
    ]
    assert of_run[1].tolist() == [[2 * ratio + part for part in range(ratio)]]


class Embedding:
    """A model that says what it was called with."""

    def __init__(self, *, raw):
        self.requires_raw_input_tokens = raw

    def embed_input_ids(self, ids):
        return ids[:, None].float()

    def __call__(self, **inputs):
        self.inputs = inputs
        return inputs["positions"]


@pytest.mark.parametrize(("multimodal", "raw"), [(False, False), (True, False), (True, True)])
def test_models_of_more_than_text_get_embeddings(multimodal, raw):
    """They are compiled for these: another argument would meet a graph that takes none."""
    model = Embedding(raw=raw)
    bound = SimpleNamespace(model=model, _runner=SimpleNamespace(supports_mm_inputs=multimodal))
    BoundModel._call(bound, torch.arange(3), torch.arange(3))  # type: ignore[arg-type]
    assert (model.inputs["inputs_embeds"] is not None) == multimodal
    assert (model.inputs["input_ids"] is not None) == (raw or not multimodal)
