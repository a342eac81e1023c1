"""Makes the program of a loaded model's pass, or finds what graphs of a GPU are made from, and
compares their results with the model's own modules before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvlinker.engines.embedded.attention.kernels import step_kernel
from kvlinker.engines.embedded.execution.batch import (
    Batch,
    OwnTokens,
    Run,
    SharedChunk,
    StepResult,
    VisibleKV,
)
from kvlinker.engines.embedded.execution.compiled.compiled_step import step_function
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.engines.embedded.kv_cache.states import LayerState, SequenceState
from kvlinker.engines.embedded.model.anatomy import Anatomy, keeping
from kvlinker.engines.embedded.model.decoder import decoder_layers
from kvlinker.engines.embedded.model.obstacles import EXHAUSTED
from kvlinker.engines.embedded.model.recording.capturable import Capturable
from kvlinker.engines.embedded.model.recording.lowering import record_program
from kvlinker.engines.embedded.model.recording.program import Program
from kvlinker.engines.embedded.model.recording.trace import UnrecordableError
from kvlinker.engines.embedded.model.weights.experts import PackedExperts
from kvlinker.engines.embedded.verdicts import Verdicts
from kvlinker.engines.gpu import has_kernels
from kvlinker.engines.native import NativeUnavailableError
from kvlinker.store.chunk_kv import ChunkKV, LayerKV

LARGEST_ERROR = 0.5
"""The most by which a program's results may differ from the modules', in units of the modules' own
rounding. Both round in the same places, and differ by the order of sums: by 0.23 where most was
seen (Gemma 3 in 4 bits), a relative error of 3e-2."""

SHARED = 30
"""The tokens of the chunk that the compared step attends to."""

RUNS = (("prompt", 0, 24), ("decoding", 40, 1), ("linking", 33, 3), ("linking", 50, 6))
"""The runs of the compared step: their sequence, first position and length. Sequences of models
whose layers keep a state have one run each, and no chunk: they go on from a state."""

GRAPHED_AFTER = 2
"""The times that a step is computed again until a graph of it is replayed: one is captured."""

SLOTS = 64
"""The slots of the pool of each sequence there."""

STEPS = "compiled steps"
"""The name of this check among verdicts."""

logger = logging.getLogger(__name__)


def compile_step(
    model: Any, anatomy: Anatomy, verdicts: Verdicts | None = None
) -> Program | Capturable | str:
    """Return the program of the pass of ``model``, whose weights are arranged, or what graphs of
    its GPU are made from; or why there is neither, as the end of a sentence, which the log says,
    too. A program is not compared again where ``verdicts`` remember that it was right."""
    try:
        on_gpu = has_kernels(next(model.parameters()).device)
        program: Program | Capturable
        if on_gpu:
            program = _checked_graphs(model, anatomy)
        else:
            program = _checked_program(model, anatomy, verdicts)
    except EXHAUSTED:
        raise
    except (UnrecordableError, NativeUnavailableError) as error:
        reason = str(error)
    except Exception as error:  # whatever the model's code raises
        reason = f"it cannot be recorded ({type(error).__name__}: {error})"
    else:
        return program
    logger.info("Steps are computed by the model's modules: %s.", reason)
    return reason


def _checked_program(model: Any, anatomy: Anatomy, verdicts: Verdicts | None) -> Program:
    parameter = next(model.parameters())
    if parameter.device.type != "cpu":
        raise UnrecordableError("it is not in the CPU's memory")
    if parameter.dtype != torch.bfloat16:
        name = str(parameter.dtype).removeprefix("torch.")
        raise UnrecordableError(f"native code attends in bf16, and it is in {name}")
    if anatomy.picks:
        raise UnrecordableError("indexers pick the tokens that are seen")
    if len({layer.latents is None for layer in anatomy.layers}) > 1:
        raise UnrecordableError("some layers keep latents, and others do not")
    if step_kernel(anatomy.layers, dtype=parameter.dtype, device=parameter.device) is None:
        raise UnrecordableError("native code does not attend for it here")
    step_function()
    program = record_program(model, anatomy)
    if verdicts is None or not verdicts.passed(STEPS):
        _require_small(program_error(model, anatomy, program))
        if verdicts is not None:
            verdicts.remember(STEPS)
    return program


def _checked_graphs(model: Any, anatomy: Anatomy) -> Capturable:
    found = Capturable.of(model, anatomy)
    _require_small(program_error(model, anatomy, found))
    return found


def _require_small(error: float) -> None:
    if not error <= LARGEST_ERROR:
        raise UnrecordableError(
            f"what was recorded computes something else: it differs {error:.1f} times as much as"
            " rounding does"
        )


def program_error(model: Any, anatomy: Anatomy, program: Program | Capturable) -> float:
    """Return the largest error of a step by the program, or the replay of a graph, from one by the
    modules: of its logits, of the keys and values that it writes, and of the states after it. Its
    unit is the distance of the modules' own results where the inputs of layers are rounded
    otherwise.

    Raises UnrecordableError if no graph was replayed.
    """
    batch = _batch(model, anatomy)
    with _same_experts(model):
        found, expected = (_computed(model, anatomy, batch, each) for each in (program, None))
        if all(map(torch.equal, found, expected)):
            return 0.0
        with _rounded_otherwise(model):
            rounded = _computed(model, anatomy, batch, None)
    return float(np.max(list(map(_error, found, expected, rounded))))  # NaN, if any is


@contextmanager
def _rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Change what enters each decoder layer in the block by about one unit in the last place, up or
    down at random."""
    generator = torch.Generator().manual_seed(2)

    def disturbed(hidden: Tensor) -> Tensor:
        signs = torch.randint(2, hidden.shape, generator=generator).to(hidden) * 2 - 1
        return hidden + hidden * signs * torch.finfo(hidden.dtype).eps

    def change(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (disturbed(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": disturbed(kwargs["hidden_states"])}

    with ExitStack() as hooks:
        for layer in decoder_layers(model):
            hooks.enter_context(layer.register_forward_pre_hook(change, with_kwargs=True))
        yield


@contextmanager
def _same_experts(model: nn.Module) -> Iterator[None]:
    """Fix the experts and their weights, in later passes in the block, to those that the first pass
    chose for each row: where two are all but equal, the last bits of a sum choose between them."""
    chosen: dict[nn.Module, tuple[Any, ...]] = {}

    def choose(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0], *chosen.setdefault(module, args[1:]))

    experts = [each for each in model.modules() if isinstance(each, PackedExperts)]
    handles = [each.register_forward_pre_hook(choose) for each in experts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _error(ours: Tensor, expected: Tensor, rounded: Tensor) -> float:
    if ours.equal(expected):
        return 0.0  # where rounding makes no difference, too
    return float((ours - expected).norm() / (rounded - expected).norm())


def _batch(model: Any, anatomy: Anatomy) -> Batch:
    """Return a step of a prompt from its beginning, a sequence that decodes, and one that computes
    scattered tokens, the latter two after a chunk that they share, or after a state."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, SLOTS)
    generator = torch.Generator().manual_seed(0)

    dtype = next(model.parameters()).dtype

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    layers = tuple(
        LayerKV(
            random(layer.kv_heads, SHARED, layer.key_dim),
            random(layer.kv_heads, SHARED, layer.value_dim),
        )
        for layer in keeping(anatomy.layers)
    )
    chunk = ChunkKV(layers)
    runs = []
    visible_kv: dict[object, VisibleKV] = {}
    wanted = RUNS[:-1] if anatomy.recurrences else RUNS
    for number, owner in enumerate(dict.fromkeys(owner for owner, _, _ in wanted)):
        mine = [(begin, size) for name, begin, size in wanted if name == owner]
        end = mine[-1][0] + mine[-1][1]
        first = 0 if mine[0][0] == 0 else SHARED
        with_chunk = first and not anatomy.recurrences
        shared = (SharedChunk(chunk, 0, 0, 0, SHARED),) if with_chunk else ()
        state = _state(anatomy, mine[0][0], random) if first else None
        own = np.arange(first, end)
        spans = (SlotSpan(number * SLOTS, len(own)),)
        visible_kv[owner] = VisibleKV(shared, spans, own, OwnTokens(own, shared), state)
        for begin, size in mine:
            slots = number * SLOTS + np.arange(begin, begin + size) - first
            ids = tokens[begin : begin + size]
            wants_logits = begin + size == end
            runs.append(Run(slots, begin, ids, wants_logits, owner=owner))
    return Batch(tuple(runs), visible_kv)


def _state(anatomy: Anatomy, position: int, random: Callable[..., Tensor]) -> SequenceState | None:
    """Return a state at this position. It is the beginning's, except for the inputs of the next
    convolution."""
    layers = tuple(
        LayerState(random(each.channels, each.window), torch.zeros(each.state_shape))
        for each in anatomy.recurrences
    )
    return SequenceState(position, layers) if layers else None


def _computed(
    model: Any, anatomy: Anatomy, batch: Batch, program: Program | Capturable | None
) -> list[Tensor]:
    """Return the logits of the step, the keys and values of the pool after it, and the sequences'
    states."""
    parameter = next(model.parameters())
    slots = len(batch.owners) * SLOTS
    pool = KVPool(anatomy.layers, slots, dtype=parameter.dtype, device=parameter.device)
    runner = Runner(model, anatomy, pool, program=program)
    native = step_kernel(anatomy.layers, dtype=parameter.dtype, device=parameter.device)
    if program is None and native is not None:
        runner.kernel = native  # another one rounds otherwise
    _fill(pool)
    result = runner.step(batch)
    if isinstance(program, Capturable):
        result = _replayed(runner, pool, batch)
    logits = torch.stack(list(result.logits.values()))
    keys, values = (
        torch.cat([each.flatten() for each in tensors]).float()
        for tensors in (pool.keys, pool.values)
    )
    states = [
        torch.cat([part.float().flatten() for part in (layer.before, layer.state)])
        for kept in result.states.values()
        for state in kept
        for layer in state.layers
    ]
    return [logits, keys, values, *states]


def _replayed(runner: Runner, pool: KVPool, batch: Batch) -> StepResult:
    """Compute a step again until a graph of it is replayed, and return its result."""
    graphed = runner.graphed
    if graphed is None:
        raise UnrecordableError("Triton does not attend for it here")
    for _ in range(GRAPHED_AFTER):
        _fill(pool)
        result = runner.step(batch)
    if not graphed.replays:
        reason = graphed.obstacle or "a step needs more than it has"
        raise UnrecordableError(f"no graph can be captured ({reason})")
    return result


def _fill(pool: KVPool) -> None:
    """Fill the pool with the same random numbers each time."""
    generator = torch.Generator().manual_seed(1)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
