"""Unpacks GGUF files into a folder of transformers, once: some rows of a tensor at a time, so that
no more of the weights is in memory as fp32."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from kvlinker.base.errors import ModelLoadError
from kvlinker.base.loading import Report, part_of, unreported
from kvlinker.base.machine import processors
from kvlinker.base.system import allocate
from kvlinker.engines.contract.file_hashes import file_hashes
from kvlinker.engines.contract.gguf_files import UnpackedForm, gguf_files, unpacked_folder
from kvlinker.engines.contract.gguf_reading import GGUF, Place, Tensors, read_gguf
from kvlinker.engines.contract.grouped_codes import (
    BLOCK,
    GROUPED_FILE,
    KINDS,
    block_bytes,
    codes_of,
    grouped_blocks,
)
from kvlinker.engines.contract.lean_reading import parameters_without_memory, without_copies
from kvlinker.settings import Settings
from kvlinker.store.format.durability import synchronize

logger = logging.getLogger(__name__)

LOCK = "lock"
WEIGHTS_FILE = "model.safetensors"
ORIGIN = "origin.json"
"""The file with the hashes of the GGUF files that were unpacked into its folder."""

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
"""The dtypes of tensors that are not quantised."""

GROUPED_SHARE, HASHED_SHARE = 0.9, 0.1
"""The share of the time to unpack a file that its codes take, where they stay; and the share of
the whole time in which it is hashed. Chosen by hand."""

ROWS_AT_ONCE = 16 * BLOCK
"""The rows whose codes are put in blocks at a time."""

CACHE_LINE = 64
"""The alignment of tensors in files, in bytes."""

PIECE = 1 << 22
"""The values that are computed at a time: their temporaries fit into some megabytes."""

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
"""The names of dtypes in safetensors."""

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
}
"""The architectures that are read, with transformers' names for them."""

LIKE_LLAMA = ("llama", "granite", "smollm3")
"""The architectures whose files have the rows of queries and keys in pairs, and may have biases."""

ENTRIES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""The entries of a file's metadata, behind its architecture, that are ones of a configuration."""

PARTS = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""The modules of a decoder by llama.cpp's names."""

GEMMA_PARTS = PARTS | {"ffn_norm": "pre_feedforward_layernorm"}

TEMPLATE = "tokenizer.chat_template"
"""The beginning of the names of chat templates, of which a file may have several."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the divisors of rotary frequencies, of Llama 3.1 and its successors."""

END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|end|>",
    "<EOT>",
    "_<EOT>",
)
"""The tokens that end an answer where a vocabulary has them, whatever else its file says, as in
llama.cpp: files name one end alone, and not always as a control token."""

WHOLE_WORDS = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
        *("midm-2.0", "lfm2", "jina-v5-nano", "tekken"),
    )
)
"""The kinds of vocabularies (``tokenizer.ggml.pre``) in which words are tokens though no merges
lead there, and prompts begin with a token unless their file says otherwise, as in llama.cpp."""

DIGITS_ALONE = frozenset(("smollm",))
"""The kinds that transformers splits as GPT-2, whose digits stand alone, too."""

SPLIT_AS_GPT2 = frozenset(("gpt-2",))


def with_folder(
    settings: Settings, report: Report = unreported, *, form: UnpackedForm = "bf16"
) -> Settings:
    """Return the settings with a folder as their model: where it is GGUF, one in the state
    directory into which its files are unpacked, in ``form``, if they have not been. transformers
    reads the form ``bf16``. ``report`` takes the progress. Raises ModelLoadError."""
    folder = unpacked_folder(settings, form)
    if folder is None:
        return settings
    files = gguf_files(settings.model)
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(folder.parent / LOCK):  # replicas that start together wait for the first
            if not folder.is_dir():
                logger.info("%s is unpacked into %s, once.", settings.model, folder)
                _unpack_alone(files, folder, form, report)
    except OSError as error:
        raise ModelLoadError(
            f"{files[0]} cannot be unpacked into {folder}: {error}. Make room, or set state_dir to"
            " another folder."
        ) from error
    return settings.model_copy(update={"model": str(folder)})


def _unpack_alone(files: Sequence[Path], folder: Path, form: UnpackedForm, report: Report) -> None:
    """Unpack into ``folder``, in place of older versions and of what a killed process has begun,
    and note the hashes of the files there."""
    content, _, _ = folder.name.partition("-")
    for outdated in folder.parent.iterdir():
        if outdated.is_dir() and not outdated.name.startswith(f"{content}-"):
            shutil.rmtree(outdated)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unpacked = Path(scratch, "model")
        unpacked.mkdir()
        unpack(files, unpacked, part_of(report, 0.0, 1 - HASHED_SHARE), form=form)
        hashing = part_of(report, 1 - HASHED_SHARE, 1.0)
        hashes = file_hashes(files, folder.parents[2], hashing)
        (unpacked / ORIGIN).write_text(json.dumps(hashes))
        for file in unpacked.iterdir():
            synchronize(file)
        synchronize(unpacked)
        unpacked.rename(folder)
        synchronize(folder.parent)


def unpack(
    files: Sequence[Path], folder: Path, report: Report = unreported, *, form: UnpackedForm = "bf16"
) -> None:
    """Write the model of GGUF ``files`` into ``folder``, as transformers reads it: the weights in
    bfloat16, or as they are where none is quantised. In the form ``codes``, those that native code
    multiplies by lie in a file of their own. ``report`` takes the progress.

    Raises ModelLoadError for a damaged file, an architecture that is not read, and for tensors that
    are missing or unknown; OSError where the disk has no room.
    """
    report("unpacking", 0.0)
    whole = read_gguf(files[0])
    for file in files[1:]:
        whole.tensors.update(read_gguf(file).tensors)
    try:
        _unpack(whole, folder, form, report)
    except (ModelLoadError, OSError):
        raise
    except LookupError as error:
        raise ModelLoadError(f"{files[0]} does not say what {error} is.") from error
    except Exception as error:  # what damaged metadata leads to is of many kinds
        why = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"{files[0]} makes no sense as a model: {why}") from error


def _unpack(whole: GGUF, folder: Path, form: UnpackedForm, report: Report) -> None:
    metadata, tensors = whole
    architecture = str(metadata.get("general.architecture"))
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ModelLoadError(f"The GGUF file is not a model but, as it says, {kind!r}.")
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"The GGUF file has the architecture {architecture!r}. kvlinker reads"
            f" {', '.join(ARCHITECTURES)}; give others as a folder of transformers."
        )
    count = metadata[f"{architecture}.block_count"]
    layers = {found[1] for name in tensors if (found := re.match(r"blk\.(\d+)\.", name))}
    if count != len(layers):  # before so many are made
        raise ModelLoadError(
            f"The GGUF file has tensors of {len(layers)} layers, but says that there are {count}:"
            " download it again."
        )
    kinds = {place.kind for place in tensors.values() if len(place.shape) > 1}
    dtype = PLAIN.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16
    config = _config(metadata, tensors)
    config.dtype = dtype
    with parameters_without_memory():
        model = AutoModelForCausalLM.from_config(config)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    shapes = {
        name: tuple(weight.shape) for name, weight in model.state_dict().items() if name not in tied
    }
    names = _names(whole, shapes)
    coded: Collection[str] = ()
    if form == "codes":
        grouping = part_of(report, 0.0, GROUPED_SHARE)
        coded = _write_grouped(whole, names, config, folder / GROUPED_FILE, grouping)
        report = part_of(report, GROUPED_SHARE, 1.0)
    others = {name: own_name for name, own_name in names.items() if name not in coded}
    _write_weights(whole, others, config, shapes, dtype, folder / WEIGHTS_FILE, report)
    tokenizer = _tokenizer(metadata)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=_ends(metadata),
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _note_added_tokens(folder)


def _note_added_tokens(folder: Path) -> None:
    """Write the added tokens of the tokenizer in ``folder`` into its configuration: without them,
    transformers reads its whole vocabulary once more each time, which takes a second for 262,144
    tokens."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes())
    added = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
    config["added_tokens_decoder"] = {token.pop("id"): token for token in added}
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _config(metadata: Mapping[str, Any], tensors: Tensors) -> Any:
    """Make the configuration of transformers from what a file says. Raises LookupError for an entry
    that it lacks."""
    architecture = metadata["general.architecture"]
    entries = {
        name: metadata[f"{architecture}.{key}"]
        for key, name in ENTRIES.items()
        if f"{architecture}.{key}" in metadata
    }
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if isinstance(entries.get(name), list):
            raise ModelLoadError(
                f"The layers of the GGUF file differ in {name}, which kvlinker does not read."
            )
    heads = entries["num_attention_heads"]
    entries.setdefault("num_key_value_heads", heads)
    entries.setdefault("head_dim", entries["hidden_size"] // heads)
    entries["vocab_size"] = tensors["token_embd.weight"].shape[0]
    entries["tie_word_embeddings"] = "output.weight" not in tensors
    special = _special(metadata)  # a configuration's defaults are tokens of other vocabularies
    entries |= {f"{name}_token_id": special.get(name) for name in ("bos", "eos", "pad")}
    if architecture in LIKE_LLAMA:
        entries["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if architecture.startswith("gemma"):
        # The largest model of each generation scales queries by its width, as llama.cpp knows, too.
        largest = entries["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[architecture]
        entries["query_pre_attn_scalar"] = (
            entries["hidden_size"] // heads if largest else entries["head_dim"]
        )
    config = AutoConfig.for_model(ARCHITECTURES[architecture], **entries)
    parameters = config.rope_parameters
    parameters.get("full_attention", parameters).update(_rope_scaling(metadata, tensors, entries))
    return config


def _rope_scaling(
    metadata: Mapping[str, Any], tensors: Tensors, entries: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entries of ``rope_parameters`` by which rotary frequencies are scaled. Raises
    ModelLoadError for a kind that is not read."""
    prefix = f"{metadata['general.architecture']}.rope.scaling."
    kind = metadata.get(f"{prefix}type", "linear")
    older = metadata.get(f"{prefix.removesuffix('scaling.')}scale_linear", 1.0)
    factor = float(metadata.get(f"{prefix}factor", older)) or 1.0
    if ROPE_FACTORS in tensors:
        ((_, factors),) = _pieces(tensors[ROPE_FACTORS])
        scaling = _llama3_scaling(factors[0], entries["rope_theta"], entries["head_dim"])
        if scaling is None:
            raise ModelLoadError(
                f"The GGUF file divides rotary frequencies ({ROPE_FACTORS}) in a way that kvlinker"
                " does not know."
            )
        return scaling
    match kind:
        case "none" | "linear" if kind == "none" or factor == 1.0:
            return {}
        case "linear":
            return {"rope_type": "linear", "factor": factor}
        case "yarn":
            trained = entries["max_position_embeddings"]
            original = metadata.get(f"{prefix}original_context_length", trained)
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
    raise ModelLoadError(
        f"The GGUF file scales rotary embeddings by {kind!r}, which kvlinker does not read."
    )


def _llama3_scaling(factors: Tensor, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Return the scaling of Llama 3.1 that divides frequencies by ``factors``, a divisor for each
    pair of a head's dimensions; None if they are of another kind."""
    low, high, context = 1.0, 4.0, 8192
    factor = float(factors.max())
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = context / (2 * torch.pi * theta**exponents)  # of a pair, within the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not torch.allclose(factors.double(), expected, rtol=1e-3):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _names(whole: GGUF, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the names of a GGUF file's tensors by transformers' names, in the order of ``shapes``.
    Raises ModelLoadError where tensors are missing or unknown."""
    architecture = whole.metadata["general.architecture"]
    names = {_name(name, architecture): name for name in whole.tensors if name != ROPE_FACTORS}
    for name, own_name in names.items():
        place = whole.tensors[own_name]
        if place.shape != shapes.get(name):
            raise ModelLoadError(
                f"{place.path} has a tensor {own_name!r} of shape {list(place.shape)}, which a"
                f" model of its architecture ({architecture}) does not have."
            )
    if lacking := sorted(shapes.keys() - names.keys()):
        raise ModelLoadError(
            f"The GGUF file lacks {len(lacking)} tensors, such as {', '.join(lacking[:3])}."
        )
    return {name: names[name] for name in shapes}


def _write_weights(
    whole: GGUF,
    names: Mapping[str, str],
    config: Any,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    path: Path,
    report: Report,
) -> None:
    """Write the tensors of a GGUF file as a file of safetensors, whose tensors have ``shapes``. It
    is written where it is mapped."""
    architecture = whole.metadata["general.architecture"]
    views = _mapped(path, {name: Entry(dtype, shapes[name]) for name in names})
    for done, (name, own_name) in enumerate(names.items()):
        report("unpacking", done / len(names))
        place, view = whole.tensors[own_name], views[name]
        rows = view.view(-1, place.shape[-1])
        # llama.cpp multiplies by what Gemma adds to 1.
        less = float(architecture.startswith("gemma") and name.endswith("norm.weight"))
        for first, values in _pieces(place):
            rows[first : first + len(values)] = values - less if less else values
        if heads := _paired_heads(name, architecture, config):
            view.copy_(_unpermuted(view, heads))


def _write_grouped(
    whole: GGUF, names: Mapping[str, str], config: Any, path: Path, report: Report
) -> Collection[str]:
    """Write the matrices of a GGUF file whose kind is grouped as the codes that they are; return
    their names. Layers with one input are neighbours."""
    architecture = whole.metadata["general.architecture"]
    places = {
        name: place
        for name, own_name in names.items()
        if (place := whole.tensors[own_name]).kind in KINDS and len(place.shape) == 2
    }
    if not places:
        return ()
    entries = {
        name: Entry(
            torch.uint8, (-(-place.shape[0] // BLOCK), block_bytes(place.kind, place.shape[1]))
        )
        for name, place in places.items()
    }
    described = {
        name: f"{KINDS[place.kind].form} {KINDS[place.kind].group} {outputs} {inputs}"
        for name, place in places.items()
        for outputs, inputs in [place.shape]
    }
    views = _mapped(path, entries, described)

    def write(name: str) -> bool:
        """Return False, and stop, where a scale of the matrix is no number of fp16."""
        place = places[name]
        order = torch.arange(place.shape[0])
        if heads := _paired_heads(name, architecture, config):
            order = _unpermuted(order, heads)
        shape = place.shape[0], place.nbytes // place.shape[0]
        raw = np.memmap(place.path, np.uint8, "r", offset=place.begin, shape=shape)
        for first in range(0, len(order), ROWS_AT_ONCE):
            rows = codes_of(raw[order[first : first + ROWS_AT_ONCE].numpy()], place.kind)
            blocks = grouped_blocks(rows, KINDS[place.kind].form)
            if blocks is None:
                logger.info("%s stays in bfloat16: its scales are no numbers of fp16.", name)
                return False
            begin = first // BLOCK
            views[name][begin : begin + len(blocks)] = blocks.flatten(1)
        return True

    with ThreadPoolExecutor(processors()) as threads:
        for done, is_written in enumerate(threads.map(write, places), 1):
            report("unpacking", done / len(places))
            if not is_written:
                threads.shutdown(cancel_futures=True)
                path.unlink()
                return ()
    return places.keys()


def _paired_heads(name: str, architecture: str, config: Any) -> int:
    """Return the heads of a tensor whose rows llama.cpp puts in pairs; 0 where it does not."""
    if architecture in LIKE_LLAMA and ".self_attn.q_proj." in name:
        return int(config.num_attention_heads)
    if architecture in LIKE_LLAMA and ".self_attn.k_proj." in name:
        return int(config.num_key_value_heads)
    return 0


def _pieces(place: Place) -> Iterator[tuple[int, Tensor]]:
    """Yield a tensor's values, some rows at a time: the number of the first row, and a tensor
    ``(rows, columns)``, in fp32 where they were quantised."""
    columns, rows = place.shape[-1], math.prod(place.shape[:-1])
    block, block_bytes = GGML_QUANT_SIZES[place.kind]
    row_bytes = columns // block * block_bytes
    at_once = max(PIECE // max(columns, 1), 1)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        begin = place.begin + first * row_bytes
        raw = np.fromfile(place.path, np.uint8, count=count * row_bytes, offset=begin)
        raw = raw.reshape(count, row_bytes)
        if place.kind in PLAIN:
            yield first, torch.from_numpy(raw).view(PLAIN[place.kind])
        else:
            yield first, torch.from_numpy(dequantize(raw, place.kind))


class Entry(NamedTuple):
    """Describes a tensor of a file of safetensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _mapped(
    path: Path, entries: Mapping[str, Entry], described: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """Make a file of safetensors with these tensors, ``described`` in its metadata, and return
    them, mapped from it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(described or {})}}
    ends = list(accumulate(entry.nbytes for entry in entries.values()))
    for (name, entry), begin, end in zip(entries.items(), [0, *ends], ends, strict=False):
        header[name] = {
            "dtype": NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % CACHE_LINE)
    size = 8 + len(text) + ends[-1]
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        allocate(file.fileno(), size)  # a disk that is full ends no process then
    whole = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    parts = whole[8 + len(text) :].split_with_sizes([entry.nbytes for entry in entries.values()])
    return {
        name: part.view(entry.dtype).view(entry.shape)
        for (name, entry), part in zip(entries.items(), parts, strict=True)
    }


def _name(name: str, architecture: str) -> str:
    """Return transformers' name of a tensor of llama.cpp's name; the same name where it has
    none."""
    parts = GEMMA_PARTS if architecture.startswith("gemma") else PARTS
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in parts:
        return name
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{layer}{parts[found[2]]}.{found[3]}"


def _unpermuted(weight: Tensor, heads: int) -> Tensor:
    """Return rows in transformers' order, of which llama.cpp puts the pairs that turn together side
    by side in each head."""
    half = weight.shape[0] // heads // 2
    return weight.view(heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _tokenizer(metadata: Mapping[str, Any]) -> Any:
    """Make the tokenizer that a file describes, with its chat templates. transformers forgets
    whether prompts begin with a token of their own, without which Gemma talks nonsense. Raises
    ModelLoadError."""
    described = {
        name: metadata[f"tokenizer.{key}"]
        for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in metadata
    }
    kind, split = described.get("tokenizer_type"), described.get("pre_tokenizer_type")
    known = SPLIT_AS_GPT2 | DIGITS_ALONE | GGUF_PRE_TOKENIZER_SPLITS.keys()
    if kind == "gpt2" and split not in known:
        raise ModelLoadError(
            f"The GGUF file's tokenizer splits words as {split!r}, which kvlinker does not know."
            " Give the model as a folder of transformers."
        )
    made, _ = convert_gguf_tokenizer(metadata["general.architecture"], described)
    words: list[str] = described["tokens"]
    templates = {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": text
        for key, text in metadata.items()
        if key.startswith(TEMPLATE) and isinstance(text, str)
    }
    template = templates["default"] if list(templates) == ["default"] else templates or None
    with without_copies():
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=_mended(made, len(words), whole_words=split in WHOLE_WORDS),
            chat_template=template,
            **{f"{name}_token": words[number] for name, number in _special(metadata).items()},
        )
    if split in DIGITS_ALONE:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    bos = tokenizer.bos_token
    usual = kind == "llama" or split in WHOLE_WORDS
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", usual):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.bos_token_id)],
        )
    return tokenizer


def _mended(tokenizer: Tokenizer, count: int, *, whole_words: bool) -> Tokenizer:
    """Return a tokenizer without the tokens that are not among the ``count`` of its vocabulary:
    transformers adds GPT-2's own end to each of its kind, and no model has an embedding for it.
    With ``whole_words``, words that are tokens are so though no merges lead there."""
    if not whole_words and all(each < count for each in tokenizer.get_added_tokens_decoder()):
        return tokenizer
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [each for each in described["added_tokens"] if each["id"] < count]
    if whole_words:
        described["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(described))


def _special(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens with a meaning of their own (bos, eos, unk, pad) that a file has. It may
    name others than its vocabulary has, which llama.cpp leaves out, too."""
    count = len(metadata["tokenizer.ggml.tokens"])
    named = {
        short: metadata.get(f"tokenizer.ggml.{name}_token_id")
        for short, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return {
        name: number
        for name, number in named.items()
        if isinstance(number, int) and 0 <= number < count
    }


def _ends(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer."""
    words: list[str] = metadata["tokenizer.ggml.tokens"]
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    several = metadata.get("tokenizer.ggml.eos_token_ids", [])
    ends = [each for each in (*named, *several) if isinstance(each, int) and each < len(words)]
    numbers = {word: number for number, word in enumerate(words) if word in END_TOKENS}
    return list(dict.fromkeys([*ends, *(numbers[word] for word in END_TOKENS if word in numbers)]))
