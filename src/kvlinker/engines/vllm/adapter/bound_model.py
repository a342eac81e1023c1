"""Runs forward passes of kvlinker's own through the model that vLLM's worker has loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvlinker.base.errors import KVLinkerError, UnsupportedModelError
from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.store.memory.to_host import finish_copies


@dataclass(frozen=True, slots=True)
class VirtualSequences:
    """Runs as sequences of vLLM's attention: each is a sequence whose last ``query_length`` tokens
    are computed.

    ``tokens``, ``positions`` and ``slots`` [computed tokens], all int64; ``query_lengths`` and
    ``lengths`` [runs]; ``block_ids`` one list per run, which may be the same.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_lengths: Sequence[int]
    lengths: Sequence[int]
    block_ids: Sequence[Sequence[int]]


class _SlotsByLayer(dict[str, Tensor]):
    """The slots that a pass writes to, by the names of layers; each layer asks for its own before
    it does anything with its KV cache, also in a compiled graph."""

    def __init__(
        self, names: Iterable[str], slots: Tensor, before_layer: Callable[[str], None]
    ) -> None:
        super().__init__(dict.fromkeys(names, slots))
        self._before_layer = before_layer

    def get(self, name: str, default: Any = None) -> Any:
        self._before_layer(name)
        return super().get(name, default)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer of this worker. ``first_head`` is its first KV head among all of the
    layer's."""

    name: str
    module: Any
    heads: int
    head_dim: int
    first_head: int
    total_heads: int

    @property
    def query_heads(self) -> int:
        """The number of the layer's query heads that this worker has."""
        return int(self.module.num_heads)

    @property
    def options(self) -> AttentionOptions:
        """The options of the layer's attention: scale, window, soft cap, sinks."""
        implementation = self.module.impl
        return AttentionOptions(
            scale=float(implementation.scale),
            window=self.module.sliding_window,
            softcap=getattr(implementation, "logits_soft_cap", None) or None,
            sinks=getattr(implementation, "sinks", None),
        )

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """The scales of keys and values in a KV cache in fp8, by which what it holds is to be
        multiplied; 1 in others. They are the layer's own tensors, on its device."""
        return self.module._k_scale, self.module._v_scale

    def cache_views(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values [blocks, block_size, heads, head_dim] as backends know to lay them
        out in the layer's cache, which vLLM shapes [blocks, heads, block_size, 2 * head_dim]."""
        cache = self.module.kv_cache
        if cache.shape[1] == self.heads and cache.shape[-1] == 2 * self.head_dim:
            key, value = cache.transpose(1, 2).split(self.head_dim, dim=-1)
            yield key, value
            if cache.is_contiguous():
                behind = cache.view(*cache.shape[:2], -1, self.head_dim)
                key, value = behind.transpose(1, 2).chunk(2, dim=1)
                yield key, value
        elif cache.shape[1] == 2 * self.heads:
            key, value = cache.transpose(1, 2).split(self.heads, dim=2)
            yield key, value

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write ``key`` and ``value`` [tokens, heads, head_dim] into the KV cache."""
        self.module.impl.do_kv_cache_update(self.module, key, value, self.module.kv_cache, slots)


class BoundModel:
    """Runs forward passes of kvlinker's own through the model of this worker."""

    def __init__(self, runner: Any) -> None:
        """Bind to the model of vLLM's model runner. Raises UnsupportedModelError for one that
        cannot be linked."""
        self._config = runner.vllm_config
        self._runner = runner
        self.model: nn.Module = runner.get_model()
        self.device: torch.device = runner.device
        self.dtype: torch.dtype = self._config.model_config.dtype
        self.has_rounded_cache: bool = str(self._config.cache_config.cache_dtype).startswith("fp8")
        self.vocabulary: int = self._config.model_config.get_vocab_size()
        self.max_model_len: int = self._config.model_config.max_model_len
        self.rank: int = get_tensor_model_parallel_rank()
        (groups,) = _single(runner.attn_groups, "groups of KV cache layers")
        for group in groups:
            if type(group.kv_cache_spec) is not FullAttentionSpec:
                raise UnsupportedModelError(
                    "vLLM does not keep all of this model's KV"
                    f" ({type(group.kv_cache_spec).__name__}), so kvlinker cannot link it. Where"
                    " that is because of a sliding window, --disable-sliding-window helps, for"
                    " prompts that fit into one."
                )
        (size,) = _single({group.kv_cache_spec.block_size for group in groups}, "block sizes")
        self.block_size: int = size
        if len(groups) > 1 and not self.is_alone:
            raise UnsupportedModelError(
                f"The model has heads of {len(groups)} sizes in vLLM, which kvlinker links in one"
                " worker only: leave tensor_parallel_size at 1."
            )
        self._groups = [own_group(group, self._config, self.device) for group in groups]
        self._built: Any = None if self.device.type == "cpu" else torch.Event(self.device)
        self.layers = tuple(self._attention_layers())

    def _attention_layers(self) -> Iterator[AttentionLayer]:
        """Yield the layers in the order of their names in vLLM's KV cache."""
        modules = self._config.compilation_config.static_forward_context
        parallel = self._config.parallel_config.tensor_parallel_size
        configured = self._config.model_config.get_total_num_kv_heads()
        for name in (name for group in self._groups for name in group.layer_names):
            module = modules[name]
            total = module.num_kv_heads if self.is_alone else configured
            reason = _unplaceable(module)
            if reason is not None:
                raise UnsupportedModelError(
                    f"kvlinker cannot place KV in the model's layer {name}: {reason}."
                )
            yield AttentionLayer(
                name=name,
                module=module,
                heads=module.num_kv_heads,
                head_dim=module.head_size,
                first_head=self.rank * total // parallel,
                total_heads=total,
            )

    def slots(self, block_ids: Sequence[int], positions: Tensor) -> Tensor:
        """Return the slots in the KV cache of the tokens at ``positions`` [tokens] of a request
        with these blocks: [tokens], on the same device."""
        blocks = torch.tensor(block_ids, dtype=torch.int64, device=positions.device)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def forward(
        self,
        sequences: VirtualSequences,
        *,
        eager: bool = False,
        before_layer: Callable[[str], None] = lambda name: None,
    ) -> Tensor:
        """Run one pass over the runs, whose KV goes to the KV cache, and return their hidden states
        [computed tokens, hidden]; with ``eager``, by the modules instead of a compiled graph.
        ``before_layer`` is called with a layer's name before its KV cache is written to or read."""
        metadata = self._metadata(sequences)
        with set_forward_context(
            metadata,
            self._config,
            num_tokens=len(sequences.tokens),
            slot_mapping=_SlotsByLayer(metadata, sequences.slots, before_layer),
            skip_compiled=eager,
        ):
            return self._call(sequences.tokens, sequences.positions)

    def to_device(self, values: Tensor) -> Tensor:
        """Copy ``values`` from the CPU to the model's device, without waiting for what it is
        doing."""
        if self.device.type != "cpu":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def finish_copies(self) -> None:
        """Wait until all copies to the CPU have been made."""
        finish_copies(self.device)

    def trace(self, tokens: int = 8) -> None:
        """Run a pass by the modules that neither reads nor writes the KV cache, for hooks to
        watch."""
        ids = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        with set_forward_context(
            None, self._config, num_tokens=tokens, slot_mapping={}, skip_compiled=True
        ):
            self._call(ids, torch.arange(tokens, device=self.device))

    def hold_generators(self) -> None:
        """Keep the random generators of requests with a seed out of a step that computes only a
        part of their prompts.

        To be called before each step samples. vLLM samples for such requests, too, and winds their
        generators back afterwards, which generators on a CPU cannot do: the engine would end.
        Without its generator a request's draw is discarded all the same.
        """
        if self.device.type != "cpu" or not hasattr(self._runner, "discard_request_mask"):
            return
        batch = self._runner.input_batch
        for index, name in enumerate(batch.req_ids):
            generator = getattr(self._runner.requests.get(name), "generator", None)
            if generator is None:
                continue
            if self._runner.discard_request_mask.np[index]:
                batch.generators.pop(index, None)
            else:
                batch.generators[index] = generator

    def gather_heads(self, heads: Tensor) -> Tensor:
        """Join the ``heads`` [kv_heads, tokens, head_dim] of all workers, on the CPU; all have to
        ask."""
        if self.is_alone:
            return heads
        gathered: Tensor = tensor_model_parallel_all_gather(
            heads.contiguous().to(self.device), dim=0
        )
        copies = len(gathered) // self.layers[0].total_heads
        return gathered[::copies].cpu()

    def mean_over_workers(self, values: Tensor) -> Tensor:
        """Average ``values`` [any] over all workers; all have to ask."""
        if self.is_alone:
            return values
        total: Tensor = tensor_model_parallel_all_reduce(values.clone())
        mean: Tensor = total / self._config.parallel_config.tensor_parallel_size
        return mean

    def any_worker(self, flags: Sequence[bool]) -> list[bool]:
        """Return, for each flag, whether it is true on any worker; all have to ask."""
        if self.is_alone or not flags:
            return list(flags)
        joined = torch.tensor(flags, dtype=torch.int32)
        torch.distributed.all_reduce(joined, group=get_tp_group().cpu_group)  # waits for no device
        return [bool(count) for count in joined.tolist()]

    @property
    def is_first_rank(self) -> bool:
        """True if this worker writes and reports for all."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """True if this worker has all heads, so that no other one waits for it in a pass."""
        return bool(self._config.parallel_config.tensor_parallel_size == 1)

    def _call(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Call the model as its runner does: one that takes more than text is compiled for
        embeddings."""
        ids = tokens.to(torch.int32)
        model: Any = self.model
        embeds = model.embed_input_ids(ids) if self._runner.supports_mm_inputs else None
        keeps_ids = embeds is None or getattr(model, "requires_raw_input_tokens", False)
        hidden = model(
            input_ids=ids if keeps_ids else None,
            positions=positions,
            intermediate_tensors=None,
            inputs_embeds=embeds,
        )
        states: Tensor = (
            hidden[0] if isinstance(hidden, tuple) else hidden
        )  # some models add others' for drafts
        return states

    def _metadata(self, sequences: VirtualSequences) -> dict[str, Any]:
        """Build what the attention backends take, by the names of layers. Each pass writes the
        builders' buffers anew, once those of the last one have been copied to the device."""
        if self._built is not None:
            self._built.synchronize()
        common = self._common_metadata(sequences)
        metadata: dict[str, Any] = {}
        for group in self._groups:
            metadata |= dict.fromkeys(group.layer_names, group.build_metadata(common))
        if self._built is not None:
            self._built.record()
        return metadata

    def _common_metadata(self, sequences: VirtualSequences) -> CommonAttentionMetadata:
        starts = torch.zeros(len(sequences.lengths) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(sequences.query_lengths), 0, out=starts[1:])
        lengths = torch.tensor(sequences.lengths, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=self.to_device(starts),
            query_start_loc_cpu=starts,
            seq_lens=self.to_device(lengths),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(sequences.lengths),
            num_actual_tokens=len(sequences.tokens),
            max_query_len=max(sequences.query_lengths),
            max_seq_len=max(sequences.lengths),
            block_table_tensor=self._block_table(sequences.block_ids),
            slot_mapping=sequences.slots,
            positions=sequences.positions,
            is_prefilling=torch.ones(len(sequences.lengths), dtype=torch.bool),
        )

    def _block_table(self, block_ids: Sequence[Sequence[int]]) -> Tensor:
        """Make the block table [runs, longest] in the KV cache manager's blocks, filled up with the
        null block. The group maps it where the backend's are smaller."""
        table = torch.zeros(len(block_ids), max(map(len, block_ids)), dtype=torch.int32)
        for row, ids in zip(table, block_ids, strict=True):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return self.to_device(table)


def own_group(group: Any, config: Any, device: torch.device) -> Any:
    """Return the group of attention layers with a metadata builder of its own.

    Builders may keep what they build in buffers that the next build overwrites, such as
    FlashAttention 3's scheduler metadata and FlashInfer's plans. Runs inside a request's first step
    are built when that step's own metadata already is, and must leave it alone.
    """
    theirs = group.get_metadata_builder()
    own = replace(group, metadata_builders=[], kernel_block_table=None, kernel_block_offsets=None)
    with set_current_vllm_config(config):
        own.create_metadata_builders(config, device, theirs.kv_cache_spec.block_size)
    (builder,) = own.metadata_builders
    if hasattr(
        builder, "set_workspace_buffer"
    ):  # scratch space, which passes use one after another
        builder.set_workspace_buffer(theirs._get_workspace_buffer())
    return own


def _unplaceable(module: Any) -> str | None:
    """Return why KV cannot be placed in an attention layer; None where it can."""
    if not isinstance(module, Attention):
        return f"its attention is vLLM's {type(module).__name__}"
    backend = module.impl
    if not hasattr(backend, "do_kv_cache_update"):
        return (
            f"{type(backend).__name__} writes KV only while it attends; choose another"
            " attention_backend"
        )
    if module.kv_sharing_target_layer_name is not None:
        return f"it uses the KV of {module.kv_sharing_target_layer_name}"
    if getattr(module, "attention_chunk_size", None) is not None:
        return "it is cut at fixed positions (attention_chunk_size); --engine embedded links it"
    if getattr(backend, "alibi_slopes", None) is not None:
        return "it has ALiBi, whose attention kvlinker does not know"
    return None


def bind_caller() -> BoundModel:
    """Bind the model of the runner that is handing its KV cache to the connector, found among the
    callers: vLLM gives connectors no other access to it.

    Raises KVLinkerError where none of the callers is a runner, and UnsupportedModelError.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "attn_groups") and hasattr(caller, "get_model"):
            return BoundModel(caller)
        frame = frame.f_back  # type: ignore[assignment]
    raise KVLinkerError(
        f"vLLM {vllm.__version__} registers its KV cache from elsewhere than its model runner."
    )


def _single(values: Any, what: str) -> tuple[Any]:
    if len(values) != 1:
        raise UnsupportedModelError(
            f"The model has {len(values)} {what} in vLLM; kvlinker links models with one. Try "
            "--disable-hybrid-kv-cache-manager."
        )
    (value,) = values
    return (value,)
