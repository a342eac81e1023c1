"""Loads a model from a path or hub id, and prepares it for the engine."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.base.loading import Report, part_of, unreported
from kvlinker.base.threads import in_own_thread
from kvlinker.engines.contract.cost import CostModel, count_weights
from kvlinker.engines.contract.gguf_unpacking import with_folder
from kvlinker.engines.contract.known_models import remember_fingerprint
from kvlinker.engines.contract.model_files import (
    choose_device,
    choose_dtype,
    fingerprint,
    fingerprint_of_files,
    fingerprint_with,
    model_folder,
    read_model,
)
from kvlinker.engines.embedded.attention.kernels import native_attention
from kvlinker.engines.embedded.execution.compiling import compile_step
from kvlinker.engines.embedded.lean_imports import without_compiler
from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.bounds import context_window
from kvlinker.engines.embedded.model.discovery import anatomy_of
from kvlinker.engines.embedded.model.interception import ATTENTION_NAME
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.model.memory import (
    drop_unread,
    dropping_mapped,
    return_freed,
)
from kvlinker.engines.embedded.model.norms import quicken_norms
from kvlinker.engines.embedded.model.recording.capturable import Capturable
from kvlinker.engines.embedded.model.recording.program import Program
from kvlinker.engines.embedded.model.weights.arrangement import (
    LinearCalls,
    arrange_weights,
    watch_linears,
)
from kvlinker.engines.embedded.model.weights.coded import coded_weights
from kvlinker.engines.embedded.model.weights.experts import arrange_experts
from kvlinker.engines.embedded.model.weights.linears import quicken_linears
from kvlinker.engines.embedded.model.weights.native_products import (
    grouped_products,
    native_products,
)
from kvlinker.engines.embedded.model.weights.samples import sampled_inputs
from kvlinker.engines.embedded.selftest import require_exact
from kvlinker.engines.embedded.verdicts import Verdicts, code_beside
from kvlinker.engines.native import build_here
from kvlinker.settings import Settings, WeightFormat

SELF_TEST = "self-test"
"""The name of the check among verdicts."""

INPUTS = "inputs of layers"
"""The name of what the check samples for weights in 8 bits."""

READ, CHECKED = 0.2, 0.75
"""The shares of a first load's time after which a small model is read, and is checked."""


@in_own_thread
@without_compiler()
def load_model(settings: Settings, report: Report = unreported) -> LoadedModel:
    """Load ``settings.model`` with its tokenizer, ready for the runner. ``report`` takes the
    progress. Checks that the same files have passed here before are not repeated.

    Raises ModelLoadError when it cannot be loaded, UnsupportedModelError when its KV cannot be
    linked exactly.
    """
    build_here(settings.native == "build")
    model, tokenizer, folder = read_weights(settings, part_of(report, 0.0, READ / 4))
    dtype = next(model.parameters()).dtype
    reading = part_of(report, READ / 4, READ)
    name = fingerprint_of_files(folder, dtype, state_dir=settings.state_dir, report=reading)
    verdicts = None
    if name is not None:
        verdicts = Verdicts(
            settings.state_dir,
            {
                "content": name,
                "code": code_beside(folder) if settings.trust_remote_code else None,
                "device": next(model.parameters()).device,
                "weights": settings.weights,
                "native": settings.native != "off",
            },
        )
    loaded = prepare_model(
        model,
        tokenizer,
        weights=settings.weights,
        native=settings.native != "off",
        state_inputs=settings.state_inputs,
        name=name,
        verdicts=verdicts,
        report=report,
    )
    if name is not None:
        remember_fingerprint(settings, loaded.fingerprint)
    return loaded


@in_own_thread
def read_weights(settings: Settings, report: Report = unreported) -> tuple[Any, Any, Path]:
    """Return the model as it is before it is prepared, its tokenizer, and the folder of its files.
    Weights of a GGUF file stay in codes where native code multiplies by them as they are.
    ``report`` takes the progress. Raises as ``load_model`` does."""
    own_bf16, device = multiplies_bf16(settings), choose_device(settings.device)
    stays = own_bf16 and settings.weights == "auto" and device.type == "cpu"
    is_bf16 = choose_dtype(settings.dtype, device, own_bf16=own_bf16) == torch.bfloat16
    in_codes = stays and is_bf16 and grouped_products() is not None
    settings = with_folder(settings, report, form="codes" if in_codes else "bf16")
    report("reading", 1.0)
    weights = coded_weights(Path(settings.model)) if in_codes else None
    model, tokenizer = read_model(settings, own_bf16=own_bf16, weights=weights)
    return model, tokenizer, model_folder(settings.model)


@in_own_thread
def multiplies_bf16(settings: Settings) -> bool:
    """Return whether native code multiplies by weights in bf16, and attends, on this CPU."""
    return (
        settings.native != "off"
        and native_products() is not None
        and native_attention() is not None
    )


@in_own_thread
def prepare_model(
    model: Any,
    tokenizer: Any,
    *,
    weights: WeightFormat = "auto",
    native: bool = True,
    state_inputs: bool = True,
    name: str | None = None,
    verdicts: Verdicts | None = None,
    report: Report = unreported,
) -> LoadedModel:
    """Check that a transformers model can be linked exactly, give it kvlinker's attention, and its
    weights the format ``weights``. With ``native``, native code multiplies by them in bf16 and
    computes norms.

    With ``state_inputs``, layers with a state keep all that enters of a chunk. ``name`` is the
    fingerprint of the model's files; without it that of the model is computed. Checks that
    ``verdicts`` remember as passed are not repeated. ``report`` takes the progress.
    Raises UnsupportedModelError when its KV cannot be linked, and ModelLoadError when the format
    needs a library that is not installed.
    """
    rounds = weights == "int8"
    sampled = _remembered_inputs(model, verdicts) if rounds else {}
    with dropping_mapped(model):
        with watch_linears(model) as linear_calls:
            anatomy = anatomy_of(model)
        if sampled is None or verdicts is None or not verdicts.passed(SELF_TEST):
            sampling: AbstractContextManager[Mapping[nn.Module, Tensor]]
            sampling = sampled_inputs(model) if rounds else nullcontext({})
            with sampling as sampled:
                require_exact(model, part_of(report, READ, CHECKED))
            if verdicts is not None:
                verdicts.remember(SELF_TEST)
                _remember_inputs(model, sampled, verdicts)
    report("arranging", CHECKED)
    model.set_attn_implementation(ATTENTION_NAME)
    parameter = next(model.parameters())
    parameters = sum(weight.numel() for weight in model.parameters())
    cost = CostModel(count_weights(model), anatomy.layers)
    name = fingerprint(model) if name is None else name
    if weights not in ("auto", "bf16"):
        name = fingerprint_with(name, f"weights in {weights}")
    if anatomy.recurrences and not state_inputs:
        name = fingerprint_with(name, "without state inputs")
    program = quicken_model(
        model,
        anatomy,
        linear_calls,
        weights,
        sampled,
        native=native,
        verdicts=verdicts,
        report=part_of(report, CHECKED, 1.0),
    )
    drop_unread(model)
    gc.collect()  # recordings of passes of the model hold tensors in cycles
    return_freed()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        anatomy=anatomy,
        cost=cost,
        fingerprint=name,
        parameters=parameters,
        dtype=parameter.dtype,
        device=parameter.device,
        context_window=context_window(model),
        eos_token_ids=_eos_token_ids(model, tokenizer),
        keeps_inner=state_inputs,
        program=program,
    )


def _remember_inputs(
    model: nn.Module, sampled: Mapping[nn.Module, Tensor], verdicts: Verdicts
) -> None:
    """Keep what ``sampled_inputs`` has sampled of ``model``, if anything, for its next start."""
    rows = {
        name: sampled[module].clone(memory_format=torch.contiguous_format)
        for name, module in model.named_modules()
        if module in sampled
    }
    if rows:
        verdicts.remember_tensors(INPUTS, rows)


def _remembered_inputs(
    model: nn.Module, verdicts: Verdicts | None
) -> Mapping[nn.Module, Tensor] | None:
    """Return what was sampled of ``model`` at an earlier start; None if nothing was."""
    named = None if verdicts is None else verdicts.tensors(INPUTS)
    if named is None:
        return None
    return {model.get_submodule(name): rows for name, rows in named.items()}


def quicken_model(
    model: Any,
    anatomy: Anatomy,
    linear_calls: LinearCalls,
    weights: WeightFormat,
    sampled: Mapping[nn.Module, Tensor],
    *,
    native: bool,
    verdicts: Verdicts | None = None,
    report: Report = unreported,
) -> Program | Capturable | str:
    """Give the weights of a model that has kvlinker's attention the format ``weights``, its norms
    native code, and return what computes its steps; or the reason why only its modules do. By the
    inputs ``sampled`` of its layers it is decided which of them are rounded to 8 bits. A program is
    not compared again where ``verdicts`` remember that it was right."""
    if native:
        arrange_experts(model, weights, sampled)
    arrange_weights(model, linear_calls, weights, sampled, native=native, report=report)
    if not native:
        return "native is off"
    quicken_norms(model)
    quicken_linears(model)
    return compile_step(model, anatomy, verdicts)


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = (
        model.generation_config.eos_token_id if model.generation_config is not None else None
    )
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in (*ids, getattr(tokenizer, "eos_token_id", None)) if i is not None)
