"""Subjects: what the matrix runs on. A fusion, or somebody else's function with a gate of its own.

A fusion gets a fresh gate for each trial. A foreign function is spied on where its launcher is looked up, so that what
it launched is counted and not believed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from .comparison.contracts import Contract, Exact
from .errors import UsageError

if TYPE_CHECKING:
    from .gate.fusion import Fusion
    from .gate.spec import FusionSpec

__all__ = ["ADALN", "GridLauncher", "Launcher", "Spy", "Subject", "Trial"]

Launcher = Callable[..., Any]
StandIn = Callable[[Launcher], Launcher]

_NAME = re.compile(r"[^./\\][^/\\]{,99}")

ADALN: dict[str, Any] = {"x": "B S D", "scale": "B 1 D", "shift": "B 1 D"}
"""The inputs of ``x * (1 + scale) + shift``: activations and two rows a batch entry."""


class GridLauncher(Protocol):
    """A kernel that launches by ``kernel[grid](...)``."""

    def __getitem__(self, grid: Any, /) -> Launcher:
        """The launcher for a grid."""


class Spy:
    """Stands before a launcher and counts the launches that it completes.

    Triton kernels launch by ``kernel[grid](...)``: an index gives a launcher that is counted too. Every other attribute
    is the launcher's own.
    """

    def __init__(self, launcher: Any) -> None:
        self._launcher = launcher
        self._lock = threading.Lock()
        self.launches = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch, and count it when it is done."""
        result = self._launcher(*args, **kwargs)
        self._completed()
        return result

    def __getitem__(self, grid: Any) -> Launcher:
        launcher = self._launcher[grid]

        def launch(*args: Any, **kwargs: Any) -> Any:
            result = launcher(*args, **kwargs)
            self._completed()
            return result

        return launch

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)

    def _completed(self) -> None:
        # Threads launch at once, and an increment is a read and a write.
        with self._lock:
            self.launches += 1


@dataclass(frozen=True, slots=True)
class Trial:
    """A subject for one cell: its gate as new, its launcher counted."""

    call: Callable[..., Any]
    """The subject's function."""
    spy: Spy
    """What stands before its launcher."""
    fusion: Fusion[..., Any] | None
    """The fusion with the fresh gate, if the subject is one."""

    @property
    def launches(self) -> int:
        """Launches completed so far in this trial."""
        return self.spy.launches

    @property
    def counts(self) -> Mapping[tuple[str, str], int] | None:
        """How often each path was taken for each reason; None for a foreign gate, which publishes neither."""
        if self.fusion is None:
            return None
        counters: Mapping[tuple[str, str], int] = self.fusion.counters
        return Counter({(str(path), str(reason)): count for (path, reason), count in counters.items()})


@dataclass(frozen=True, slots=True)
class Subject:
    """Somebody's function, its reference, and where its launches can be counted.

    Raises
    ------
    UsageError
        The name is none that a file can have, or ``fused`` names no attribute, or an object that no module holds.
    """

    name: str
    """Names the subject in reports, and the file of its path table."""
    call: Callable[..., Any]
    """The function with its gate, as models call it."""
    reference: Callable[..., Any]
    """The eager chain; its parameters are ``call``'s."""
    fused: str | Launcher | GridLauncher
    """The launcher: ``"package.module:attribute"`` *where it is looked up*, or the object itself, which is then
    replaced in every module that holds it under a name."""
    declines: Callable[..., str | None] | None = None
    """Same arguments: None where the launcher has to be reached, else a reason. Without it, always."""
    reset: Callable[[], Any] | None = None
    """Forgets what the function's own gate has seen; called around each cell."""
    contract: Contract | tuple[Contract, ...] = Exact()  # noqa: RUF009  # frozen
    """What "same" means: for all outputs, or one for each."""
    fusion: Fusion[..., Any] | None = None
    """The fusion, for a subject made by `of`."""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isprintable() and _NAME.fullmatch(self.name)):
            raise UsageError(
                f"subject {self.name!r}: expected a name of 1 to 100 printable characters without / and \\, which does "
                f"not begin with a dot: it also names a file"
            )
        if self.fusion is None:
            _places(self.name, self.fused)

    @classmethod
    def of(cls, fusion: Fusion[..., Any]) -> Subject:
        """A fusion as a subject: its own name, reference, predicate and contract."""
        return cls(
            fusion.name,
            call=fusion,
            reference=fusion.reference,
            fused=fusion.fused,
            declines=fusion.declines,
            contract=fusion.contract,
            fusion=fusion,
        )

    @property
    def written(self) -> tuple[int, ...]:
        """The positions of the arguments that it writes."""
        return () if self.fusion is None else self.fusion.spec.written

    def contract_of(self, output: int) -> Contract:
        """The contract of an output: those that are returned, then the written arguments."""
        return self.contract[output] if isinstance(self.contract, tuple) else self.contract

    def declined(self, *args: Any) -> str | None:
        """The reason for which these arguments may not be launched, None if they have to be."""
        return None if self.declines is None else self.declines(*args)

    def sources(self) -> str:
        """The hash of the sources that its evidence is from; empty for kernels of others, of which none is known."""
        from . import kernels
        from .jit import source_hash

        ours = [*kernels.FUSIONS, *(fusion.host for fusion in kernels.FUSIONS)]
        return source_hash(kernels.SOURCES) if any(self.fusion is one for one in ours if one is not None) else ""

    @contextlib.contextmanager
    def trial(
        self,
        stand_in: StandIn | None = None,
        variant: Callable[[FusionSpec[..., Any]], FusionSpec[..., Any]] | None = None,
    ) -> Iterator[Trial]:
        """A fresh gate with counted launches; what was there before is back afterwards.

        Parameters
        ----------
        stand_in
            Called with the launcher, gives what launches instead of it in this trial.
        variant
            Gives the spec that a fusion has in this trial; no concern of a foreign gate's.
        """
        if self.fusion is not None:
            spec = self.fusion.spec if variant is None else variant(self.fusion.spec)
            spy = Spy(stand_in(spec.fused) if stand_in else spec.fused)
            fresh = type(self.fusion).of(replace(spec, fused=spy))
            yield Trial(fresh, spy, fresh)
            return
        places = _places(self.name, self.fused)
        launcher = getattr(*places[0])
        spy = Spy(stand_in(launcher) if stand_in else launcher)
        with _replaced(places, spy):
            if self.reset is not None:
                self.reset()
            try:
                yield Trial(self.call, spy, None)
            finally:
                if self.reset is not None:
                    self.reset()


def _places(subject: str, fused: str | Launcher | GridLauncher) -> list[tuple[Any, str]]:
    """Every owner and attribute under which a launcher is looked up."""
    if isinstance(fused, str):
        return [_named(subject, fused)]
    # Anything may stand there: None blocks an import, and lazy modules are objects of their own.
    modules: list[Any] = list(sys.modules.values())
    places = [
        (module, name)
        for module in modules
        if isinstance(module, types.ModuleType)
        for name, value in list(vars(module).items())
        if value is fused
    ]
    if not places:
        raise UsageError(
            f"subject {subject}: no module holds {fused!r} under a name, so its launches cannot be counted; "
            f'name the attribute where it is looked up: fused="package.module:attribute"'
        )
    return places


def _named(subject: str, address: str) -> tuple[Any, str]:
    module, colon, path = address.partition(":")
    if not (module and colon and path):
        raise UsageError(
            f'subject {subject}: fused={address!r} is no address of a launcher; write "package.module:attribute"'
        )
    try:
        owner: Any = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"subject {subject}: fused={address!r}: cannot import {module}: {error}") from error
    *parents, attribute = path.split(".")
    for position, name in enumerate([*parents, attribute]):
        if not hasattr(owner, name):
            raise UsageError(
                f"subject {subject}: fused={address!r}: {'.'.join([module, *parents[:position]])} has no attribute "
                f"{name!r}; name the attribute where the launcher is looked up"
            )
        if position < len(parents):
            owner = getattr(owner, name)
    return owner, attribute


@contextlib.contextmanager
def _replaced(places: list[tuple[Any, str]], spy: Spy) -> Iterator[None]:
    before = [inspect.getattr_static(owner, name) for owner, name in places]
    for (owner, name), launcher in zip(places, before, strict=True):
        setattr(owner, name, staticmethod(spy) if isinstance(launcher, staticmethod) else spy)
    try:
        yield
    finally:
        for (owner, name), launcher in zip(places, before, strict=True):
            setattr(owner, name, launcher)
