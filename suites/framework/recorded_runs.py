"""Recorded runs of the form that pytest-benchmark writes, made up for the tests of the judgement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["environment_record", "row", "write_run"]


def environment_record(**changes: Any) -> dict[str, Any]:
    """An environment of a GPU, with some fields changed."""
    return {
        "platform": "cuda-sm_90",
        "device_name": "NVIDIA H200",
        "torch": "2.11.0+cu130",
        "runtime": "cuda 13.0",
        "driver": "580.1",
        "python": "3.12.3",
        "threads": 8,
        "libraries": {},
        "switches": {},
        **changes,
    }


def row(case: str = "modulate[1x14592x4096-bfloat16]", *, time: float = 60e-6, ratio: float = 0.2) -> dict[str, Any]:
    """A kernel's row with intervals of ±0.1 %; the time is in seconds."""
    name = f"{case.removesuffix(']')}-kernel]"
    return {
        "group": case,
        "name": name,
        "fullname": name,
        "params": {"shape": "1x14592x4096", "dtype": "bfloat16", "arm": "kernel"},
        "param": "1x14592x4096-bfloat16-kernel",
        "extra_info": {
            "fusiongate": 1,
            "reference": "eager",
            "median_s": _around(time),
            "ratio": _around(ratio),
        },
        "options": {},
        "stats": {"data": [time, time * 1.001], "median": time, "rounds": 2, "iterations": 17},
    }


def _around(value: float) -> Mapping[str, float]:
    return {"value": value, "low": value * 0.999, "high": value * 1.001}


def write_run(path: Path, *rows: dict[str, Any], **environment: Any) -> Path:
    """Write rows, by default one, as a run in the environment with the given fields changed."""
    machine = {"environment": environment_record(**environment), "clock_limits": {}}
    record = {"machine_info": {"fusiongate": [machine]}, "benchmarks": list(rows or [row()])}
    path.write_text(json.dumps(record), encoding="utf-8")
    return path
