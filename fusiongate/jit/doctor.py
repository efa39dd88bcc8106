"""What this machine can build and run, and why not: the facts behind ``fusiongate doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusiongate.errors import BuildError, NoCompiler

from .compile import Compiler, find_compiler
from .load import find_built
from .sources import Source
from .targets import Target, local_targets

__all__ = ["SourceState", "TargetState", "diagnose"]


@dataclass(frozen=True, slots=True)
class SourceState:
    """One kernel source on one target."""

    name: str
    """The source's name."""
    built: bool
    """Whether an intact library is in the cache."""
    obstacle: str | None
    """Why it is not built and cannot be; None when it is or can."""


@dataclass(frozen=True, slots=True)
class TargetState:
    """One target on this machine."""

    name: str
    """The target's name, or only its kind where this machine has no device of it."""
    devices: tuple[str, ...]
    """The names of the devices that run it, as their driver gives them."""
    no_device: str | None
    """Why nothing here runs it, or None."""
    compiler: Compiler | None
    """The compiler for it, or None."""
    no_compiler: str | None
    """What is missing and what to install, or None."""
    sources: tuple[SourceState, ...]
    """Each kernel source, in the given order; empty where there is no device."""

    @property
    def can_run(self) -> bool:
        """Whether there is a device, and every source is built or can be."""
        return (
            self.no_device is None
            and bool(self.sources)
            and all(source.built or source.obstacle is None for source in self.sources)
        )


def diagnose(sources: Sequence[Source]) -> tuple[TargetState, ...]:
    """Return the state of every target: the host, each GPU architecture here, and the kinds of GPU that are not here.

    Compiles and loads nothing; asks compilers for their versions and torch for its devices.
    """
    local = local_targets()
    states = [_present(target, sources) for target in local]
    # Any architecture finds the same compiler.
    absent = {"cuda": Target("cuda", "sm_90"), "hip": Target("hip", "gfx942")}
    states += [_absent(example) for kind, example in absent.items() if kind not in {target.kind for target in local}]
    return tuple(states)


def _present(target: Target, sources: Sequence[Source]) -> TargetState:
    compiler, no_compiler = _compiler(target)
    states = []
    for source in sources:
        try:
            built = find_built(source, target) is not None
        except BuildError as error:
            states.append(SourceState(source.name, built=False, obstacle=str(error)))
        else:
            states.append(SourceState(source.name, built, None if built else no_compiler))
    return TargetState(str(target), _device_names(target), None, compiler, no_compiler, tuple(states))


def _absent(example: Target) -> TargetState:
    import torch

    version = torch.version.cuda if example.kind == "cuda" else torch.version.hip
    toolkit = "CUDA" if example.kind == "cuda" else "ROCm"
    if version is None:
        no_device = f"torch {torch.__version__} is built without {toolkit}"
    else:
        no_device = f"torch {torch.__version__} sees no GPU"
    return TargetState(example.kind, (), no_device, *_compiler(example), ())


def _compiler(target: Target) -> tuple[Compiler | None, str | None]:
    try:
        return find_compiler(target), None
    except NoCompiler as error:
        return None, str(error)


def _device_names(target: Target) -> tuple[str, ...]:
    if target.kind == "host":
        return ()
    import torch

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return tuple(torch.cuda.get_device_name(device) for device in devices if Target.of(device) == target)
