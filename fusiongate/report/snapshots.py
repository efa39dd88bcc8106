"""The page's part about presets: their verdicts, their md5s, and which environments share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .evidence import Evidence, Observed
from .markup import Html, element, joined, table

__all__ = ["presets"]

_HEADINGS = (
    "preset",
    "environment",
    "verdict",
    "with kernels and without",
    "steps",
    "calls",
    "md5 of the output, with kernels",
)


def presets(evidence: Evidence) -> Iterator[Html]:
    """One row a preset and environment, those of one preset together."""
    groups: dict[tuple[str, str, int], list[Observed]] = {}
    for one in sorted(evidence.digests, key=lambda one: one.environment):
        groups.setdefault((one.subject, one.payload["size"], one.payload["seed"]), []).append(one)
    if not groups:
        yield element("p", "No preset was run.")
        return
    several = any(len(group) > 1 for group in groups.values())
    headings = [*_HEADINGS, "same md5s at every step as"] if several else _HEADINGS
    rows = [[_row(one, group, several=several) for one in group] for _, group in sorted(groups.items())]
    yield table("Presets: every step’s md5s, held against the snapshot", headings, rows)
    for one in evidence.digests:
        if one.payload["outcome"] == "nondeterministic" and one.payload["story"]:
            yield element("p", f"{one.subject} in environment {one.environment} has no md5: {one.payload['story']}")


def _row(one: Observed, group: Sequence[Observed], *, several: bool) -> Sequence[str]:
    payload = one.payload
    same = payload["fused"] == payload["reference"]
    twins = [
        str(other.environment) for other in group if other is not one and other.payload["fused"] == payload["fused"]
    ]
    return [
        f"{one.subject} ({payload['size']}, seed {payload['seed']})",
        str(one.environment),
        element("b", "red", class_="red") if payload["outcome"] == "red" else payload["outcome"],
        "same md5s" if same else "md5s differ",
        str(len(payload["fused"])),
        ", ".join(f"{count} × {path}" for path, count in payload["calls"].items()) or "none",
        joined((element("code", line) for line in _outputs(payload["fused"])), element("br")),
        *([f"environment {', '.join(twins)}" if twins else "none"] if several else []),
    ]


def _outputs(arm: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [text.partition(" ")[0] for step in list(arm.values())[-1:] for text in step.values()] or ["none"]
