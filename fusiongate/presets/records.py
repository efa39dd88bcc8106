"""What a run of a preset leaves behind: digests of both arms, step by step, and the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from fusiongate.errors import SnapshotError, UsageError
from fusiongate.io import Shape, shaped
from fusiongate.platforms import Environment

__all__ = ["SCHEMA", "ArmRecord", "Difference", "PresetRecord", "TensorRecord", "checked", "first_difference"]

SCHEMA = 1
"""The version of the record's layout."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor that a step gave."""

    dtype: str
    """Its dtype."""
    shape: tuple[int, ...]
    """Its shape."""
    md5: str
    """The md5 of its bytes."""
    nonfinite: int
    """How many of its elements are NaN or infinite."""
    constant: bool
    """Whether all of its elements, more than one, are the same."""

    def to_json(self) -> str:
        """The tensor on one line, so that a change of it is one line of a difference."""
        shape = "×".join(map(str, self.shape)) or "scalar"
        notes = [f"{self.nonfinite} not finite"] * bool(self.nonfinite) + ["constant"] * self.constant
        return " ".join([self.md5, self.dtype, shape, *(f"({note})" for note in notes)])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The tensor that :meth:`to_json` wrote."""
        words = text.split(" ", 3)
        if len(words) < 3:
            raise SnapshotError(f"a tensor's record is {text!r}; expected its md5, its dtype and its shape")
        md5, dtype, shape = words[:3]
        notes = words[3] if len(words) > 3 else ""
        number = int(notes[1 : notes.index(" ")]) if "not finite" in notes else 0
        sizes = () if shape == "scalar" else tuple(map(int, shape.split("×")))
        return cls(dtype, sizes, md5, number, "(constant)" in notes)


ArmRecord = Mapping[str, Mapping[str, TensorRecord]]
"""The tensors of each step, by the step's name and the tensor's path, in the order of the run."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two arms differ."""

    step: str
    """The step."""
    tensor: str
    """The tensor's path in the step."""
    before: TensorRecord | None
    """The tensor as it was; ``None`` where there was none."""
    after: TensorRecord | None
    """The tensor as it is."""
    differing: int
    """How many tensors differ, this one among them."""
    total: int
    """Of how many."""

    def __str__(self) -> str:
        where = f"step {self.step!r}, tensor {self.tensor!r}" if self.tensor != "." else f"step {self.step!r}"
        if self.before is None or self.after is None:
            what = "is new" if self.before is None else "is gone"
        elif (self.before.dtype, self.before.shape) != (self.after.dtype, self.after.shape):
            what = f"{_kind(self.before)} → {_kind(self.after)}"
        else:
            what = f"md5 {self.before.md5} → {self.after.md5}"
        return f"{where}: {what} ({self.differing} of {self.total} tensors differ)"


def _kind(tensor: TensorRecord) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def first_difference(before: ArmRecord, after: ArmRecord) -> Difference | None:
    """The first tensor, in the order of the run, that is not the same; ``None`` where all are."""
    places = list(dict.fromkeys([*_places(after), *_places(before)]))
    pairs = [(step, name, before.get(step, {}).get(name), after.get(step, {}).get(name)) for step, name in places]
    different = [pair for pair in pairs if pair[2] != pair[3]]
    if not different:
        return None
    step, name, was, now = different[0]
    return Difference(step, name, was, now, len(different), len(pairs))


def _places(arm: ArmRecord) -> Iterator[tuple[str, str]]:
    for step, tensors in arm.items():
        for name in tensors:
            yield step, name


@dataclass(frozen=True, slots=True)
class PresetRecord:
    """Both arms of one run of a preset."""

    preset: str
    """The preset's name."""
    size: str
    """``tiny`` or ``real``."""
    seed: int
    """The run's seed."""
    fused: ArmRecord
    """The arm with kernels."""
    reference: ArmRecord
    """The arm without any."""
    sources: str
    """The hash of the kernels' sources."""
    environment: Environment
    """Where it was made."""

    def to_json(self) -> dict[str, Any]:
        """The record as the json module can write it."""
        return {
            "schema": SCHEMA,
            "preset": self.preset,
            "size": self.size,
            "seed": self.seed,
            "class": "deterministic",
            "fused": _arm_to_json(self.fused),
            "reference": _arm_to_json(self.reference),
            "sources": self.sources,
            "environment": self.environment.to_json(),
        }

    @classmethod
    def from_json(cls, fields: object) -> Self:
        """The record that :meth:`to_json` wrote.

        Raises
        ------
        SnapshotError
            If it is none.
        """
        kept = checked(fields, _Kept)
        try:
            return cls(
                preset=kept.preset,
                size=kept.size,
                seed=kept.seed,
                fused=_arm_from_json(kept.fused),
                reference=_arm_from_json(kept.reference),
                sources=kept.sources,
                environment=Environment.from_json(kept.environment),
            )
        except (ValueError, UsageError) as error:
            raise SnapshotError(f"a preset's record is damaged: {error}; record it again") from error

    def text(self) -> str:
        """The record as its file holds it."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"

    def faults(self) -> list[str]:
        """Why this run proves nothing, one sentence each; empty where it does."""
        found = []
        for label, arm in (("fused", self.fused), ("reference", self.reference)):
            if all(0 in tensor.shape for tensors in arm.values() for tensor in tensors.values()):
                found.append(f"empty: every tensor of the {label} arm is without elements; yield what kernels write")
            for step, tensors in arm.items():
                for name, tensor in tensors.items():
                    where = f"{label} arm, step {step!r}, tensor {name!r}"
                    if tensor.nonfinite:
                        found.append(f"{where}: {tensor.nonfinite} elements are not finite")
                    if tensor.constant:
                        found.append(f"{where}: all elements are the same")
        return found


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record as its file holds it."""

    preset: str
    size: str
    seed: int
    fused: Mapping[str, Mapping[str, str]]
    reference: Mapping[str, Mapping[str, str]]
    sources: str
    environment: Mapping[str, Any]


def checked(fields: object, kind: type[Shape]) -> Shape:
    """The fields of a preset's file as an object of a dataclass, if they are of this version and of its types.

    Raises
    ------
    SnapshotError
        If they are not.
    """
    schema = fields.get("schema") if isinstance(fields, Mapping) else SCHEMA
    if schema != SCHEMA:
        raise SnapshotError(f"a preset's record has schema {schema!r}; expected {SCHEMA}: record it again")
    try:
        return shaped(fields, kind)
    except ValueError as error:
        raise SnapshotError(f"a preset's record is damaged: {error}; record it again") from error


def _arm_to_json(arm: ArmRecord) -> dict[str, dict[str, str]]:
    return {step: {name: tensor.to_json() for name, tensor in tensors.items()} for step, tensors in arm.items()}


def _arm_from_json(fields: Mapping[str, Mapping[str, str]]) -> ArmRecord:
    return {
        step: {name: TensorRecord.from_json(text) for name, text in tensors.items()} for step, tensors in fields.items()
    }
