"""The manifest of what a GPU gave: each file's hash, and the hash of every source that it hangs on. Imports no torch.

``nox -s record`` writes it, beside what was recorded on one device. :func:`check` names whatever was changed since, is
from other sources or from a tree with changes of its own, is missing, or was never entered.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from fusiongate.errors import UsageError
from fusiongate.io import parse_json, read_bytes, shaped, write_text
from fusiongate.ledger import environment_key

__all__ = ["NAME", "Entry", "Finding", "Manifest", "check", "command", "evidence_sources", "sources_of", "step_of"]

NAME: Final = "manifest.json"
"""The manifest's file, in ``<platform>/<device>/torch-<x.y>/``."""

_FORMAT: Final = 1
_GPUS: Final = ("cuda-*", "rocm-*")
_STEPS: Final = (
    ("paths", "*/paths/*.json"),
    ("paths", "*/torch-*/ledger*.jsonl"),
    ("certificates", "*/certificates/*.json"),
    ("acceptance", "*/torch-*/acceptance.txt"),
    ("timings", "*/torch-*/timings/kernels.*"),
    ("forwards", "*/torch-*/timings/forwards.txt"),
    ("calibration", "*/torch-*/timings/calibration.json"),
    ("presets-real", "*/torch-*/presets-real.txt"),
    ("presets-real", "*/torch-*/test_*/*-real.json"),
    ("snapshots", "*/torch-*/test_*/*.json"),
)
"""The step of the recording that makes a file, by the first pattern that fits its path below the snapshots."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one file."""

    sha256: str
    """The hash of its content."""
    sources: str
    """The hash of the sources that it was made from."""
    command: str
    """The command that makes it anew."""
    commit: str
    """The commit that it was made at."""
    dirty: bool
    """Whether the tree had changes that are in no commit, other than to the snapshots."""
    environment: str
    """The key of the environment that it was made in, as in a ledger."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was recorded on one device with one release of torch."""

    format: int = _FORMAT
    """The version of this layout."""
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each environment by its key."""
    files: dict[str, Entry] = field(default_factory=dict)
    """The entry of each file, by its path below the snapshots."""

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read a manifest; an empty one where there is none.

        Raises
        ------
        UsageError
            It cannot be read, or is damaged.
        """
        try:
            manifest = shaped(parse_json(read_bytes(path)), cls, closed=True)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: no manifest can be read: {error}; delete it, and run {command()}") from error
        if manifest.format != _FORMAT:
            raise UsageError(f"{path}: format {manifest.format}, expected {_FORMAT}: delete it, and run {command()}")
        return manifest

    def save(self, path: Path) -> None:
        """Write the manifest, whole or not at all, without the environments that no file is from."""
        used = {entry.environment for entry in self.files.values()}
        record = {
            "format": self.format,
            "environments": {key: self.environments[key] for key in sorted(used)},
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
        }
        write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with one file."""

    file: str
    """Its path below the snapshots."""
    what: str
    """What is wrong."""
    run: str
    """What to run."""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}; run {self.run}"


def command(step: str | None = None) -> str:
    """Return the command that records everything, or what one step makes."""
    return f"nox -s record -- --only {step}" if step else "nox -s record"


def step_of(name: str) -> str | None:
    """Return the step that makes a file, by its path below the snapshots; None where no step does."""
    return next((step for step, pattern in _STEPS if fnmatch(name, pattern)), None)


def evidence_sources(root: Path) -> str:
    """Return one hash over all that launches and judges a kernel: the kernels, their Python, the gate and the builds.

    Parameters
    ----------
    root
        A checkout, or the folder that the package is installed in.

    Raises
    ------
    UsageError
        There are no kernels.
    """
    installed = root / "fusiongate" / "kernels"
    kernels = installed if installed.is_dir() else root / "kernels"
    # By the names of an installed package, which are the same wherever the kernels lie.
    named = {f"kernels/{path.relative_to(kernels).as_posix()}": path for path in _below(kernels, "**/*.cu*", "*.py")}
    for folder in ("gate", "jit"):
        package = root / "fusiongate" / folder
        named |= {f"{folder}/{path.relative_to(package).as_posix()}": path for path in _below(package, "**/*.py")}
    if not any(name.endswith(".cu") for name in named):
        raise UsageError(f"{root}: holds no kernels: expected a checkout of fusiongate, or where it is installed")
    digest = hashlib.sha256()
    for name, path in sorted(named.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _below(folder: Path, *patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        yield from (path for path in folder.glob(pattern) if path.is_file())


@functools.cache
def certified() -> Mapping[str, str]:
    """Return the hash of the source that each fusion is launched from."""
    from fusiongate.jit import source_hash
    from fusiongate.kernels import FUSIONS
    from fusiongate.kernels.launching import Launcher

    return {op.name: source_hash([op.fused.entry.source]) for op in FUSIONS if isinstance(op.fused, Launcher)}


def sources_of(name: str, everything: str) -> str:
    """Return the hash of what a file hangs on.

    Parameters
    ----------
    name
        Its path below the snapshots.
    everything
        What :func:`evidence_sources` gave: a certificate hangs on its own kernel alone, and all else on everything.
    """
    if step_of(name) == "certificates":
        return certified().get(Path(name).stem.rpartition("-")[0], "")
    return everything


def check(snapshots: Path, root: Path | None = None) -> list[Finding]:
    """Hold everything that was recorded on a GPU against the manifests and the sources.

    Parameters
    ----------
    snapshots
        The folder of the platforms' folders.
    root
        Where the sources are; by default those that this module is of.

    Raises
    ------
    UsageError
        There are no sources, or no such folder.
    """
    if not snapshots.is_dir():
        raise UsageError(f"{snapshots}: no folder: expected the snapshots of a checkout")
    everything = evidence_sources(Path(__file__).parents[2] if root is None else root)
    findings: list[Finding] = []
    # Devices of one platform share path tables and certificates: what one manifest has right is right.
    told: dict[str, list[str | None]] = {}
    for path in sorted(snapshots.glob(f"*/*/torch-*/{NAME}")):
        where = path.relative_to(snapshots).as_posix()
        try:
            manifest = Manifest.load(path)
        except UsageError as error:
            findings.append(Finding(where, f"damaged: {error}", command()))
            continue
        for name, entry in manifest.files.items():
            told.setdefault(name, []).append(_wrong(snapshots / name, name, entry, manifest, everything))
    for name, faults in told.items():
        if None not in faults and (fault := faults[0]):
            findings.append(Finding(name, fault, command(step_of(name))))
    for name in _recorded(snapshots):
        if name not in told:
            step = step_of(name)
            what = "not in the manifest" if step else "not in the manifest, and made by no step: delete it"
            findings.append(Finding(name, what, command(step)))
    return sorted(findings, key=lambda finding: finding.file)


def _recorded(snapshots: Path) -> Iterator[str]:
    for platform in _GPUS:
        for path in sorted(snapshots.glob(f"{platform}/**/*")):
            if path.is_file() and path.name != NAME and not path.name.startswith("."):
                yield path.relative_to(snapshots).as_posix()


def _wrong(path: Path, name: str, entry: Entry, manifest: Manifest, everything: str) -> str | None:
    """What is wrong with a file that has an entry."""
    try:
        content = read_bytes(path)
    except OSError as error:
        return f"missing: {error.strerror}"
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        return "falsified: its content is not what was recorded"
    environment = manifest.environments.get(entry.environment)
    if environment is None or environment_key(environment) != entry.environment:
        return "falsified: its environment is not what was recorded"
    if entry.dirty:
        return f"recorded from a tree with changes that are not in commit {entry.commit[:12]}"
    if sources_of(name, everything) != entry.sources:
        return "stale: it was recorded from other sources"
    return None
