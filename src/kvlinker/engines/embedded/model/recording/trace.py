"""Records the computations of one forward pass of a model: operation by operation, with memory
layouts.

Operations are PyTorch's own, attention, and modules that native code computes or calls whole. Views
are no operations: two tensors over the same memory are the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.interception import Interceptor, intercepted
from kvlinker.engines.embedded.model.norms import NativeNorm
from kvlinker.engines.embedded.model.states.recurrence import ConvolutionCall
from kvlinker.engines.embedded.model.states.rules import RuleCall
from kvlinker.engines.embedded.model.weights.coded import CodedWeight
from kvlinker.engines.embedded.model.weights.experts import PackedExperts
from kvlinker.engines.embedded.model.weights.linears import MatrixLinear, SharedLinear
from kvlinker.engines.embedded.model.weights.tied_embedding import TiedEmbedding

LINEAR, NORM, EMBEDDING = "linear", "norm", "embedding"
EXPERTS, CALLED, FURTHER = "experts", "called module", "a second result of a module"
ATTENTION, INPUT = "attention", "input"
"""The names of operations that are not PyTorch's."""

OF_CONTENTS = ATTENTION, LINEAR, CALLED, EMBEDDING, "aten.embedding.default"
"""Operations whose results depend on the tokens' contents, not on their positions alone."""

NONZERO = "aten.nonzero.default"
"""The operation whose result has another shape for other numbers."""


class UnrecordableError(Exception):
    """A model's pass cannot be a list of operations; the message says why, as the end of a
    sentence."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operation of the recorded pass."""

    name: str
    arguments: Mapping[str, Any]
    """The arguments of the call, defaults included."""

    output: Tensor
    """The output, from the beginning of its memory on."""

    module: nn.Module | None = None
    """The module that computed it."""

    compute: Callable[[Tensor], Any] | None = None
    """Computes the same by the module for other inputs, where Python calls it."""

    options: AttentionOptions | None = None
    """The variant of attention."""

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that it was called with, of those that have memory of their own."""
        return _with_memory(dict(self.arguments))


@dataclass(frozen=True, slots=True)
class Trace:
    """The operations of one pass that matter to its result."""

    nodes: tuple[Node, ...]
    logits: Tensor
    tokens: int
    wanted: int
    """The number of tokens whose logits were computed: the last ones, backwards."""


@torch.inference_mode()
def trace_pass(model: Any, anatomy: Anatomy, tokens: int, wanted: int) -> Trace:
    """Record a pass of ``tokens`` tokens with ``wanted`` logits. Modules that native code calls
    whole are one operation each.

    Raises UnrecordableError.
    """
    device = model.device
    ids = torch.arange(tokens, device=device)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(3, 3 + tokens, device=device)[None]
    rows = torch.arange(tokens - 1, tokens - 1 - wanted, -1, device=device)
    recorder = _Recorder({"ids": ids, "positions": positions, "rows": rows}, anatomy)
    with _leaves(model, recorder, anatomy.called), intercepted(recorder), recorder:
        output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
    return Trace(recorder.needed(output.logits), output.logits, tokens, wanted)


class _Recorder(TorchDispatchMode, Interceptor):  # type: ignore[no-untyped-call]
    """Takes down each operation whose result depends on the pass's inputs."""

    def __init__(self, inputs: Mapping[str, Tensor], anatomy: Anatomy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nodes: list[Node] = []
        self._makers: dict[int, list[int]] = {}  # the nodes that wrote to a memory
        self._of_hidden: set[int] = set()  # memories that depend on the tokens' contents
        self._held: list[Any] = []  # so that no memory is used again
        self._inside = 0
        self._layers = iter(anatomy.layers)
        for name, tensor in inputs.items():
            self._add(Node(INPUT, {"name": name}, tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given, made = _with_memory((args, kwargs)), _with_memory(output)
        self._held.append((given, made))
        known = [each for each in given if memory_of(each) in self._makers]
        if self._inside or not known:
            return output
        name = str(func)
        of_hidden = any(memory_of(each) in self._of_hidden for each in known)
        if of_hidden and (not made or name == NONZERO):
            raise UnrecordableError("what it computes depends on numbers that it has computed")
        new = [each for each in made if memory_of(each) not in self._makers]
        if func._schema.is_mutable:
            if not made:
                raise UnrecordableError(f"no native code computes {name}")
            new = made
        if new:
            self._add(Node(name, _arguments(func, args, kwargs), new[0]), new)
        return output

    def attend(
        self,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        latents = next(self._layers).latents
        if bool(self._inside) != (latents is not None):
            raise UnrecordableError("it attends inside modules that are called whole")
        width = value.shape[3] if latents is None else latents.value_dim
        self._inside += 1
        try:
            output = query.new_empty(1, query.shape[2], query.shape[1], width).normal_()
        finally:
            self._inside -= 1
        if self._inside:
            return output
        given = {"query": query, "key": key, "value": value}
        variant = AttentionOptions.of_call(query, options)
        self._add(Node(ATTENTION, given, output, options=variant))
        return output

    def convolve(self, call: ConvolutionCall) -> Tensor:
        self._require_inside()
        channels, width = call.weight.shape
        return call.apply(call.hidden.new_zeros(1, channels, width - 1), call.hidden)

    def recur(self, call: RuleCall) -> tuple[Tensor, Tensor | None]:
        self._require_inside()
        output, state = call.scan(call.mixed, call.gates, None)
        return output, state if call.wants_state else None

    def _require_inside(self) -> None:
        if not self._inside:
            raise UnrecordableError("layers keep a state outside modules of their own")

    def enter(self, module: nn.Module, args: Any) -> None:
        """Take down nothing until ``leave``: a module computes that is one operation."""
        self._inside += 1

    def leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Take down what the module has computed, of what it was called with."""
        self._inside -= 1
        if self._inside:
            return
        if name == CALLED:
            self._leave_called(module, dict(enumerate(args)) | kwargs, output)
            return
        inputs, output = args[0], output[0] if isinstance(output, tuple) else output
        if memory_of(output) in self._makers or memory_of(inputs) not in self._makers:
            return
        if isinstance(module, SharedLinear):  # its output is a part of what all of them compute
            shape = (*output.shape[:-1], module.shared.outputs)
            output = output.as_strided(shape, _strides_of(shape), 0)
        self._add(Node(name, {"input": inputs}, output, module, module))

    def _leave_called(self, module: nn.Module, given: Mapping[Any, Any], output: Any) -> None:
        """Take down a module that is called whole: of one tensor that the pass has computed of the
        tokens' contents, it makes another. It is ``given`` arguments by number and by name; those
        that depend on positions alone stay as they are, for what rotates is not the model."""
        first, *further = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        names = [
            name
            for name, value in given.items()
            if any(
                isinstance(each, Tensor) and memory_of(each) in self._of_hidden
                for each in tree_leaves(value)
            )
        ]
        if len(names) != 1 or not isinstance(given[names[0]], Tensor):
            raise UnrecordableError("modules that are called whole take several tensors")
        if memory_of(first) in self._makers:
            raise UnrecordableError("modules that are called whole change what they are given")
        (name,) = names
        inputs = {"input": given[name]}
        others = {each: value for each, value in given.items() if each != name}

        def compute(hidden: Tensor) -> Any:
            every = {**others, name: hidden}
            positional = (every.pop(index) for index in range(len(every)) if index in every)
            return module(*list(positional), **every)

        self._add(Node(CALLED, inputs, first, module, compute))
        for tensor in further:
            if memory_of(tensor) not in self._makers:
                self._add(Node(FURTHER, inputs, tensor))

    def needed(self, logits: Tensor) -> tuple[Node, ...]:
        """Return the operations that the logits depend on, and all attentions, in order."""
        wanted: set[int] = set()
        memories = [memory_of(logits)]
        memories += [memory_of(node.output) for node in self._nodes if node.name == ATTENTION]
        while memories:
            for index in self._makers.get(memories.pop(), ()):
                if index not in wanted:
                    wanted.add(index)
                    memories += [memory_of(each) for each in self._nodes[index].inputs]
        return tuple(self._nodes[index] for index in sorted(wanted))

    def _add(self, node: Node, outputs: Sequence[Tensor] = ()) -> None:
        hidden = node.name in OF_CONTENTS or any(
            memory_of(each) in self._of_hidden for each in node.inputs
        )
        for memory in {memory_of(each) for each in (node.output, *outputs)}:
            self._makers.setdefault(memory, []).append(len(self._nodes))
            if hidden:
                self._of_hidden.add(memory)
        self._held.append(node)
        self._nodes.append(node)


def _with_memory(values: Any) -> list[Tensor]:
    """Return the tensors among the values, without weights that oneDNN has packed, whose memory is
    its own, and those in codes, which have none."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    return [
        each
        for each in tensors
        if each.layout == torch.strided and not isinstance(each, CodedWeight)
    ]


def memory_of(tensor: Tensor) -> int:
    """Return a name of the memory that a tensor lies in, as long as the trace is held."""
    return tensor.untyped_storage().data_ptr()


def _arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    found: dict[str, Any] = {}
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            found[argument.name] = args[index]
        else:
            found[argument.name] = kwargs.get(argument.name, argument.default_value)
    return found


def _strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


@contextmanager
def _leaves(model: nn.Module, recorder: _Recorder, called: Collection[nn.Module]) -> Iterator[None]:
    """Let the recorder know when modules compute that are one operation each."""

    def name_of(module: nn.Module) -> str | None:
        if module in called:
            return CALLED
        if isinstance(module.__dict__.get("forward"), NativeNorm):
            return NORM
        if isinstance(module, MatrixLinear | SharedLinear) or type(module) is nn.Linear:
            return LINEAR
        if any(isinstance(child, PackedExperts) for child in module.children()):
            return EXPERTS  # with their router
        if isinstance(module, TiedEmbedding):
            return EMBEDDING
        return None

    with ExitStack() as hooks:
        for module in model.modules():
            name = name_of(module)
            if name is not None:
                leave = partial(recorder.leave, name)
                hooks.enter_context(module.register_forward_pre_hook(recorder.enter))
                hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        yield
