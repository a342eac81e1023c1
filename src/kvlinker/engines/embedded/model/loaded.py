"""Describes a model that the engine can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from kvlinker.engines.contract.cost import CostModel, kv_bytes_per_token
from kvlinker.engines.contract.model_files import sampling_defaults
from kvlinker.engines.embedded.model.anatomy import Anatomy, LayerShape, keeping
from kvlinker.engines.embedded.model.recording.capturable import Capturable
from kvlinker.engines.embedded.model.recording.program import Program
from kvlinker.engines.embedded.model.states.kept_states import (
    FIRST_TOKENS,
    chunk_bytes,
    shape_like,
)
from kvlinker.linking.policy import Needs, Policy
from kvlinker.store.chunk_kv import ChunkState, LayerKV, ResidentForm

SEEN_WITHOUT_ATTENTION = Needs(forecast=True, variants=True)
"""The evidence that policies may use in a model without attention. It has no variants."""


@dataclass(frozen=True, slots=True)
class RotatedKeys(ResidentForm):
    """The resident form of chunks: keys rotated for the chunk's own positions 0, 1, …, in layers
    with rotary embedding; latents and the shared key."""

    layers: tuple[LayerShape, ...]
    """The layers that keep keys and values."""

    def resident(self, index: int, layer: LayerKV) -> LayerKV:
        """Return the layer with rotated keys."""
        return self._turned(index, layer, back=False)

    def computed(self, index: int, layer: LayerKV) -> LayerKV:
        """Return the layer without the keys' rotation, up to rounding."""
        return self._turned(index, layer, back=True)

    def _turned(self, index: int, layer: LayerKV, *, back: bool) -> LayerKV:
        shape = self.layers[index]
        turned = layer
        if shape.latents is not None and not back:
            turned = LayerKV.of_joined(layer.joined.clone(), shape.key_dim, layer.index)
        if shape.rotary is None:
            return turned
        cos, sin = shape.rotary.tables(layer.key.shape[1])
        if back:
            square = cos[:1] ** 2  # of the factor by which some models scale what they rotate
            cos, sin = cos / square, -sin / square
        if turned is layer:
            key = torch.empty_like(layer.key, memory_format=torch.contiguous_format)
            turned = replace(layer, key=key)
        device = turned.key.device
        shape.rotary.rotate(layer.key, cos.to(device), sin.to(device), out=turned.key)
        return turned


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model that is ready for the runner: its attention is kvlinker's."""

    model: Any
    tokenizer: Any
    anatomy: Anatomy
    cost: CostModel
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    context_window: int
    eos_token_ids: frozenset[int]
    parameters: int
    """The number of weights, those that are used twice counted once."""

    keeps_inner: bool = True
    """True if layers with a state also keep the inner tokens of chunks one by one."""

    program: Program | Capturable | str = "nobody has asked for it"
    """The program by which native code computes steps, or what graphs of a GPU do so from; or the
    reason why the model's modules compute them."""

    @property
    def computes_steps(self) -> str:
        """Says what computes steps of few tokens."""
        if isinstance(self.program, Capturable):
            return "by graphs of the GPU"
        reason = self.program
        return f"by the model's modules: {reason}" if isinstance(reason, str) else "compiled"

    @cached_property
    def layers(self) -> tuple[LayerShape, ...]:
        """The attentions, in order."""
        return self.anatomy.layers

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """The sampling parameters that the model's authors recommend, by name."""
        return sampling_defaults(self.model.generation_config)

    @cached_property
    def vocabulary(self) -> int:
        """The size of the vocabulary: token ids are 0 to this, exclusive."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @cached_property
    def resident_form(self) -> RotatedKeys:
        """The form in which chunks are attended to."""
        return RotatedKeys(keeping(self.layers))

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """The bytes of one token's KV over all layers."""
        return kv_bytes_per_token(self.layers, self.dtype)

    def kv_bytes(self, tokens: int) -> int:
        """Count the bytes that all layers keep of a chunk of ``tokens`` tokens."""
        states = 0
        if self.anatomy.recurrences:
            states = chunk_bytes(self.anatomy, tokens, self.dtype, keeps_inner=self.keeps_inner)
        return tokens * self.kv_bytes_per_token + states

    def are_states_of(self, tokens: int, states: Sequence[ChunkState]) -> bool:
        """Return whether ``states`` have the shape of what layers with a state keep of a chunk of
        ``tokens`` tokens."""
        if not self.anatomy.recurrences:
            return not states
        return shape_like(states, self.anatomy, tokens, keeps_inner=self.keeps_inner)

    @cached_property
    def state_bytes(self) -> int:
        """The bytes of one sequence's state, in layers that keep one."""
        return sum(each.state_bytes(self.dtype) for each in self.anatomy.recurrences)

    def unsupported(self, policy: Policy) -> str | None:
        """Return why the policy cannot be followed, and the way out; None if it can."""
        if not self.anatomy.recurrences:
            return None
        if policy.needs.places:
            return (
                f"The policy {policy.name} averages KV over several texts, which the states of this"
                " model's layers do not allow. Use query-5, legolink-16 or full."
            )
        if not self.layers and (missing := policy.needs.beyond(SEEN_WITHOUT_ATTENTION)):
            return (
                f"The policy {policy.name} needs {' and '.join(missing)}, but this model has no"
                " attention: all of its layers keep a state. Use full, naive, prefix, legolink,"
                " attnlink or random."
            )
        if policy.needs.refines and self.anatomy.mingles:
            return (
                f"The policy {policy.name} drops tokens between layers, which is not supported for"
                " models with attention and a state in the same layer. Use a policy that decides"
                " before the first layer, such as query-5 or legolink-16."
            )
        most = FIRST_TOKENS - self.anatomy.window
        if self.keeps_inner or (
            policy.reach is not None and (self.anatomy.only_convolves or policy.reach <= most)
        ):
            return None
        if self.anatomy.only_convolves:
            return (
                f"The policy {policy.name} may compute any token of a chunk again, but state_inputs"
                " is off: convolving layers keep only their inputs at a chunk's end. Use full,"
                " naive, prefix, or legolink; or turn state_inputs on, and create the context"
                " caches anew."
            )
        return (
            f"The policy {policy.name} may compute any token of a chunk again, but state_inputs is"
            " off: of all tokens but the first, layers with a state keep only what they do"
            f" together. Use full, naive, prefix, or legolink with up to {most} tokens; or turn"
            " state_inputs on, and create the context caches anew."
        )
