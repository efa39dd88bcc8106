"""A fusion has its reference's parameters and result for a type checker too: a call that does not fit is an error."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fusiongate

SNIPPET = """
from typing import Any, assert_type

import fusiongate as fg


class Tensor:
    pass


def reference(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    return x


def kernel(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    return x


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


op = fg.Fusion("op", reference=reference, fused=kernel)
pair = fg.Fusion("pair", reference=both, fused=both)


def takes_any(one: fg.Fusion[..., Any]) -> None:
    fg.warm_up(one)


def right(x: Tensor) -> None:
    assert_type(op(x, x), Tensor)
    assert_type(op(x, scale=x, eps=1e-5), Tensor)
    assert_type(pair(x), tuple[Tensor, Tensor])
    assert_type(op.reference(x, x), Tensor)
    op.explain(x, x)
    takes_any(op)
    takes_any(pair)
    with op.isolated() as fresh:
        assert_type(fresh(x, x), Tensor)


def wrong(x: Tensor) -> None:
    op(1, 2, 3)  # error
    op(x)  # error
    op(x, x, epsilon=1.0)  # error
    op.explain(x)  # error
    op.standing(x)  # error
    op.reference(x)  # error
    pair(x, x)  # error
    with op.isolated() as fresh:
        fresh(x)  # error
"""

ROOT = Path(fusiongate.__file__).parents[1]


def mypy(folder: Path) -> list[str]:
    # Without torch, which is long to read: its tensors are no part of what is shown.
    return ["--strict", "--follow-imports=silent", "--ignore-missing-imports", "--no-site-packages", str(folder)]


def pyright(folder: Path) -> list[str]:
    return ["--pythonpath", sys.executable, str(folder)]


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_call_that_does_not_fit_the_reference_is_a_type_error(
    tmp_path: Path, checker: Callable[[Path], list[str]]
) -> None:
    if importlib.util.find_spec(checker.__name__) is None:
        pytest.skip(f"not run: {checker.__name__} is not installed")
    (tmp_path / "calls.py").write_text(SNIPPET)
    (tmp_path / "pyrightconfig.json").write_text(f'{{"include": ["calls.py"], "extraPaths": ["{ROOT}"]}}')
    done = subprocess.run(
        [sys.executable, "-m", checker.__name__, *checker(tmp_path)],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = {int(line) for line in re.findall(r"calls\.py:(\d+)[^\n]*error", done.stdout)}
    expected = {number for number, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# error")}

    assert expected == found, done.stdout + done.stderr
