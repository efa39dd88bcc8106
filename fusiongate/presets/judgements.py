"""The verdict on a preset: what changed since it was recorded, where first, and what else is different now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .records import Difference, PresetRecord, first_difference

__all__ = ["Change", "Judgement", "judge"]

Change = Literal["nothing changed", "kernel changed", "reference changed", "both changed"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What two records of one preset say about each other."""

    change: Change
    """In two words."""
    fused: Difference | None
    """The first difference of the arms with kernels."""
    reference: Difference | None
    """The first difference of the arms without."""
    arms: Difference | None
    """The first difference between the two arms of the later record."""
    moved: tuple[str, ...]
    """What differs between the environments and the sources, in words; it may or may not be the cause."""

    def __bool__(self) -> bool:
        return self.change == "nothing changed"

    def __str__(self) -> str:
        lines: list[str] = [self.change]
        if self.fused is not None:
            lines.append(f"  with kernels, first at {self.fused}")
        if self.reference is not None:
            lines.append(f"  without kernels, first at {self.reference}")
        if self.arms is not None:
            lines.append(f"  the two arms of this run part at {self.arms}")
        elif self.change == "reference changed" and self.fused is not None:
            lines.append("  the two arms of this run agree: the kernels, or their gates, followed the reference")
        lines.append(f"  since the record: {', '.join(self.moved) or 'nothing else changed'}")
        return "\n".join(lines)


def judge(recorded: PresetRecord, now: PresetRecord) -> Judgement:
    """Compare a run with the record.

    The arm without kernels says what the model, torch and the platform do; where it moved and the other arm still
    agrees with it, the kernels are not to blame. Differences of the environment alone are no change.
    """
    fused = first_difference(recorded.fused, now.fused)
    reference = first_difference(recorded.reference, now.reference)
    arms = first_difference(now.reference, now.fused)
    change: Change = "nothing changed"
    if reference is not None and fused is not None:
        change = "both changed" if arms is not None else "reference changed"
    elif fused is not None:
        change = "kernel changed"
    elif reference is not None:
        change = "reference changed"
    moved = recorded.environment.diff(now.environment)
    if recorded.sources != now.sources:
        moved.append(f"the kernels' sources {recorded.sources[:12]} → {now.sources[:12]}")
    return Judgement(change, fused, reference, arms, tuple(moved))
