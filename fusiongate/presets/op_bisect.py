"""Where two runs of the same preset part: the first operator whose result differs, and the module that called it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from .registry import Preset, Run, Size
from .running import steps_of

__all__ = ["OpRecord", "Parting", "fingerprint", "parting", "trace"]


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One operator that ran."""

    step: str
    """The step that it belongs to: the one that was yielded next."""
    module: str
    """The path of the innermost module that was running, with its class; empty outside of all."""
    op: str
    """The operator: ``aten.index_add_.default``."""
    fingerprint: int
    """A number for the bits of its results."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first operator that gave something else in a second run."""

    step: str
    """The step in which it ran."""
    module: str
    """The module that called it."""
    op: str
    """The operator."""
    position: int
    """Its number in the run, from one."""
    total: int
    """Operators in the run."""

    def __str__(self) -> str:
        inside = f"in {self.module}" if self.module else "outside of any module"
        return f"step {self.step!r}, {inside}, {self.op} (operator {self.position} of {self.total})"


def parting(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> Parting | None:
    """The first operator at which two runs part; ``None`` where they never do.

    What ran before it gave the same bits in both, so that it was given the same.
    """
    for position, (one, other) in enumerate(zip(first, second, strict=False), start=1):
        if one != other:
            return Parting(other.step, other.module, other.op, position, len(second))
    if len(first) != len(second):
        longer = max(first, second, key=len)
        cut = longer[min(len(first), len(second))]
        return Parting(cut.step, cut.module, cut.op, min(len(first), len(second)) + 1, len(longer))
    return None


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """A number for the bits of some tensors: sums of integers, which come out the same in any order."""
    total = 0
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        words = dense.view(-1).view(torch.uint8).to(torch.int64)
        # Positions weigh differently, so that swapped elements are seen.
        weights = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device) * 0x9E3779B1
        total = (total * 31 + int(((words + 1) * (weights | 1)).sum())) % (1 << 63)
    return total


class _Recorder(TorchDispatchMode):
    fusiongate_transparent = True
    """Gates take no notice of this mode: it watches, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, str, int]] = []
        self.modules: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        # Fresh memory holds whatever was there before, and views compute nothing.
        if tensors and not func.is_view and "empty" not in func.overloadpacket.__name__:
            name = f"{func.namespace}.{func.overloadpacket.__name__}.{func._overloadname}"
            self.ops.append((self.modules[-1] if self.modules else "", name, fingerprint(tensors)))
        return result


def trace(preset: Preset, *, size: Size = "tiny", seed: int = 0, device: torch.device) -> list[OpRecord]:
    """Run the reference's arm and record every operator.

    Parameters
    ----------
    preset, size, seed, device
        As for :func:`fusiongate.presets.run_preset`.
    """
    recorder = _Recorder()
    hooks: list[Any] = []

    def watch(name: str, model: nn.Module) -> None:
        hooks.extend(_watch(model, name, recorder.modules))

    run = Run(size=size, seed=seed, device=device, arm="reference", on_model=watch)
    records: list[OpRecord] = []
    generator = steps_of(preset, run)
    try:
        while True:
            recorder.ops.clear()
            with recorder:
                step = next(generator, None)
            if step is None:
                return records
            records += [OpRecord(step[0], *op) for op in recorder.ops]
    finally:
        for hook in hooks:
            hook.remove()


def _watch(model: nn.Module, name: str, running: list[str]) -> list[Any]:
    hooks = []
    for path, module in model.named_modules(prefix=name):
        label = f"{path} ({type(module).__name__})"
        hooks.append(module.register_forward_pre_hook(lambda *_, label=label: running.append(label)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
    return hooks
