"""A reference as a straight-line program: its operators, recorded while it runs once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from .expressions import ATOM, Expression, expression_of

__all__ = ["NotReplayable", "Program", "Slot", "Step", "draws", "parameter_names", "record", "wider"]

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}

# Operators that hand their operands' values on: nothing is computed, so nothing is rounded.
_EXACT = {
    *("abs", "alias", "as_strided", "cat", "clamp", "clamp_max", "clamp_min", "clone", "constant_pad_nd", "contiguous"),
    *("copy", "detach", "flip", "gather", "index", "index_select", "lift_fresh", "masked_fill", "maximum", "minimum"),
    *("neg", "relu", "repeat", "roll", "select_scatter", "slice_scatter", "stack", "where", "_unsafe_view"),
}

# Operators that sum inside and yet return their operand's shape or a matrix product.
_SUMMING = {
    *("_fused_rms_norm", "_softmax", "_log_softmax", "addmm", "baddbmm", "bmm", "convolution", "cumsum", "mm"),
    *("native_group_norm", "native_layer_norm", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
}


_LONGEST = 200
"""Operators of a chain that is still worth replaying: each may be the one that rounds otherwise."""
_UNREADABLE = 1000
"""Characters of an expression that nobody reads to its end."""


class NotReplayable(Exception):
    """The reference does something that a straight-line program cannot repeat."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a call's arguments that a value of the program takes."""

    number: int


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of the program."""

    op: Any
    """The ATen overload."""
    args: tuple[Any, ...]
    """Its positional arguments, with slots for tensors."""
    kwargs: dict[str, Any]
    """Its keyword arguments, likewise."""
    inputs: tuple[int, ...]
    """The values it reads."""
    outputs: tuple[int, ...]
    """The values it makes."""
    expression: str
    """Its result in terms of the reference's parameters."""
    rounds: bool
    """Whether its result is rounded to a dtype that has a wider one."""
    sums: bool
    """Whether it sums over elements, so that its result depends on an order."""
    dtype: torch.dtype
    """The dtype of its first result."""

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload."""
        return str(self.op.overloadpacket.__name__)


@dataclass(slots=True)
class Program:
    """A recorded reference."""

    values: list[Tensor] = field(default_factory=list)
    """Every tensor that was seen, with the value it had when it was made."""
    expressions: list[Expression] = field(default_factory=list)
    """Each of them in terms of the reference's parameters."""
    steps: list[Step] = field(default_factory=list)
    """The operators in order."""
    output: int = -1
    """The value that the reference returned."""

    def consumers(self, position: int) -> list[Step]:
        """The steps that use a step's result, looking through those that only hand it on."""
        found: list[Step] = []
        carried = set(self.steps[position].outputs)
        for step in self.steps[position + 1 :]:
            if carried & set(step.inputs):
                if step.rounds or step.sums:
                    found.append(step)
                else:
                    carried |= set(step.outputs)
        return found


def wider(dtype: torch.dtype) -> torch.dtype:
    """The type in which a result is exact, or nearly, before it is rounded to ``dtype``; float64 has none and stays."""
    return _WIDER.get(dtype, dtype)


def parameter_names(reference: Callable[..., Any], number: int) -> list[str]:
    """The reference's own names for its first ``number`` positional arguments."""
    forward = reference.forward if isinstance(reference, torch.nn.Module) else reference
    names: list[str] = []
    try:
        for parameter in inspect.signature(forward).parameters.values():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                names += [f"{parameter.name}[{i}]" for i in range(number - len(names))]
            elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                names.append(parameter.name)
    except (TypeError, ValueError):
        names = []
    names += [f"args[{i}]" for i in range(len(names), number)]
    return names[:number]


class _Recorder(TorchDispatchMode):
    def __init__(self, program: Program, captured: Mapping[int, str], numbers: Mapping[float, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = program
        self.known: dict[int, int] = {}
        self.captured = captured
        self.numbers = numbers
        self.given: set[int] = set()

    def new(self, tensor: Tensor, expression: Expression) -> int:
        number = len(self.program.values)
        self.program.values.append(tensor)
        self.program.expressions.append(expression)
        self.known[id(tensor)] = number
        return number

    def give(self, tensor: Tensor, name: str) -> None:
        self.given.add(self.new(tensor, Expression(name, ATOM)))

    def slot(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        number = self.known.get(id(value))
        if number is None:
            self.give(value, self.captured.get(id(value), "a captured tensor"))
            number = self.known[id(value)]
        return Slot(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            # A replay would draw other numbers, and take the next ones away from whoever else draws.
            raise NotReplayable(f"{func} draws random numbers")
        slotted_args, slotted_kwargs = tree_map(self.slot, tuple(args)), tree_map(self.slot, dict(kwargs))
        op = func
        if func._schema.is_mutable:
            op = self._functional(func, slotted_args)
        result = func(*args, **kwargs)
        self._append(op, slotted_args, slotted_kwargs, result)
        return result

    def _functional(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The operator that returns what an in-place one would write; its target's old value is kept aside."""
        name = func.overloadpacket.__name__
        if not name.endswith("_") or not args or not isinstance(args[0], Slot):
            raise NotReplayable(f"{name} writes to an argument")
        target = args[0].number
        tensor = self.program.values[target]
        memory = tensor.untyped_storage().data_ptr()
        shared = sum(other.untyped_storage().data_ptr() == memory for other in self.program.values)
        if target in self.given or shared > 1:
            raise NotReplayable(f"{name} writes to memory that another tensor shares")
        packet = getattr(torch.ops.aten, name[:-1], None)
        if packet is None or func._overloadname not in packet.overloads():
            raise NotReplayable(f"{name} has no functional form")
        self.program.values[target] = tensor.clone()
        return getattr(packet, func._overloadname)

    def _append(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        results = [r for r in tree_flatten(result)[0] if isinstance(r, Tensor)]
        inputs = tuple(s.number for s in tree_flatten((args, kwargs))[0] if isinstance(s, Slot))
        if not results:
            raise NotReplayable(f"{op} returns no tensor, so that its value may steer the reference")
        if len(self.program.steps) == _LONGEST:
            raise NotReplayable(f"the reference has more than {_LONGEST} operators")
        name = op.overloadpacket.__name__
        sources = [self.program.values[number] for number in inputs]
        expression = expression_of(name, tree_map(self._expressed, args), kwargs, self.numbers)
        if len(expression.text) > _UNREADABLE:
            # A value that is used twice doubles the text each time.
            expression = Expression("…", ATOM)
        first = results[0]
        exact = _hands_on(op, name, sources, first)
        many = len(results) > 1 and isinstance(result, (tuple, list)) and name not in _SUMMING
        outputs = tuple(
            self.new(r, Expression(f"{expression.in_brackets()}[{i}]", ATOM) if many else expression)
            for i, r in enumerate(results)
        )
        self.program.steps.append(
            Step(
                op=op,
                args=args,
                kwargs=kwargs,
                inputs=inputs,
                outputs=outputs,
                # A conversion has no name of its own: what is rounded is what it converts.
                expression=(self.program.expressions[inputs[0]] if name == "_to_copy" else expression).text,
                rounds=bool(sources) and not exact and first.dtype in _WIDER,
                sums=name in _SUMMING or (not exact and _reduces(sources, first)),
                dtype=first.dtype,
            )
        )

    def _expressed(self, value: Any) -> Any:
        return self.program.expressions[value.number] if isinstance(value, Slot) else value


def _hands_on(op: Any, name: str, sources: Sequence[Tensor], first: Tensor) -> bool:
    """Whether an operator computes nothing: its result's elements are its operands' own."""
    if name == "_to_copy":
        return not any(s.is_floating_point() and s.dtype.itemsize > first.dtype.itemsize for s in sources)
    return name in _EXACT or op.is_view


def _reduces(sources: Sequence[Tensor], first: Tensor) -> bool:
    return bool(sources) and first.numel() < max(source.numel() for source in sources)


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator, as a dispatch mode sees it, is about to draw from a default random generator."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given |= {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
    given |= kwargs
    if any(given.get(name) == 0 for name in ("dropout_p", "dropout")) or given.get("train") is False:
        # Attention and dropout have the tag whether they drop anything or not.
        return False
    generator = given.get("generator")
    return generator is None or any(generator is one for one in (torch.default_generator, *_device_generators()))


def _device_generators() -> Sequence[torch.Generator]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()


def record(reference: Callable[..., Any], args: Sequence[Any], numbers: Mapping[float, str] | None = None) -> Program:
    """Run a reference once and keep its operators.

    Parameters
    ----------
    reference, args
        The eager chain and its positional arguments.
    numbers
        Names to write in place of numbers, such as ``{1e-6: "eps"}``.

    Raises
    ------
    NotReplayable
        If it writes to its arguments, draws random numbers, reads a value back, or returns anything but a tensor made
        on the way.
    """
    captured: dict[int, str] = {}
    if isinstance(reference, torch.nn.Module):
        captured = {id(p): name for name, p in (*reference.named_parameters(), *reference.named_buffers())}
    program = Program()
    recorder = _Recorder(program, captured, numbers or {})
    plain = [a.detach() if isinstance(a, Tensor) else a for a in args]
    for name, value in zip(parameter_names(reference, len(plain)), plain, strict=True):
        if isinstance(value, Tensor):
            recorder.give(value, name)
    with torch.no_grad(), recorder:
        result = reference(*plain)
    if not isinstance(result, Tensor) or id(result) not in recorder.known:
        raise NotReplayable("the reference returns no tensor that it made")
    program.output = recorder.known[id(result)]
    return program
