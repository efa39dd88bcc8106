"""What a call gives back, and whether it left its inputs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusiongate.comparison.bits import normalised_strides
from fusiongate.comparison.verdicts import bits_differ
from fusiongate.gate.signatures import tensors_of

from .sizes import HUGE_ELEMENTS

__all__ = ["Watched", "metadata_of", "results_of", "shares_memory"]


@dataclass(frozen=True, slots=True)
class Watched:
    """An input and what it held."""

    tensor: torch.Tensor
    """The input."""
    before: torch.Tensor | None
    """A copy of it; None where it is huge."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Watched:
        """An input as it is now."""
        # A copy of a huge operand could be what no longer fits.
        return cls(tensor, tensor.detach().clone() if tensor.numel() < HUGE_ELEMENTS else None)

    def changed(self) -> bool:
        """Whether it holds something else."""
        if self.before is None:
            return False
        now = self.tensor.detach().clone()
        return bool(bits_differ(now, self.before))


def results_of(result: Any) -> tuple[torch.Tensor, ...]:
    """A call's results as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def metadata_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor but its values."""
    strides = normalised_strides(tensor.shape, tensor.stride())
    return type(tensor).__name__, tensor.dtype, tuple(tensor.shape), strides, tensor.device.type


def shares_memory(result: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a result lies in the storage of one of the arguments."""
    memory = result.untyped_storage().data_ptr()
    return bool(result.numel()) and any(memory == tensor.untyped_storage().data_ptr() for tensor in tensors_of(args))
