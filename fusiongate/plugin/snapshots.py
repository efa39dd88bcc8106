"""The fixture ``md5_snapshot``: a preset runs in another process, and its digests are held against the committed ones.

Storing, recalling and updating is syrupy's; what a difference means is told here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from fusiongate.errors import FusiongateError
from fusiongate.io import visible

from .device import select
from .options import options
from .rows import record

if TYPE_CHECKING:
    import torch
    from syrupy.assertion import SnapshotAssertion

    from fusiongate.presets import Preset, PresetProcess, PresetRun
    from fusiongate.presets.baselines import Nondeterministic
    from fusiongate.presets.records import PresetRecord
    from fusiongate.presets.registry import Size

__all__ = ["Md5Snapshot", "md5_snapshot"]

_MARKER: Final = "preset"
_FOLDER: Final = "snapshots"
"""Where snapshots lie, below the root, if no setting says."""
_PROCESS: Final = pytest.StashKey["PresetProcess"]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(preset): the preset that the fixture md5_snapshot checks; declared with @fusiongate.preset",
    )


@pytest.fixture
def md5_snapshot(request: pytest.FixtureRequest) -> Md5Snapshot:
    """Digests of a preset against their snapshot: call ``md5_snapshot.check(preset)``."""
    return Md5Snapshot(request.node, lambda: request.getfixturevalue("snapshot"))


def _process(config: pytest.Config, device: torch.device) -> PresetProcess:
    """The process that runs this run's presets: one for all, because torch and models take long to import."""
    from fusiongate.presets import PresetProcess

    if _PROCESS not in config.stash:
        config.stash[_PROCESS] = PresetProcess(device)
        config.add_cleanup(config.stash[_PROCESS].close)
    return config.stash[_PROCESS]


@dataclass(frozen=True, slots=True)
class _Request:
    preset: Preset
    size: Size
    seed: int
    device: torch.device

    def run_in_shared_process(self, config: pytest.Config) -> PresetRun:
        process = _process(config, self.device)
        try:
            return process.run(self.preset, size=self.size, seed=self.seed)
        except FusiongateError:
            # A process that died, or whose device has gone, would fail every later preset too.
            process.close()
            del config.stash[_PROCESS]
            raise

    def run_in_fresh_process(self, *, deterministic: bool = False) -> PresetRun:
        from fusiongate.presets import run_fresh

        (run,) = run_fresh(
            [self.preset], size=self.size, seed=self.seed, device=self.device, deterministic=deterministic
        )
        return run


class Md5Snapshot:
    """The md5s of presets, as one test checks them."""

    __slots__ = ("_item", "_snapshot")

    def __init__(self, item: pytest.Item, snapshot: Any) -> None:
        self._item = item
        self._snapshot = snapshot

    def check(self, preset: Preset | None = None, *, size: Size = "tiny", seed: int = 0) -> None:
        """Run a preset, with kernels and without, and hold every step's digests against the snapshot.

        Parameters
        ----------
        preset
            What to run; by default the one that the test is marked with.
        size, seed
            How large, and with which numbers.

        Raises
        ------
        pytest.fail.Exception
            A digest changed, an output is constant or not finite, there is no snapshot, or none may be recorded.
        """
        from fusiongate.presets.running import missing_for

        __tracebackhide__ = True
        chosen = preset if preset is not None else self._marked()
        device = select(self._item.config).torch_device
        missing = missing_for(chosen, size, device)
        if missing is not None:
            pytest.skip(f"not run: {missing}")
        try:
            problem = self._checked(_Request(chosen, size, seed, device))
        except FusiongateError as error:
            problem = str(error)
        if problem is not None:
            pytest.fail(visible(problem), pytrace=False)

    def _marked(self) -> Preset:
        from fusiongate.presets import Preset

        marker = self._item.get_closest_marker(_MARKER)
        if marker is None or len(marker.args) != 1 or not isinstance(marker.args[0], Preset):
            raise pytest.UsageError(
                f"{self._item.nodeid}: md5_snapshot.check() was given no preset: pass one, or mark the test with "
                f"@pytest.mark.{_MARKER}(preset)"
            )
        return marker.args[0]

    def _checked(self, asked: _Request) -> str | None:
        """What is wrong, in words; ``None`` where nothing is."""
        from fusiongate.presets import baselines

        root = options(self._item.config).snapshots or self._item.config.rootpath / _FOLDER
        # What is recorded comes from a process that has run nothing else.
        run = asked.run_in_fresh_process() if self._updates() else asked.run_in_shared_process(self._item.config)
        path = baselines.location(root, run.record.environment, self._item.path.stem, asked.preset.name, asked.size)
        kept = baselines.load(path)
        if self._updates() and (kept is None or self._item.config.option.update_snapshots):
            return self._record(asked, run, path, kept)
        if kept is None:
            return self._missing(asked, run, path)
        if isinstance(kept, baselines.Nondeterministic):
            return self._held(asked, run, kept)
        return self._compared(asked, run, path, kept)

    def _updates(self) -> bool:
        option = self._item.config.option
        return bool(option.update_snapshots or option.update_new_snapshots_only or self._records_missing())

    def _records_missing(self) -> bool:
        return options(self._item.config).missing == "record"

    def _record(
        self, asked: _Request, run: PresetRun, path: Path, kept: PresetRecord | Nondeterministic | None
    ) -> str | None:
        from fusiongate.presets import baselines

        if isinstance(kept, baselines.Nondeterministic):
            # Two runs may agree by chance: what was once seen to differ gets no md5 until somebody removes the finding.
            return self._held(asked, run, kept)
        fresh = baselines.establish(asked.preset, run, size=asked.size, seed=asked.seed, device=asked.device)
        self._store(path, fresh.text(), any_difference=True)
        outcome = "recorded" if not isinstance(fresh, baselines.Nondeterministic) else "nondeterministic"
        candidate = str(self._relative(path)) if kept is None and self._records_missing() else None
        self._row(asked.preset, run, outcome, None if outcome == "recorded" else str(fresh), candidate)
        return None

    def _missing(self, asked: _Request, run: PresetRun, path: Path) -> str | None:
        """Without a baseline, the two arms are still held against each other."""
        from fusiongate.presets import baselines
        from fusiongate.presets.records import first_difference

        release = baselines.torch_release(run.record.environment)
        baseline = f"no baseline for torch {release}: no snapshot {self._relative(path)}"
        parted = first_difference(run.record.reference, run.record.fused)
        drift = None if parted is None else self._drift(asked, run)
        story: str | None = None
        if faults := run.faults():
            story = "it proves nothing: " + "; ".join(faults)
        elif parted is not None and drift is None:
            story = f"with kernels it gives something else than without, first at {parted}"
        if story is not None:
            self._row(asked.preset, run, "red", story)
            return f"preset {asked.preset.name!r}: {story}\n  {baseline}"
        story = f"{drift or 'arms agree'}; {baseline}; record it: {self._recording()}"
        self._row(asked.preset, run, "not run", story)
        if options(self._item.config).missing == "skip":
            pytest.skip(f"not run: {story}")
        return f"preset {asked.preset.name!r}: {story}"

    def _compared(self, asked: _Request, run: PresetRun, path: Path, kept: PresetRecord) -> str | None:
        from fusiongate.presets import judge

        story: str | None = None
        judgement = judge(kept, run.record)
        same = self._store(path, run.record.text(), any_difference=False)
        if faults := run.faults():
            story = "it proves nothing: " + "; ".join(faults)
        elif not judgement or not same:
            drift = self._drift(asked, run)
            story = str(judgement) if drift is None else f"{drift}; record that, and the operator: {self._recording()}"
        self._row(asked.preset, run, "red" if story else "same", story)
        return story and f"preset {asked.preset.name!r}: {story}\n  snapshot: {self._relative(path)}"

    def _drift(self, asked: _Request, run: PresetRun) -> str | None:
        """Say where another process gives something else without any kernel; ``None`` where it does not."""
        from fusiongate.presets.records import first_difference

        again = asked.run_in_fresh_process()
        drift = first_difference(run.record.reference, again.record.reference)
        if drift is None:
            return None
        return f"it does not repeat: without kernels a second process gives something else, first at {drift}"

    def _recording(self) -> str:
        return f"pytest {shlex.quote(self._item.nodeid)} --snapshot-update"

    def _held(self, asked: _Request, run: PresetRun, kept: Nondeterministic) -> str | None:
        """A preset without an md5: no gate may refuse, and with torch's deterministic operators the arms must agree."""
        from fusiongate.presets.records import first_difference

        story: str | None = None
        if faults := run.faults():
            story = "it proves nothing: " + "; ".join(faults)
        else:
            steady = asked.run_in_fresh_process(deterministic=True)
            parted = first_difference(steady.record.reference, steady.record.fused)
            if parted is not None:
                story = f"with deterministic operators the arm with kernels differs, first at {parted}"
        self._row(asked.preset, run, "red" if story else "nondeterministic", story or str(kept))
        return story and f"preset {asked.preset.name!r}, {kept}: {story}"

    def _store(self, path: Path, text: str, *, any_difference: bool) -> bool:
        """Hand a text to syrupy, which compares it, and writes it where it was asked to update."""
        from .snapshot_files import extension_for

        snapshot: SnapshotAssertion = self._snapshot()
        file = snapshot.use_extension(extension_for(path, any_difference=any_difference))
        if self._records_missing():
            # Of this file alone: what else the project snapshots is not ours to record.
            file.update_new_snapshots_only = True
        return bool(file == text)

    def _row(
        self, preset: Preset, run: PresetRun, outcome: str, story: str | None, candidate: str | None = None
    ) -> None:
        fields = run.record.to_json()
        row: Mapping[str, Any] = {
            "outcome": outcome,
            "story": story,
            "candidate": candidate,
            "size": run.record.size,
            "seed": run.record.seed,
            "fused": fields["fused"],
            "reference": fields["reference"],
            "sources": run.record.sources,
            "seconds": {"fused": run.fused.seconds, "reference": run.reference.seconds},
            "calls": dict(run.fused.calls()),
            "sites": [[site.name, site.kind, site.reason] for site in run.fused.sites],
            "test": self._item.nodeid,
        }
        record(self._item, "digest", preset.name, row, run.record.environment)

    def _relative(self, path: Path) -> Path:
        root = self._item.config.rootpath
        return path.relative_to(root) if path.is_relative_to(root) else path
