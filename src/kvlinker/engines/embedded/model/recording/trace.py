"""Records the computations of one forward pass of a model: operation by operation, with memory
layouts.

Operations are PyTorch's own, but for modules that native code computes whole, and attention. Views
are no operations: two tensors over the same memory are the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.contract.rotary_forms import RotaryForm
from kvlinker.engines.embedded.model.indexers import IndexerCall
from kvlinker.engines.embedded.model.interception import intercepted
from kvlinker.engines.embedded.model.norms import NativeNorm
from kvlinker.engines.embedded.model.states.recurrence import ConvolutionCall
from kvlinker.engines.embedded.model.states.rules import RuleCall
from kvlinker.engines.embedded.model.weights.experts import PackedExperts
from kvlinker.engines.embedded.model.weights.linears import MatrixLinear, SharedLinear
from kvlinker.engines.embedded.model.weights.tied_embedding import TiedEmbedding

LINEAR, NORM, EXPERTS, ATTENTION, INPUT = "linear", "norm", "experts", "attention", "input"
EMBEDDING = "embedding"
"""The names of operations that are not PyTorch's."""

NONZERO = "aten.nonzero.default"
"""The operation whose result has another shape for other numbers."""


class UnrecordableError(Exception):
    """A model's pass cannot be a list of operations; the message says why, as the end of a
    sentence."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A tensor of the recorded pass."""

    tensor: Tensor

    @property
    def memory(self) -> int:
        """A name of the memory that it lies in, as long as the trace is held."""
        return self.tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class Node:
    """An operation of the recorded pass."""

    name: str
    arguments: Mapping[str, Any]
    """What it was called with, defaults included; its tensors are ``Numbers``."""

    output: Numbers
    """What it computed, from the beginning of its memory on."""

    module: nn.Module | None = None
    """The module that computed it."""

    options: AttentionOptions | None = None
    """The variant of attention."""

    @property
    def inputs(self) -> list[Numbers]:
        """The tensors that it was called with."""
        return [each for each in tree_leaves(dict(self.arguments)) if isinstance(each, Numbers)]


@dataclass(frozen=True, slots=True)
class Trace:
    """The operations of one pass that matter to its result."""

    nodes: tuple[Node, ...]
    logits: Numbers
    tokens: int
    wanted: int
    """The number of tokens whose logits were computed: the last ones, backwards."""


@torch.inference_mode()
def trace_pass(model: Any, tokens: int, wanted: int) -> Trace:
    """Record a pass of so many tokens, of which so many logits are wanted.

    Raises UnrecordableError.
    """
    device = model.device
    ids = torch.arange(tokens, device=device)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(3, 3 + tokens, device=device)[None]
    rows = torch.arange(tokens - 1, tokens - 1 - wanted, -1, device=device)
    recorder = _Recorder({"ids": ids, "positions": positions, "rows": rows})
    with _leaves(model, recorder), intercepted(recorder), recorder:
        output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
    logits = Numbers(output.logits)
    return Trace(recorder.needed(logits), logits, tokens, wanted)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down each operation whose result depends on the pass's inputs."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nodes: list[Node] = []
        self._makers: dict[int, list[int]] = {}  # the nodes that wrote to a memory
        self._of_hidden: set[int] = set()  # memories that depend on the tokens' contents
        self._held: list[Any] = []  # so that no memory is used again
        self._inside = 0
        for name, tensor in inputs.items():
            self._add(Node(INPUT, {"name": name}, Numbers(tensor)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        self._held.append((given, made))
        known = [each for each in given if _memory(each) in self._makers]
        if self._inside or not known:
            return output
        name = str(func)
        of_hidden = any(_memory(each) in self._of_hidden for each in known)
        if of_hidden and (not made or name == NONZERO):
            raise UnrecordableError("what it computes depends on numbers that it has computed")
        new = [each for each in made if _memory(each) not in self._makers]
        if func._schema.is_mutable:
            if not made:
                raise UnrecordableError(f"no native code computes {name}")
            new = made
        if new:
            self._add(Node(name, _arguments(func, args, kwargs), Numbers(new[0])), new)
        return output

    def rotary(self, form: RotaryForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Do nothing: attention rotates."""

    def attend(
        self,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        if self._inside:
            raise UnrecordableError("experts are not in a module of their own")
        self._inside += 1
        try:
            output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]).normal_()
        finally:
            self._inside -= 1
        given = {"query": Numbers(query), "key": Numbers(key), "value": Numbers(value)}
        variant = AttentionOptions.of_call(query, options)
        self._add(Node(ATTENTION, given, Numbers(output), options=variant))
        return output

    def index(self, call: IndexerCall) -> Tensor:
        raise UnrecordableError("indexers pick the tokens that are seen")

    def convolve(self, call: ConvolutionCall) -> Tensor:
        raise UnrecordableError("layers keep a state")

    def recur(self, call: RuleCall) -> tuple[Tensor, Tensor | None]:
        raise UnrecordableError("layers keep a state")

    def enter(self) -> None:
        """Take down nothing until ``leave``: a module computes that is one operation."""
        self._inside += 1

    def leave(self, name: str, module: nn.Module, given: Tensor, output: Tensor) -> None:
        """Take down what the module has computed."""
        self._inside -= 1
        if self._inside or _memory(output) in self._makers or _memory(given) not in self._makers:
            return
        if isinstance(module, SharedLinear):  # its output is a part of what all of them compute
            shape = (*output.shape[:-1], module.shared.outputs)
            output = output.as_strided(shape, _strides_of(shape), 0)
        self._add(Node(name, {"input": Numbers(given)}, Numbers(output), module))

    def needed(self, logits: Numbers) -> tuple[Node, ...]:
        """Return the operations that the logits depend on, and all attentions, in order."""
        wanted: set[int] = set()
        memories = [logits.memory]
        memories += [node.output.memory for node in self._nodes if node.name == ATTENTION]
        while memories:
            for index in self._makers.get(memories.pop(), ()):
                if index not in wanted:
                    wanted.add(index)
                    memories += [each.memory for each in self._nodes[index].inputs]
        return tuple(self._nodes[index] for index in sorted(wanted))

    def _add(self, node: Node, outputs: Sequence[Tensor] = ()) -> None:
        hidden = node.name in (ATTENTION, LINEAR) or any(
            each.memory in self._of_hidden for each in node.inputs
        )
        for memory in {_memory(each) for each in (node.output.tensor, *outputs)}:
            self._makers.setdefault(memory, []).append(len(self._nodes))
            if hidden:
                self._of_hidden.add(memory)
        self._held.append(node)
        self._nodes.append(node)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name, tensors as ``Numbers``."""
    found: dict[str, Any] = {}
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            found[argument.name] = args[index]
        else:
            found[argument.name] = kwargs.get(argument.name, argument.default_value)
    return {
        name: tree_map(lambda each: Numbers(each) if isinstance(each, Tensor) else each, value)
        for name, value in found.items()
    }


def _strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


@contextmanager
def _leaves(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Let the recorder know when modules compute that are one operation each."""

    def name_of(module: nn.Module) -> str | None:
        if isinstance(module.__dict__.get("forward"), NativeNorm):
            return NORM
        if isinstance(module, MatrixLinear | SharedLinear) or type(module) is nn.Linear:
            return LINEAR
        if any(isinstance(child, PackedExperts) for child in module.children()):
            return EXPERTS  # with their router
        if isinstance(module, TiedEmbedding):
            return EMBEDDING
        return None

    def enter(module: nn.Module, args: Any) -> None:
        recorder.enter()

    handles = []
    for module in model.modules():
        name = name_of(module)
        if name is None:
            continue

        def leave(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            first = output[0] if isinstance(output, tuple) else output
            recorder.leave(name, module, args[0], first)

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
