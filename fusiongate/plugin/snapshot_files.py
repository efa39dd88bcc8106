"""One file a preset, for syrupy: where it lies, how it is compared, and that it appears whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from syrupy.data import SnapshotCollections
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from fusiongate.io import write_text

if TYPE_CHECKING:
    from syrupy.data import SnapshotCollection

__all__ = ["PresetFile", "extension_for"]


class PresetFile(SingleFileSnapshotExtension):
    """A preset's record, at a path that depends on where it was made and not on the test's name."""

    _write_mode = WriteMode.TEXT
    file_extension = "json"
    path: Path
    """The file."""
    any_difference: bool
    """Whether a difference that digests do not see counts: it does when recording, and is no failure otherwise."""

    @classmethod
    def dirname(cls, **_: Any) -> str:
        """The file's folder."""
        return str(cls.path.parent)

    @classmethod
    def get_file_basename(cls, **_: Any) -> str:
        """The file's name."""
        return cls.path.stem

    @classmethod
    def matches_test_location(cls, **_: Any) -> bool:
        """Whatever lies at the path belongs to the test that asked for it."""
        return True

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        """Compare the digests; the environment beside them may differ."""
        from fusiongate.presets import PresetRecord, judge
        from fusiongate.presets.baselines import loads

        if self.any_difference:
            return bool(serialized_data == snapshot_data)
        kept, now = loads(snapshot_data, str(self.path)), loads(serialized_data, "this run")
        return isinstance(kept, PresetRecord) and isinstance(now, PresetRecord) and bool(judge(kept, now))

    def discover_snapshots(self, **_: Any) -> SnapshotCollections:
        """Nothing: what is not found is not unused, and what is not unused is never deleted."""
        return SnapshotCollections()

    def delete_snapshots(self, **_: Any) -> None:
        """Keep the file: one machine's update knows nothing of the others' snapshots."""

    @classmethod
    def write_snapshot_collection(cls, *, snapshot_collection: SnapshotCollection, **_: Any) -> None:
        """Write the file so that a reader, or a run that is killed, never sees half of it."""
        text = str(next(iter(snapshot_collection)).data)
        write_text(Path(snapshot_collection.location), text)


def extension_for(path: Path, *, any_difference: bool) -> type[PresetFile]:
    """The kind of file at a path; syrupy asks classes, not objects, where their snapshots lie."""
    return type("PresetFile", (PresetFile,), {"path": path, "any_difference": any_difference})
