"""A fusion as a custom op of torch's, for those that ``torch.compile`` is to call rather than to see through."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusiongate.errors import UsageError

__all__ = ["RegisteredOp"]

_numbers = itertools.count()


class RegisteredOp:
    """One registration.

    Parameters
    ----------
    name
        The fusion's; the op is ``fusiongate::<name>_<number>``, because each gate has an op of its own.
    reference
        Gives the schema by its annotations, and the result's metadata, which therefore depend on no verdict.
    call
        The gated call, which runs where the op runs.
    """

    def __init__(self, name: str, reference: Callable[..., Tensor], call: Callable[..., Tensor]) -> None:
        try:
            schema = torch.library.infer_schema(reference, mutates_args=())
        except ValueError as error:
            raise UsageError(
                f"Fusion({name!r}, compile='op'): the reference {inspect.signature(reference)} gives no schema: "
                f"annotate its parameters (Tensor, Tensor | None, float, int, bool) and its result ({error})"
            ) from error
        identifier = re.sub(r"\W", "_", name)
        self.op: Any = torch.library.custom_op(
            f"fusiongate::{identifier}_{next(_numbers)}", call, mutates_args=(), schema=schema
        )
        # Fake tensors through the reference: the metadata are the reference's, and no rule of ours can drift from them.
        self.op.register_fake(reference)

    def traced(self, *args: Any, **named: Any) -> Tensor:
        """The op's call, as a tracer records it."""
        result: Tensor = self.op(*args, **named)
        return result
