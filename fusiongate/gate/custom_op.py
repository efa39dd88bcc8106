"""A fusion as a custom op of torch's, for those that ``torch.compile`` is to call rather than to see through."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from fusiongate.errors import UsageError

from .spec import FusionSpec, returned

__all__ = ["RegisteredOp"]

_numbers = itertools.count()


class RegisteredOp:
    """One registration, as ``fusiongate::<name>_<number>``, because each gate has an op of its own.

    Parameters
    ----------
    spec
        Its reference gives the schema by its annotations, and the result's metadata, which therefore depend on no
        verdict.
    call
        The gated call, which runs where the op runs.
    """

    def __init__(self, spec: FusionSpec[..., Any], call: Callable[..., Any]) -> None:
        self._spec = spec
        try:
            schema = torch.library.infer_schema(spec.reference, mutates_args=spec.mutates_args)
        except ValueError as error:
            raise UsageError(
                f"Fusion({spec.name!r}, compile='op'): the reference {inspect.signature(spec.reference)} gives no "
                f"schema: annotate its parameters (Tensor, Tensor | None, float, int, bool) and its result (Tensor, "
                f"tuple[Tensor, Tensor] or None) ({error})"
            ) from error
        self.op: Any = torch.library.custom_op(
            f"fusiongate::{re.sub(r'[^0-9A-Za-z_]', '_', spec.name)}_{next(_numbers)}",
            call,
            mutates_args=spec.mutates_args,
            schema=schema,
        )
        # Fake tensors through the reference: the metadata are the reference's, and no rule of ours can drift from them.
        self.op.register_fake(self._fake)
        self._may_need_gradients = any(_held(spec.reference))

    def loses_gradients(self, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether the op would lose a gradient that the reference has: an argument's, or of what it holds."""
        if not torch.is_grad_enabled():
            return False
        needed = (isinstance(arg, Tensor) and arg.requires_grad for arg in (*args, *named.values()))
        return self._may_need_gradients or any(needed)

    def traced(self, *args: Any, **named: Any) -> Any:
        """The op's call, as a tracer records it."""
        return self.op(*args, **named)

    def _fake(self, *args: Any, **named: Any) -> Any:
        result = self._spec.reference(*args, **named)
        memory = {arg.untyped_storage()._cdata for arg in (*args, *named.values()) if isinstance(arg, Tensor)}
        if any(isinstance(one, Tensor) and one.untyped_storage()._cdata in memory for one in returned(result)):
            raise UsageError(
                f"Fusion({self._spec.name!r}, compile='op'): the reference returns an argument, or a view of one, and "
                f"no custom op of torch's may: let it return what is new, or None; whoever calls it has the argument"
            )
        return result


def _held(function: Any) -> Iterator[bool]:
    """For each value that a function plainly holds, whether it may need a gradient."""
    values: list[Any] = [function]
    if isinstance(function, functools.partial):
        yield from _held(function.func)
        values = [*function.args, *function.keywords.values()]
    elif inspect.ismethod(function):
        values = [function.__self__]
    elif inspect.isfunction(function):
        cells = function.__closure__ or ()
        values = [function.__globals__.get(name) for name in function.__code__.co_names]
        # A variable that is not bound yet has an empty cell.
        values += [cell.cell_contents for cell in cells if cell != CellType()]
    yield from (isinstance(value, Tensor | nn.Module) for value in values)
