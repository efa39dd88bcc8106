"""Devices: where the operands of a cell stand, relative to the device that was selected."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .cells import NotRun, Selected

__all__ = ["DEVICES", "Placement", "check_memory"]

# Reference, kernel, their inputs' copies, and the fp32 intermediates of a chain.
_COPIES = 24

_PATIENCE_S = 60.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the operands stand."""

    name: str
    """The placement as it stands in a cell's id."""
    device: Callable[[Selected], torch.device]
    """Where operands are made. Raises `NotRun` where there is no such device."""
    split: bool = False
    """Whether the first tensor goes to the CPU afterwards."""

    def placed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with the first tensor moved to the CPU if they are split."""
        if not self.split:
            return arguments
        place = next(index for index, argument in enumerate(arguments) if isinstance(argument, torch.Tensor))
        return (*arguments[:place], arguments[place].cpu(), *arguments[place + 1 :])


def _other(selected: Selected) -> torch.device:
    if selected.kind != "cuda":
        raise NotRun("needs a second GPU")
    count = torch.cuda.device_count()
    if count < 2:
        raise NotRun("needs a second GPU")
    assert selected.index is not None
    return torch.device("cuda", (selected.index + 1) % count)


def _mixed(selected: Selected) -> torch.device:
    if selected.kind != "cuda":
        raise NotRun("needs a GPU")
    return selected.torch_device


def check_memory(device: torch.device, elements: int, itemsize: int, *, patience_s: float = _PATIENCE_S) -> None:
    """Wait until a cell of so many elements fits on a GPU, beside the cells of other workers.

    Raises
    ------
    NotRun
        It never would, or it did not in time.
    """
    needed = _COPIES * elements * itemsize // 2
    # What this process keeps for later is as good as free.
    torch.cuda.empty_cache()
    deadline = time.monotonic() + patience_s
    while True:
        free, total = torch.cuda.mem_get_info(device)
        if needed <= free:
            return
        if needed > total or time.monotonic() >= deadline:
            raise NotRun(f"needs {needed / 2**30:.0f} GiB of GPU memory, and {free / 2**30:.0f} are free")
        time.sleep(_LOOK_S)


DEVICES: dict[str, Placement] = {
    placement.name: placement
    for placement in (
        Placement("current", lambda selected: selected.torch_device),
        Placement("cpu", lambda _: torch.device("cpu")),
        Placement("other", _other),
        Placement("split", _mixed, split=True),
    )
}
"""Every placement by name. ``other`` is a second GPU while the selected one is current."""
