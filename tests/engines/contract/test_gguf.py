"""GGUF files become models of transformers, whose weights and tokens are those of the original."""

from __future__ import annotations

import errno
import json
import os
import struct
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvlinker import LLM
from kvlinker.base.errors import ModelLoadError
from kvlinker.engines.contract import gguf_unpacking
from kvlinker.engines.contract.gguf_files import (
    UnpackedForm,
    from_anywhere,
    gguf_files,
    known_ggufs,
)
from kvlinker.engines.contract.gguf_reading import gguf_facts, read_gguf
from kvlinker.engines.contract.gguf_unpacking import unpack, with_folder
from kvlinker.engines.contract.grouped_codes import GROUPED_FILE
from kvlinker.engines.contract.known_models import remembered_fingerprint
from kvlinker.engines.embedded.model.precision import in_fp32
from kvlinker.engines.embedded.model.recording.program import CodedRows, Program
from kvlinker.engines.embedded.model.weights.coded import CodedWeight
from kvlinker.engines.embedded.model.weights.linears import MatrixLinear, SharedLinear
from kvlinker.engines.embedded.model.weights.native_products import grouped_products
from kvlinker.engines.embedded.model.weights.native_quantized import GroupedMatrix
from kvlinker.engines.embedded.model_loading import load_model, read_weights
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.settings import load_settings

HEAD_DIM = 32
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "initializer_range": 0.1,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
}
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Granite's numbers by llama.cpp's names."""

MODELS = Path(__file__).parents[3] / ".models"
F32 = gguf.GGMLQuantizationType.F32


def written(
    model: Any,
    path: Path,
    *,
    kind: Any = F32,
    parts: int = 1,
    entries: Mapping[str, Any] | None = None,
    leave: str = "",
) -> Path:
    """Write a model of transformers as llama.cpp's converter does: by the names of the package
    ``gguf``, rows of Llama's queries and keys in pairs, and 1 added to Gemma's norms.

    Matrices are of ``kind``; with several ``parts`` the tensors are in so many files. ``entries``
    of the metadata take the place of the model's own, without that whose name ends with ``leave``.
    """
    config = model.config
    architecture = config.model_type.removesuffix("_text")
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tokenizer = byte_tokenizer(config.vocab_size)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    words[-1] = "qz"  # as vocabularies of this kind have at least one merge
    paths = [
        path.with_name(f"{path.stem}-{part + 1:05}-of-{parts:05}.gguf") for part in range(parts)
    ]
    writers = [gguf.GGUFWriter(each, architecture) for each in ([path] if parts == 1 else paths)]
    first = writers[0]
    first.add_context_length(config.max_position_embeddings)
    first.add_block_count(config.num_hidden_layers)
    first.add_feed_forward_length(config.intermediate_size)
    first.add_embedding_length(config.hidden_size)
    first.add_head_count(config.num_attention_heads)
    first.add_head_count_kv(config.num_key_value_heads)
    first.add_key_length(model.model.layers[0].self_attn.head_dim)
    first.add_value_length(model.model.layers[0].self_attn.head_dim)
    first.add_layer_norm_rms_eps(config.rms_norm_eps)
    first.add_rope_freq_base(theta_of(config))
    if window := getattr(config, "sliding_window", None):
        first.add_sliding_window(window)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap := getattr(config, name, None):
            first.add_float32(f"{architecture}.{name}", cap)
    for name, own_name in SCALES.items():
        if (scale := getattr(config, own_name, None)) is not None:
            first.add_float32(f"{architecture}.{name}", scale)
    first.add_tokenizer_model("gpt2")
    first.add_tokenizer_pre("gpt-2")
    first.add_token_list(words)
    first.add_token_types([3 if word in ("<s>", "</s>") else 1 for word in words])
    first.add_token_merges(["q z"])
    first.add_bos_token_id(256)
    first.add_eos_token_id(257)
    first.add_add_bos_token(True)
    first.add_chat_template("{{ messages[0]['content'] }}")
    for name, value in (entries or {}).items():
        first.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    if leave:
        for name in [each for each in first.kv_data[0] if each.endswith(leave)]:
            del first.kv_data[0][name]
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    weights = [(name, weight) for name, weight in model.state_dict().items() if name not in tied]
    for index, (name, weight) in enumerate(weights):
        values = weight.float().numpy().copy()
        if architecture in ("llama", "granite", "smollm3") and "q_proj" in name:
            values = paired(values, config.num_attention_heads)
        if architecture in ("llama", "granite", "smollm3") and "k_proj" in name:
            values = paired(values, config.num_key_value_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values += 1
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        wanted = kind if values.ndim > 1 else F32
        writers[index * parts // len(weights)].add_tensor(
            own, gguf.quantize(values, wanted), raw_dtype=wanted
        )
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path if parts == 1 else paths[-1]


def model_of(family: str = "llama", *, head_dim: int = HEAD_DIM) -> Any:
    """A random model in fp32, whose norms are not all 1."""
    torch.manual_seed(1)
    own: dict[str, Any] = {"head_dim": head_dim}
    if "gemma" in family:
        own |= {"sliding_window": 16, "query_pre_attn_scalar": head_dim}
    if family == "gemma3":
        own["num_hidden_layers"] = 7  # of which the sixth has no window
    if family == "smollm3":
        own |= {"num_hidden_layers": 4, "pad_token_id": None}  # of which the last has no positions
    if family == "granite":
        own |= {"attention_multiplier": 0.3, "embedding_multiplier": 3.0}
        own |= {"residual_multiplier": 0.4, "logits_scaling": 2.0}
    config = AutoConfig.for_model(FAMILIES[family], **SIZES | own)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return model


def theta_of(config: Any) -> float:
    parameters = config.rope_parameters
    found: float = parameters.get("full_attention", parameters)["rope_theta"]
    return found


def paired(values: Any, heads: int) -> Any:
    half = values.shape[0] // heads // 2
    return values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor
    with torch.inference_mode():
        found = model(torch.arange(3, 40)[None]).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_model_that_it_was_made_of(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    folder = tmp_path / "folder"
    folder.mkdir()
    unpack([written(model, tmp_path / "model.gguf")], folder)
    found = read(folder)
    torch.testing.assert_close(logits(found), logits(model), rtol=1e-5, atol=1e-5)
    assert found.config.max_position_embeddings == model.config.max_position_embeddings
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab\n").input_ids == [256, *byte_tokenizer()("ab\n").input_ids]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [257]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_each_kind_of_weights(kind: str, tmp_path: Path) -> None:
    """Kinds that are plain stay what they are, all others become bfloat16."""
    number = gguf.GGMLQuantizationType[kind]
    model = model_of()
    folder = tmp_path / "folder"
    folder.mkdir()
    unpack([written(model, tmp_path / "model.gguf", kind=number)], folder)
    weights = load_file(folder / "model.safetensors")
    dtype = {"F16": torch.float16}.get(kind, torch.bfloat16)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        values = model.state_dict()[name].float().numpy()
        expected = gguf.dequantize(gguf.quantize(values, number), number)
        assert torch.equal(weights[name], torch.from_numpy(expected).to(dtype))


@pytest.mark.skipif(grouped_products() is None, reason="no native products")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_stay_the_codes_of_the_file(family: str, kind: str, tmp_path: Path) -> None:
    """Native code multiplies by them, also by the tied head; the model's own format is bfloat16."""
    number = gguf.GGMLQuantizationType[kind]
    file = written(model_of(family), tmp_path / "model.gguf", kind=number)
    settings = load_settings(model=str(file), state_dir=tmp_path / "state", dtype="bfloat16")
    loaded = {
        weights: load_model(settings.model_copy(update={"weights": weights}))
        for weights in ("auto", "bf16")
    }
    assert len({each.fingerprint for each in loaded.values()}) == 1
    weights = load_file(Path(with_folder(settings).model) / "model.safetensors")
    parts = loaded["auto"].model.modules()
    matrices = [part for part in parts if isinstance(part, GroupedMatrix)]
    # Queries, keys and values are one; the last block of the gate is not full.
    assert len(matrices) == 3 * 5 + 1
    for name, part in loaded["auto"].model.named_modules():
        if isinstance(part, MatrixLinear | SharedLinear):
            assert torch.equal(part.weight, weights[f"{name}.weight"])
    assert not any(isinstance(part, GroupedMatrix) for part in loaded["bf16"].model.modules())
    inputs = torch.randn(5, 64).bfloat16()
    by_codes, by_weights = (each.model.model.layers[1].mlp(inputs) for each in loaded.values())
    torch.testing.assert_close(by_codes, by_weights, rtol=0.05, atol=0.05 * by_weights.abs().max())
    folders = {
        form: Path(with_folder(settings, form=form).model) for form in get_args(UnpackedForm)
    }
    assert folders["codes"].parent == folders["bf16"].parent  # where neither removed the other
    assert load_file(folders["codes"] / "model.safetensors").keys() == {
        name for name, weight in weights.items() if weight.ndim == 1
    }
    assert not (folders["bf16"] / GROUPED_FILE).exists()


@pytest.mark.skipif(grouped_products() is None, reason="no native products")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@torch.inference_mode()
def test_a_model_in_codes_computes_as_transformers_does(family: str, tmp_path: Path) -> None:
    """As long as it is not prepared for the engine, in bf16 and in fp32; so that what checks it
    sees the model that will run."""
    number = gguf.GGMLQuantizationType.Q8_0
    file = written(model_of(family), tmp_path / "model.gguf", kind=number)
    settings = load_settings(model=str(file), state_dir=tmp_path / "state", dtype="bfloat16")
    model, _, folder = read_weights(settings)
    assert (folder / GROUPED_FILE).is_file()
    plain = read(Path(with_folder(settings).model))
    coded = [each for each in model.parameters() if isinstance(each, CodedWeight)]
    assert len(coded) == sum(each.ndim == 2 for each in plain.parameters())
    assert sum(each.numel() for each in model.parameters()) == sum(
        each.numel() for each in plain.parameters()
    )
    ids = torch.arange(40)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    with in_fp32(model), in_fp32(plain):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    loaded = load_model(settings)
    assert isinstance(loaded.program, Program)
    assert any(isinstance(each, CodedRows) for each in loaded.program.operations)


def test_pieces_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few values are computed at a time, and however many files there are."""
    model = model_of()
    whole = written(model, tmp_path / "whole.gguf")
    last = written(model, tmp_path / "split.gguf", parts=3)
    files = gguf_files(str(last))
    assert [file.name[-19:] for file in files] == [
        f"0000{part}-of-00003.gguf" for part in (1, 2, 3)
    ]
    contents = []
    for name, each, piece in (("a", [whole], 1 << 22), ("b", files, 1000)):
        monkeypatch.setattr(gguf_unpacking, "PIECE", piece)
        (tmp_path / name).mkdir()
        unpack(each, tmp_path / name)
        contents.append((tmp_path / name / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]
    files[1].unlink()
    with pytest.raises(
        ModelLoadError, match=r"is one of 3 files, and .*00002-of-00003\.gguf is miss"
    ):
        gguf_files(str(last))


def test_a_file_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when it is another, in place of the old one."""
    file = written(model_of(), tmp_path / "small.gguf")
    unpacked: list[Path] = []

    def noted(files: Any, folder: Path, report: Any, *, form: Any) -> None:
        unpacked.append(folder)
        unpack(files, folder, report, form=form)

    monkeypatch.setattr(gguf_unpacking, "unpack", noted)
    settings = load_settings(model=str(file), state_dir=tmp_path / "state", dtype="float32")
    assert settings.served_name == "small"
    for _ in range(2):
        with LLM.from_settings(settings) as llm:
            assert llm.model_name == "small"
            answer = llm.completion("ab", max_tokens=4, temperature=0, ignore_eos=True)
            assert answer.usage.output_tokens == 4
            fingerprint = llm.system_fingerprint
    assert len(unpacked) == 1
    assert str(remembered_fingerprint(settings))[:12] in fingerprint
    folder = Path(with_folder(settings).model)
    written(model_of(), file, kind=gguf.GGMLQuantizationType.F16)
    assert remembered_fingerprint(settings) is None
    other = Path(with_folder(settings).model)
    assert len(unpacked) == 2
    assert sorted(path for path in folder.parent.iterdir() if path.is_dir()) == [other]
    assert with_folder(with_folder(settings)) == with_folder(settings)


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(model_of(), tmp_path / "small.gguf")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    settings = load_settings(model=str(file), state_dir=tmp_path / "state")
    with pytest.raises(ModelLoadError, match=r"small\.gguf cannot be unpacked .* No space left"):
        with_folder(settings)
    monkeypatch.undo()
    assert Path(with_folder(settings).model).is_dir()


def test_rotary_frequencies_that_are_scaled(tmp_path: Path) -> None:
    model, scaling = model_of(), "llama.rope.scaling."
    for kind, factor, entries in (
        ("linear", 2.0, {f"{scaling}type": "linear", f"{scaling}factor": 2.0}),
        ("linear", 4.0, {"llama.rope.scale_linear": 4.0}),
        ("linear", 8.0, {f"{scaling}factor": 8.0}),
        ("yarn", 4.0, {f"{scaling}type": "yarn", f"{scaling}factor": 4.0}),
        ("default", None, {f"{scaling}factor": 0.0}),
    ):
        folder = tmp_path / f"{kind} {factor}"
        folder.mkdir()
        unpack([written(model, folder / "model.gguf", entries=entries)], folder)
        found = read(folder).config.rope_parameters
        assert (found["rope_type"], found.get("factor")) == (kind, factor)
    path = written(model, tmp_path / "other.gguf", entries={f"{scaling}type": "longrope"})
    with pytest.raises(ModelLoadError, match="scales rotary embeddings by 'longrope'"):
        unpack([path], folder)


def test_what_files_of_llama_3_leave_out(tmp_path: Path) -> None:
    """Words that are tokens without merges, and the token that prompts begin with; and ends of
    answers that are no control tokens."""
    words = sorted(byte_tokenizer().get_vocab(), key=byte_tokenizer().get_vocab().__getitem__)
    words += ["he", "hello", "<|eom_id|>", *(f"w{number}" for number in range(261, 300))]
    entries = {
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * 300,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.padding_token_id": 4000,
    }
    path = written(model_of(), tmp_path / "model.gguf", entries=entries, leave="add_bos_token")
    unpack([path], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("hello").input_ids == [256, 259]
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [257, 260]
    assert len(tokenizer) == 300


def test_llama_3s_factors() -> None:
    """The divisors that are in files are those of transformers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(head_dim=64, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    found = gguf_unpacking._llama3_scaling(plain / scaled, 500000.0, 64)
    assert found == {name: scaling[name] for name in scaling if name != "rope_theta"}
    assert gguf_unpacking._llama3_scaling(torch.full((32,), 3.0), 500000.0, 64) is None


def test_what_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for entries, said in (
        ({"general.type": "adapter"}, "not a model but, as it says, 'adapter'"),
        ({"general.architecture": "grok"}, "'grok'. kvlinker reads .*llama, qwen2, qwen3, gemma2"),
        ({"llama.feed_forward_length": 7}, "has a tensor .* which a model of its architecture"),
        ({"llama.block_count": 1 << 30}, "has tensors of 3 layers, but says that there are 107374"),
        ({"llama.attention.head_count": 0}, "makes no sense as a model"),
        ({"llama.rope.freq_base": "much"}, "makes no sense as a model"),
        ({"tokenizer.ggml.pre": "deepseek-coder"}, "splits words as 'deepseek-coder'"),
        ({"llama.attention.head_count": [4, 2, 4]}, "layers of the GGUF file differ in num_attent"),
        ({"tokenizer.ggml.model": "rwkv"}, "makes no sense as a model: .*'rwkv'"),
    ):
        written(model_of(), path, entries=entries)
        with pytest.raises(ModelLoadError, match=said):
            unpack([path], tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    return written(model_of(), path).read_bytes()


def test_damaged_files(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    version, counts = small[4:8], small[8:24]
    for content, said in (
        (b"", "cannot be read as GGUF"),
        (b"GGML" + small[4:], "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 9) + counts, "its version is 9"),
        (b"GGUF" + version + struct.pack("<QQ", 1 << 60, 0), "1152921504606846976 entries"),
        (b"GGUF" + version + struct.pack("<QQ", 0, 1 << 60), "1152921504606846976 entries"),
        (b"GGUF" + version + struct.pack("<QQQ", 0, 1, 1 << 60) + bytes(99), "a text of 11529"),
        (
            b"GGUF" + version + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 4, 1 << 60) + bytes(99),
            "1152921504606846976 entries",
        ),
        (
            b"GGUF" + version + struct.pack("<QQQ1sII", 0, 1, 1, b"k", 9, 9) + bytes(99),
            "unknown kind 9",
        ),
        (small[:-1], "ends before its tensor"),
        (small[: len(small) // 2], "ends before its tensor"),
        (small[:700], "ends too early|ends before"),
        (b"version https://git-lfs.github.com/spec/v1\n", "does not begin with GGUF"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=said):
            read_gguf(path)


@pytest.mark.examples
@given(data=st.data())
def test_bytes_of_any_kind(
    data: st.DataObject, small: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A header with damage is read, or refused in one line."""
    content = bytearray(small)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, 6000))
        content[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        found = read_gguf(path).tensors
    except ModelLoadError:
        return
    assert all(place.begin + place.nbytes <= path.stat().st_size for place in found.values())


def test_where_people_have_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q4_K.gguf", "mmproj-m.gguf"):
        (folder / name).write_bytes(name.encode())
    assert gguf_files(f"{folder}:q4_k_s") == (folder / "m-Q4_K_S.gguf",)
    assert gguf_files(f"{folder}:Q4_K") == (folder / "m-Q4_K.gguf",)
    for model, said in (
        (folder, "has several GGUF files: m-Q4_K.gguf, m-Q4_K_M.gguf, m-Q4_K_S.gguf. Name one"),
        (f"{folder}:Q8_0", "has no GGUF file with 'Q8_0' in its name, but m-Q4_K.gguf"),
        (folder / "mmproj-m.gguf", "reads pictures for another model"),
        ("ollama:none", "Ollama has no model 'none'"),
        ("ollama:../..", "Ollama has no model '../..'"),
        ("ollama:a/b/c/d", "Ollama has no model 'a/b/c/d'"),
        ("lmstudio:someone/none", "LM Studio has no model 'someone/none'"),
        ("someone/some-GGUF:Q4_0", "`kvlinker pull someone/some-GGUF:Q4_0` brings it"),
    ):
        with pytest.raises(ModelLoadError, match=said):
            gguf_files(str(model))
    for model in ("someone/some", str(tmp_path), str(tmp_path / "none.gguf"), "a/b/c", ""):
        assert gguf_files(model) == ()

    manifests = tmp_path / ".ollama" / "models" / "manifests" / "registry.ollama.ai"
    blob = tmp_path / ".ollama" / "models" / "blobs" / "sha256-ab"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"GGUF")
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:ab"}]
    hub = "../hf.co/someone/m-GGUF/Q8_0"
    for name in ("library/qwen2.5/0.5b", "library/small/latest", "someone/own/latest", hub):
        (manifests / name).parent.mkdir(parents=True)
        (manifests / name).write_text(json.dumps({"layers": layers}))
    for name in (
        "qwen2.5:0.5b",
        "small",
        "small:latest",
        "someone/own",
        "hf.co/someone/m-GGUF:Q8_0",
    ):
        assert gguf_files(f"ollama:{name}") == (blob,)
    studio = tmp_path / ".lmstudio" / "models" / "someone" / "m-GGUF"
    studio.mkdir(parents=True)
    (studio / "m-Q8_0.gguf").touch()
    assert gguf_files("lmstudio:someone/m-GGUF") == (studio / "m-Q8_0.gguf",)
    assert [found.name for found in known_ggufs([folder])] == [
        *(str(folder / f"m-{kind}.gguf") for kind in ("Q4_K", "Q4_K_M", "Q4_K_S")),
        "ollama:hf.co/someone/m-GGUF:Q8_0",
        "ollama:qwen2.5:0.5b",
        "ollama:small:latest",
        "ollama:someone/own:latest",
        "lmstudio:someone/m-GGUF",
    ]
    monkeypatch.chdir(tmp_path)
    assert from_anywhere("models:Q4_K") == f"{folder}:Q4_K"
    assert from_anywhere("models/m-Q4_K.gguf") == str(folder / "m-Q4_K.gguf")
    assert from_anywhere("someone/some:Q4_0") == "someone/some:Q4_0"
    (folder / "link.gguf").symlink_to(blob)
    assert from_anywhere("models/../models/link.gguf") == str(folder / "link.gguf")
    blob.unlink()
    with pytest.raises(ModelLoadError, match="Pull it again"):
        gguf_files("ollama:small")
    layers += [{"mediaType": "application/vnd.ollama.image.adapter", "digest": "sha256:cd"}]
    (manifests / "library/small/latest").write_text(json.dumps({"layers": layers}))
    with pytest.raises(ModelLoadError, match=r"has an adapter \(LoRA\)"):
        gguf_files("ollama:small")
    (manifests / "library/small/latest").write_text("{}")
    with pytest.raises(ModelLoadError, match="names no model"):
        gguf_files("ollama:small")


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", ["smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct"]
)
def test_real_models(name: str, tmp_path: Path) -> None:
    """As transformers' own reader unpacks them, which takes all of it in fp32."""
    file = MODELS / f"{name}.gguf"
    if not file.is_file():
        pytest.skip("`make models` brings the models that this needs")
    unpack([file], tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)
    assert expected["tensors"].keys() == found.keys()
    for key, values in expected["tensors"].items():
        assert torch.equal(found[key], values.to(torch.bfloat16)), key
    kind, window = gguf_facts(file)
    assert kind.startswith("Q4_")
    assert window == expected["config"]["max_position_embeddings"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [
        "  two\n\n\tdef f(x): return x**2",
        "日本語 🙂 ñ a\u0301",
        "<|im_start|>user\n",
        "<bos>",
    ]
    theirs, _ = convert_gguf_tokenizer(
        expected["config"]["model_type"].removesuffix("_text"), expected["tokenizer"]
    )
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        # Qwen's tokenizer joins accents with their letters before all else.
        joined = unicodedata.normalize("NFC", text) if name.startswith("qwen") else text
        assert ids == theirs.encode(joined, add_special_tokens=False).ids
    if name.startswith("smollm"):  # whose digits transformers does not tell apart
        assert tokenizer.tokenize(" \u0661") == ["Ġ", "Ù", "¡"]
    if name.startswith("gemma"):
        assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id == 2
