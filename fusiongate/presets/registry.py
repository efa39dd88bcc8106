"""Presets: named, seeded, repeatable runs, and what one is given while it runs."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.scanning import RewireReport, rewired

from .rng import fill, normal, uniform

__all__ = ["PRESETS", "Arm", "Preset", "Run", "Size", "Steps", "declared", "lookup", "preset"]

Size = Literal["tiny", "real"]
Arm = Literal["fused", "reference"]
Steps = Iterator[tuple[str, Mapping[str, Tensor]]]
"""What a preset yields: a step's name, and its tensors by name."""

_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(slots=True)
class Run:
    """One arm of a run, as its preset sees it."""

    size: Size
    """``tiny``: seconds on a CPU. ``real``: the widths that are used in earnest, on a GPU."""
    seed: int
    """Another seed gives other inputs and weights."""
    device: torch.device
    """Where to run."""
    arm: Arm
    """``fused``: models are rewired. ``reference``: they are left as they are."""
    ops: tuple[Fusion, ...] = ()
    """The fusions to mount."""
    reports: list[RewireReport] = field(default_factory=list)
    """What was rewired, a report a model."""
    on_model: Callable[[str, nn.Module], None] | None = None
    """Called with each model that is made, before it runs."""
    prepare: Callable[[nn.Module], nn.Module] | None = None
    """Called with each model that is mounted or not, gives what is to run in its place: a compiled one, say."""
    built: dict[str, nn.Module] | None = None
    """Models that are kept from one run to the next, mounts and all, where a run is repeated for its time."""
    exits: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What is undone when the run is over."""

    def normal(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
        """Bell-shaped numbers, see :func:`fusiongate.presets.normal`."""
        return normal(name, shape, seed=self.seed, dtype=dtype, device=self.device, std=std)

    def uniform(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Numbers from 0 up to 1, see :func:`fusiongate.presets.uniform`."""
        return uniform(name, shape, seed=self.seed, dtype=dtype, device=self.device)

    def model(
        self,
        name: str,
        make: Callable[[], _Model],
        dtype: torch.dtype = torch.bfloat16,
        in_fp32: Iterable[str] | None = None,
    ) -> _Model:
        """A model with weights of this run, on its device; rewired in the fused arm.

        Parameters
        ----------
        name
            What its weights are drawn by.
        make
            Constructs it; what it puts into its parameters does not matter.
        dtype
            Of its floating parameters and buffers.
        in_fp32
            Parts of the names of those that stay in fp32, as diffusers' ``_keep_in_fp32_modules`` lists them.
        """
        if self.built is not None and name in self.built:
            return cast("_Model", self.built[name])
        devices = [self.device] if self.device.type == "cuda" else []
        # What a constructor draws is replaced below, unless it is a buffer.
        with torch.random.fork_rng(devices=devices), self.device:
            torch.manual_seed(self.seed)
            model = make()
        model = model.to(self.device).eval().requires_grad_(False)
        kept = tuple(in_fp32 or ())
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and not any(part in path for part in kept):
                tensor.data = tensor.data.to(dtype)
        fill(model, seed=self.seed, name=name)
        if self.on_model is not None:
            self.on_model(name, model)
        if self.arm == "fused":
            self.mount(model)
        if self.prepare is not None:
            model = cast("_Model", self.prepare(model))
        if self.built is not None:
            self.built[name] = model
        return model

    def mount(self, model: nn.Module) -> None:
        """Rewire a model for the rest of the run, for presets that make theirs by other ways than :meth:`model`."""
        self.reports.append(self.exits.enter_context(rewired(model, self.ops)))


@dataclass(frozen=True, slots=True)
class Preset:
    """A named run whose outputs have digests."""

    name: str
    """Lower case words with hyphens; names its snapshot too."""
    steps: Callable[[Run], Steps]
    """Yields a name and named tensors at each step: one a denoising step, and then the output."""
    sizes: tuple[Size, ...]
    """The sizes that it has."""
    devices: tuple[str, ...]
    """The kinds of device that it runs on: ``cpu``, ``cuda`` or both."""
    needs: tuple[str, ...]
    """Modules that have to be installed."""
    module: str
    """The module that declares it; importing it in another process declares it there."""
    file: Path | None
    """That module's file."""
    fused: bool = True
    """Whether a call of it has to be fused, or it proves nothing."""

    def __repr__(self) -> str:
        return f"Preset({self.name!r})"


PRESETS: dict[str, Preset] = {}
"""Every preset that was declared in this process, by name."""


def preset(
    name: str,
    *,
    sizes: Sequence[Size] = ("tiny",),
    devices: Sequence[str] = ("cpu", "cuda"),
    needs: Iterable[str] = (),
    fused: bool = True,
) -> Callable[[Callable[[Run], Steps]], Preset]:
    """Declare a generator function to be a preset.

    Parameters
    ----------
    name
        Lower case words with hyphens, of its own.
    sizes
        Those of ``tiny`` and ``real`` that it knows.
    devices
        The kinds of device that it runs on.
    needs
        Modules that have to be installed; without them it is *not run*.
    fused
        Whether a kernel has to give at least one result of it; ``False`` where the digests of eager alone are meant.

    Raises
    ------
    UsageError
        If the name is none, or another function has it.
    """

    def declare(steps: Callable[[Run], Steps]) -> Preset:
        return declared(name, steps, sizes=sizes, devices=devices, needs=needs, fused=fused, module=steps.__module__)

    return declare


def declared(
    name: str,
    steps: Callable[[Run], Steps],
    *,
    sizes: Sequence[Size],
    devices: Sequence[str],
    needs: Iterable[str],
    module: str,
    fused: bool = True,
) -> Preset:
    """Enter a preset into the registry.

    Parameters and errors as for :func:`preset`; ``module`` is the one that declares it.
    """
    if not (isinstance(name, str) and len(name) <= 100 and re.fullmatch(r"[a-z0-9]+(?:[.-][a-z0-9]+)*", name)):
        raise UsageError(
            f"preset {name!r}: expected lower case words with hyphens, which also make a file's name: 100 characters "
            f"at most"
        )
    if not sizes or not set(sizes) <= {"tiny", "real"}:
        raise UsageError(f"preset {name!r}: sizes are {tuple(sizes)!r}; expected 'tiny', 'real' or both")
    origin = getattr(sys.modules.get(module), "__file__", None)
    made = Preset(
        name, steps, tuple(sizes), tuple(devices), tuple(needs), module, Path(origin) if origin else None, fused
    )
    known = PRESETS.get(name)
    # The same file can be loaded under two names, from the checkout and as an installed package.
    if known is not None and (known.file is None or known.file != made.file):
        raise UsageError(f"preset {name!r}: {known.module} has declared it already: give it another name")
    PRESETS[name] = made
    return made


def lookup(name: str, among: Mapping[str, Preset] = PRESETS) -> Preset:
    """The preset of a name.

    Raises
    ------
    UsageError
        If there is none.
    """
    if name not in among:
        known = ", ".join(sorted(among)) or "none"
        raise UsageError(f"no preset {name!r}; declared in this process: {known}")
    return among[name]
