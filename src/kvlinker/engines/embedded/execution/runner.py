"""Runs the model on a batch: one forward pass over the KV pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvlinker.base.profiling import Profile
from kvlinker.engines.embedded.attention.kernels import choose_kernel, step_kernel
from kvlinker.engines.embedded.decoding.logprobs import Head
from kvlinker.engines.embedded.execution.batch import Batch, StepResult
from kvlinker.engines.embedded.execution.compiled.compiled_step import CompiledStep, LayeredPass
from kvlinker.engines.embedded.execution.forward_pass import EmptyStepError, ForwardPass
from kvlinker.engines.embedded.execution.late_layers import WaitInStep, never_wait
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.decoder import decoder_layers
from kvlinker.engines.embedded.model.indexers import all_visible
from kvlinker.engines.embedded.model.interception import active_interceptor, intercepted
from kvlinker.engines.embedded.model.recording.capturable import Capturable
from kvlinker.engines.embedded.model.recording.program import Program
from kvlinker.store.loading.arriving import ArrivingKV
from kvlinker.store.memory.lane import lane_to

if TYPE_CHECKING:
    from kvlinker.engines.embedded.execution.graphs.graphed_steps import GraphedSteps

COPIES_SHARE = 0.1
"""The share of a device's free memory that copies of chunks take which stay from pass to pass."""


class Runner:
    """Runs one model over one KV pool. It is not thread safe: the engine's thread owns it."""

    def __init__(
        self,
        model: Any,
        anatomy: Anatomy,
        pool: KVPool,
        *,
        native_attention: bool = True,
        program: Program | Capturable | None = None,
    ) -> None:
        """``model`` is a transformers causal language model whose attention is kvlinker's. With
        ``native_attention``, attention is computed by code that is compiled for the CPU, where that
        can be done for the model, and steps of few tokens by the ``program`` of its pass; on GPUs,
        by graphs of it."""
        self._model = model
        self._anatomy = anatomy
        self.pool = pool
        self.device = pool.device
        self.profile: Profile | None = None
        self._native = native_attention
        self.picks_logits = "logits_to_keep" in signature(model.forward).parameters
        """True if the model computes only the wanted logits, not all."""

        self._ahead = LayersAhead(
            lane_to(self.device), len(pool.keys), room_bytes=_room_for_copies(self.device)
        )
        self.kernel = choose_kernel(
            anatomy.layers,
            dtype=pool.dtype,
            device=self.device,
            use_native=native_attention,
        )
        self._chosen = self.kernel
        """The kernel at first. A caller that replaces it listens to attention: the modules compute
        the steps then."""

        self._compiled: CompiledStep | None = None
        self._layered: tuple[Batch, LayeredPass] | None = None
        self.graphed: GraphedSteps | None = None
        if isinstance(program, Capturable):
            self.graphed = self._graphs(program.windows)
        elif program is not None and native_attention:
            kernel = step_kernel(anatomy.layers, dtype=pool.dtype, device=self.device)
            if kernel is not None:
                self._compiled = CompiledStep(program, anatomy, pool, kernel, self._ahead)

    @cached_property
    def head(self) -> Head:
        """The model's head, which computes logits for scoring. Raises InvalidRequestError for a
        model whose head cannot be separated."""
        return Head(self._model)

    def _logits(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Compute a pass over these tokens, and return the logits of ``rows`` among them: [rows,
        vocabulary]. ``rows`` may change while layers are computed."""
        output = self._model(
            input_ids=ids[None],
            attention_mask=all_visible(len(ids), self.device) if self._anatomy.picks else None,
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows if len(rows) else 1,
        )
        logits: Tensor = output.logits[0]
        return logits if self.picks_logits else logits[rows]

    def _graphs(self, windows: Sequence[int | None]) -> GraphedSteps | None:
        """Return what computes steps by graphs, if Triton attends."""
        from kvlinker.engines.embedded.attention.triton_attention import TritonAttention
        from kvlinker.engines.embedded.execution.graphs.graphed_steps import GraphedSteps

        if not isinstance(self.kernel, TritonAttention):
            return None
        return GraphedSteps(
            self._logits, self._anatomy.layers, windows, self.pool, self.kernel, self._ahead
        )

    @property
    def most_layered_tokens(self) -> int:
        """The largest number of a batch's tokens for ``compute_layers``; 0 if it takes none."""
        return 0 if self._compiled is None else self._compiled.most_layered_rows

    def accepts_layers(self, batch: Batch) -> bool:
        """Return whether ``compute_layers`` takes the batch."""
        if self._compiled is None or self.kernel is not self._chosen or self.profile is not None:
            return False
        return self._compiled.accepts_layers(batch)

    @torch.inference_mode()
    def compute_layers(self, batch: Batch, until: float) -> tuple[StepResult, float] | None:
        """Compute some layers, at least one, of a batch for which ``accepts_layers`` is true, until
        about ``until``, in seconds of ``time.perf_counter``. Returns the result once all are
        computed, and the seconds that they took; None before. Another batch takes the place of one
        that is not done."""
        assert self._compiled is not None, "steps are computed by modules"
        if self._layered is None or self._layered[0] is not batch:
            self._layered = batch, self._compiled.begin(batch)
        layered = self._layered[1]
        result = layered.compute_layers(until)
        if result is None:
            return None
        self._layered = None
        return result, layered.seconds

    def drop_layers(self) -> None:
        """End the pass of a batch that does not go on, if there is one."""
        self._layered = None

    @torch.inference_mode()
    def step(self, batch: Batch, wait: WaitInStep = never_wait) -> StepResult:
        """Compute all runs, except those of owners whose chunks lack a layer when it is to be
        attended to: these leave the step.

        If all owners would leave, ``wait`` is called first.
        """
        quick = self._compiled or self.graphed
        if quick is not None and self.kernel is self._chosen and self.profile is None:
            computed = quick.compute(batch)
            if computed is not None:
                return computed
        forward = ForwardPass(
            self._anatomy,
            self.pool,
            batch,
            kernel=self.kernel,
            ahead=self._ahead,
            profile=self.profile,
            wait=wait,
            native=self._native,
        )
        narrows = any(run.refinement is not None for run in batch.runs) or any(
            isinstance(chunk.kv, ArrivingKV) and not chunk.kv.complete for _, chunk in batch.shared
        )
        scored = any(run.logprobs is not None for run in batch.runs)
        watching: AbstractContextManager[list[Tensor]] = (
            self.head.watching(forward) if scored else nullcontext([])
        )
        try:
            with (
                intercepted(forward),
                _narrowing(self._model, forward) if narrows else nullcontext(),
                watching as seen,
            ):
                logits = self._logits(
                    torch.from_numpy(batch.tokens).to(self.device),
                    torch.from_numpy(batch.positions).to(self.device),
                    forward.logit_rows,
                )
        except EmptyStepError:
            return StepResult({}, forward.late, {})
        for states in (each[forward.remaining_rows] for each in seen):
            for run, rows in forward.remaining.rows:
                if run.logprobs is not None:
                    run.logprobs.collect(run.start, states[rows])
        owners = forward.remaining.logit_owners
        logits = logits[: len(owners)].float().cpu()
        found = dict(zip(owners, logits, strict=True))
        return StepResult(found, forward.late, forward.states())


def _room_for_copies(device: torch.device) -> int:
    """Return how many bytes of a device's own memory copies of chunks may take."""
    return int(torch.cuda.mem_get_info(device)[0] * COPIES_SHARE) if device.type == "cuda" else 0


@contextmanager
def _narrowing(model: nn.Module, forward: ForwardPass) -> Iterator[None]:
    """Let tokens leave the hidden states before every decoder layer, until the last one: those that
    a policy drops, and those of requests whose chunks lack the layer (``late_layers.py``)."""
    tokens = len(forward.remaining_rows)

    def enter(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if active_interceptor() is not forward:
            return args, kwargs  # another engine's thread runs the same model

        def with_input(hidden: Tensor, rows: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
            def narrowed(value: Any) -> Any:
                is_of_tokens = isinstance(value, Tensor) and value.ndim in (2, 3)
                return (
                    value[:, rows]
                    if is_of_tokens and len(rows) < value.shape[1] == tokens
                    else value
                )

            others = {name: narrowed(value) for name, value in kwargs.items()}
            if args:
                return (hidden, *map(narrowed, args[1:])), others
            return args, others | {"hidden_states": hidden}

        def compute(hidden: Tensor, rows: Tensor) -> object:
            changed_args, changed_kwargs = with_input(hidden, rows)
            return layer.forward(*changed_args, **changed_kwargs)

        hidden = args[0] if args else kwargs["hidden_states"]
        hidden = forward.enter_layer(hidden, compute)
        return with_input(hidden, forward.remaining_rows)

    def leave(layer: nn.Module, args: Any, output: Any) -> Any:
        if active_interceptor() is not forward:
            return output
        if isinstance(output, Tensor):
            return forward.leave_layer(output)
        return (forward.leave_layer(output[0]), *output[1:])

    layers = decoder_layers(model)
    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
