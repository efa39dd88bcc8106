"""Sites: where fusions stand in a model, and switching whole families of them on and off.

A site is a module to which a fusion is *attached*; attaching changes nothing that the module computes. A model's code
asks :func:`site_of` for what is attached and for the quality that is mounted, and takes the kernels that these allow.
*Mounting* sets the quality for a tree of modules, all or nothing.

Mount and unmount at a batch boundary, never between the steps of one denoising run: a run that starts lossless should
end so. A CUDA graph keeps whichever kernels were mounted when it was captured: key graphs by
:attr:`MountReport.token`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from .comparison.contracts import Exact
from .errors import MountError, UsageError
from .gate.fusion import Fusion
from .gate.states import free_after_fork

__all__ = ["MountReport", "Quality", "Site", "attach", "detach", "mount", "mounted", "site_of", "token_of", "unmount"]

Quality = Literal["lossless", "high"]

_QUALITIES = ("lossless", "high")


@dataclass(frozen=True, slots=True)
class Site:
    """What is attached to one module."""

    fusions: tuple[Fusion[..., Any], ...]
    """In the order in which they were attached."""
    quality: Quality | None
    """What is mounted: exact fusions only, or also those within their ULP contract; None while nothing is."""

    def allows(self, fusion: Fusion[..., Any]) -> bool:
        """Whether the fusion may be used here: it is attached, and it is exact or mounted at high quality."""
        if not any(attached is fusion for attached in self.fusions):
            return False
        return isinstance(fusion.contract, Exact) or self.quality == "high"


@dataclass(frozen=True, slots=True)
class MountReport:
    """What a mount switched on."""

    quality: Quality
    """The quality that is mounted now."""
    token: str
    """Another one for every change of a tree's mounts: a key for graphs captured under it."""
    mounted: tuple[tuple[str, str], ...]
    """(site, fusion) by name, for every fusion that may be used now."""
    withheld: tuple[tuple[str, str, str], ...]
    """(site, fusion, why not), for every attached fusion that may not."""

    def __str__(self) -> str:
        lines = [f"mounted at {self.quality}: {len(self.mounted)} fusions, {len(self.withheld)} withheld, {self.token}"]
        lines += [f"  {site}: {fusion}" for site, fusion in self.mounted]
        lines += [f"  {site}: {fusion} withheld: {why}" for site, fusion, why in self.withheld]
        return "\n".join(lines)


# Weak keys: a model that goes away takes its sites with it. Modules are compared by identity, as nn.Module is.
_sites: weakref.WeakKeyDictionary[nn.Module, Site] = weakref.WeakKeyDictionary()
_tokens: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_changes = itertools.count(1)
lock = threading.RLock()
free_after_fork(sys.modules[__name__])


def attach(module: nn.Module, op: Fusion[..., Any]) -> None:
    """Make a module a site of a fusion: its code finds it there. What it may use then, the mounts of its family say.

    Raises
    ------
    UsageError
        If the module or the fusion is none.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"attach({module!r}, …): expected an nn.Module")
    if not isinstance(op, Fusion):
        raise UsageError(f"attach({type(module).__name__}, {op!r}): expected a Fusion")
    with lock:
        site = _sites.get(module, Site((), None))
        if not any(attached is op for attached in site.fusions):
            _sites[module] = Site((*site.fusions, op), site.quality)


def detach(module: nn.Module) -> None:
    """Take everything off a module again; no error if there is nothing."""
    with lock:
        _sites.pop(module, None)


def site_of(module: nn.Module) -> Site | None:
    """What is attached to a module; None if nothing is. Takes no lock."""
    return _sites.get(module)


def _family(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The sites at and below a module, by name."""
    if not isinstance(root, nn.Module):
        raise UsageError(f"expected the nn.Module whose sites are to be mounted, got {root!r}")
    return [(name or type(root).__name__, module) for name, module in root.named_modules() if module in _sites]


def mount(root: nn.Module, quality: Quality = "lossless") -> MountReport:
    """Switch on the sites at and below a module, all of them or, after an exception, none.

    Parameters
    ----------
    root
        The model, or a part of it.
    quality
        ``lossless``: exact fusions only. ``high``: also those within their ULP contract.

    Raises
    ------
    UsageError
        If the quality is none.
    MountError
        If there is no site, or a part of the tree is mounted already at another quality.
    """
    if quality not in _QUALITIES:
        raise UsageError(f"mount(quality={quality!r}): expected one of {', '.join(map(repr, _QUALITIES))}")
    with lock:
        family = _family(root)
        if not family:
            raise MountError(
                f"{type(root).__name__} has no site: attach a fusion to its modules first, with attach(module, op)"
            )
        before = {module: _sites[module] for _, module in family}
        for name, module in family:
            if before[module].quality not in (None, quality):
                raise MountError(
                    f"{name} is mounted at {before[module].quality} already; unmount it before mounting at {quality}"
                )
        used: list[tuple[str, str]] = []
        withheld: list[tuple[str, str, str]] = []
        try:
            for name, module in family:
                site = _sites[module] = Site(before[module].fusions, quality)
                for fusion in site.fusions:
                    if site.allows(fusion):
                        used.append((name, fusion.name))
                    else:
                        withheld.append((name, fusion.name, f"{fusion.contract}; mount at quality='high' to use it"))
            token = _tokens[root] = f"{quality}-{next(_changes)}"
        except BaseException:
            _sites.update(before)
            raise
    return MountReport(quality, token, tuple(used), tuple(withheld))


def unmount(root: nn.Module) -> None:
    """Switch off the sites at and below a module; no error if none is on."""
    with lock:
        for _, module in _family(root):
            _sites[module] = Site(_sites[module].fusions, None)
        _tokens[root] = f"unmounted-{next(_changes)}"


def token_of(root: nn.Module) -> str:
    """The token of the last mount or unmount of this very module."""
    return _tokens.get(root, "unmounted-0")


@contextlib.contextmanager
def mounted(root: nn.Module, quality: Quality = "lossless") -> Iterator[MountReport]:
    """Mounted inside, and as before afterwards, also after an exception.

    Parameters and errors as for :func:`mount`.
    """
    with lock:
        before = {module: _sites[module] for _, module in _family(root)}
        report = mount(root, quality)
    try:
        yield report
    finally:
        with lock:
            for module, site in before.items():
                if module in _sites:
                    _sites[module] = site
            _tokens[root] = f"restored-{next(_changes)}"
