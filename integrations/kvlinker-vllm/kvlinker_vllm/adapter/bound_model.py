"""Runs forward passes of kvlinker's own through the model that vLLM's worker has loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvlinker.base.errors import KVLinkerError, UnsupportedModelError
from kvlinker_vllm.adapter.attention_layers import AttentionLayer, unplaceable
from kvlinker_vllm.adapter.cache_groups import bound_groups, own_group
from kvlinker_vllm.adapter.latent_layers import LatentLayer, latents_unplaceable


@dataclass(frozen=True, slots=True)
class VirtualSequences:
    """Runs as sequences of vLLM's attention: each is a sequence whose last ``query_length`` tokens
    are computed.

    ``tokens``, ``positions`` [computed tokens] and ``slots`` [groups, computed tokens], all int64;
    ``query_lengths`` and ``lengths`` [runs]; ``block_ids`` one list per run and group, which may be
    the same.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_lengths: Sequence[int]
    lengths: Sequence[int]
    block_ids: Sequence[Sequence[Sequence[int]]]


class _SlotsByLayer(dict[str, Tensor]):
    """The slots that a pass writes to, by the names of layers; each layer asks for its own before
    it does anything with its KV cache, also in a compiled graph."""

    def __init__(self, slots: Mapping[str, Tensor], before_layer: Callable[[str], None]) -> None:
        super().__init__(slots)
        self._before_layer = before_layer

    def get(self, name: str, default: Any = None) -> Any:
        self._before_layer(name)
        return super().get(name, default)


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
        self.blocks: int = self._config.cache_config.num_gpu_blocks
        self.groups = bound_groups(runner.attn_groups)
        attention = [group for groups in runner.attn_groups for group in groups]
        if len(attention) > len(self.groups) and not self.is_alone:
            raise UnsupportedModelError(
                f"The model has heads of {len(attention)} sizes in vLLM, which kvlinker links in"
                " one worker only: leave tensor_parallel_size at 1."
            )
        self._groups = [own_group(group, self._config, self.device) for group in attention]
        self._built: Any = None if self.device.type == "cpu" else torch.Event(self.device)
        self.layers = tuple(self._attention_layers())

    def _attention_layers(self) -> Iterator[AttentionLayer]:
        """Yield the layers with KV of their own, but not those that attend to another layer's, in
        the order of their names in vLLM's KV cache."""
        modules: Mapping[str, Any] = self._config.compilation_config.static_forward_context
        named = [
            (group.kv_cache_group_id, name) for group in self._groups for name in group.layer_names
        ]
        for group, name in named:
            module = modules[name]
            if getattr(module, "kv_sharing_target_layer_name", None) is not None:
                continue
            latent = isinstance(module, MLAAttention)
            reason = (
                latents_unplaceable(module) if latent else unplaceable(module, self.max_model_len)
            )
            if reason is not None:
                raise UnsupportedModelError(
                    f"kvlinker cannot place KV in the model's layer {name}: {reason}."
                )
            yield (
                LatentLayer.of(name, module, group)
                if latent
                else self._attention_layer(name, module, group)
            )

    def _attention_layer(self, name: str, module: Any, group: int) -> AttentionLayer:
        total = module.num_kv_heads
        if not self.is_alone:
            total = self._config.model_config.get_total_num_kv_heads()
        return AttentionLayer(
            name=name,
            module=module,
            heads=module.num_kv_heads,
            key_dim=module.head_size,
            value_dim=module.head_size,
            first_head=self.rank * total // self._config.parallel_config.tensor_parallel_size,
            total_heads=total,
            group=group,
        )

    def slots(self, group: int, block_ids: Sequence[int], positions: Tensor) -> Tensor:
        """Return the slots in a group's KV cache of the tokens at ``positions`` [tokens] of a
        request with these blocks in it: [tokens], on the same device."""
        size = self.groups[group].block_size
        blocks = torch.tensor(block_ids, dtype=torch.int64, device=positions.device)
        return blocks[positions // size] * size + positions % size

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
            slot_mapping=_SlotsByLayer(self._slots_by_name(sequences), before_layer),
            skip_compiled=eager,
        ):
            return self._call(sequences.tokens, sequences.positions)

    def to_device(self, values: Tensor) -> Tensor:
        """Copy ``values`` from the CPU to the model's device, without waiting for its work."""
        if self.device.type != "cpu":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def trace(self) -> None:
        """Run a short pass by the modules that neither reads nor writes the KV cache, for hooks to
        watch."""
        positions = torch.arange(8, device=self.device)
        with set_forward_context(
            None, self._config, num_tokens=len(positions), slot_mapping={}, skip_compiled=True
        ):
            self._call(torch.zeros_like(positions), positions)

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
        """Join the ``heads`` [kv_heads, tokens, dim] of all workers, on the CPU. Every worker calls
        it."""
        if self.is_alone:
            return heads
        gathered: Tensor = tensor_model_parallel_all_gather(
            heads.contiguous().to(self.device), dim=0
        )
        copies = len(gathered) // self.layers[0].total_heads
        return gathered[::copies].cpu()

    def mean_over_workers(self, values: Tensor) -> Tensor:
        """Average ``values`` [any] over all workers. Every worker calls it."""
        if self.is_alone:
            return values
        total: Tensor = tensor_model_parallel_all_reduce(values.clone())
        mean: Tensor = total / self._config.parallel_config.tensor_parallel_size
        return mean

    def any_worker(self, flags: Sequence[bool]) -> list[bool]:
        """Return, for each flag, whether it is true on any worker. Every worker calls it."""
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
        """Build the metadata of the attention backends, by the names of layers. Each pass writes
        the builders' buffers anew, once those of the last one have been copied to the device."""
        if self._built is not None:
            self._built.synchronize()
        common = [self._common_metadata(sequences, group) for group in range(len(self.groups))]
        metadata: dict[str, Any] = {}
        for group in self._groups:
            built = group.build_metadata(common[group.kv_cache_group_id])
            metadata |= dict.fromkeys(group.layer_names, built)
        if self._built is not None:
            self._built.record()
        return metadata

    def _slots_by_name(self, sequences: VirtualSequences) -> dict[str, Tensor]:
        """Return the slots of a pass by the names of layers."""
        return {
            name: sequences.slots[group.kv_cache_group_id]
            for group in self._groups
            for name in group.layer_names
        }

    def _common_metadata(self, sequences: VirtualSequences, group: int) -> CommonAttentionMetadata:
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
            block_table_tensor=self._block_table([ids[group] for ids in sequences.block_ids]),
            slot_mapping=sequences.slots[group],
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


def bind_caller() -> BoundModel:
    """Bind the model of the runner that is handing its KV cache to the connector, found among the
    callers: vLLM gives connectors no other access to it.

    Raises KVLinkerError if none of the callers is a runner, and UnsupportedModelError.
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
