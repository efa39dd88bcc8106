"""The page about the kernels' contracts: what it says of them is what they do."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.gate.fusion import Fusion
from fusiongate.gate.states import Reason
from fusiongate.kernels import FUSIONS, composite_rms_norms, predicates, rms_norms
from fusiongate.report.contracts import DOMAINS, GATE_REASONS, REASONS, page

PAGE = Path(__file__).parents[2] / "docs" / "contracts.md"
BY_NAME = {op.name: op for op in FUSIONS}
WEIGHTED = ("rms_norm_modulate", "composite_rms_norm_modulate")
GIVEN = [(name, reason) for name, domain in DOMAINS.items() for reason in domain.reasons]


def host(name: str) -> Fusion:
    """The build whose operands every machine can make."""
    op = BY_NAME[name].host
    assert op is not None
    return op


def operands(name: str, **changed: Any) -> tuple[Any, ...]:
    """A call that the fusion takes, save for what is changed of it."""
    x, row = torch.zeros(2, 3, 128).bfloat16(), torch.zeros(2, 1, 128).bfloat16()
    takes: dict[str, Any] = {"x": x, "scale": row, "shift": row}
    if "norm" in name:
        takes["eps"] = 1e-6
    if name in WEIGHTED:
        takes["weight"] = None
    assert set(changed) <= set(takes)
    return tuple((takes | changed).values())


def of_width(name: str, columns: int) -> tuple[Any, ...]:
    """A call with rows of D columns."""
    row = torch.zeros(2, 1, columns).bfloat16()
    return operands(name, x=torch.zeros(2, 1, columns).bfloat16(), scale=row, shift=row)


def declined(op: Fusion, args: tuple[Any, ...]) -> str | None:
    """What the fusion's own predicate says."""
    reason: str | None = op.declines(*args)
    return reason


# No memory has as many rows as make a grid too large; without columns they need none.
CALLS: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "alignment": lambda name: operands(name, shift=torch.zeros(257).bfloat16()[1:].reshape(2, 1, 128)),
    "autocast": operands,
    "cpu": operands,
    "device": lambda name: operands(name, x=torch.empty(2, 3, 128, device="meta")),
    "dtype": lambda name: operands(name, x=torch.zeros(2, 3, 128, dtype=torch.float64)),
    "eps": lambda name: operands(name, eps=None),
    "mixed-device": lambda name: operands(name, scale=torch.empty(2, 1, 128, device="meta")),
    "mixed-dtype": lambda name: operands(name, scale=torch.zeros(2, 1, 128).half()),
    "per-token": lambda name: operands(name, scale=torch.zeros(2, 3, 128).bfloat16()),
    "rank": lambda name: operands(name, x=torch.zeros(3, 128).bfloat16()),
    "reduction-order": lambda name: of_width(name, 130),
    "shape": lambda name: operands(name, scale=torch.zeros(3, 1, 128).bfloat16()),
    "stride": lambda name: operands(name, x=torch.zeros(3, 2, 128).bfloat16().transpose(0, 1)),
    "too-large": lambda name: operands(
        name,
        x=torch.empty(1, 1 << 31, 0).bfloat16(),
        scale=torch.empty(1, 1, 0).bfloat16(),
        shift=torch.empty(1, 1, 0).bfloat16(),
    ),
}
"""For each reason a call that is declined for it."""


@pytest.mark.parametrize("name, reason", GIVEN, ids=lambda part: part)
def test_each_listed_reason_is_given(name: str, reason: str) -> None:
    op = BY_NAME[name] if reason == "cpu" else host(name)
    with torch.autocast("cpu", torch.bfloat16, enabled=reason == "autocast"):
        assert reason == declined(op, CALLS[reason](name))


@pytest.mark.parametrize("name", DOMAINS)
def test_the_call_that_the_others_are_made_from_is_taken(name: str) -> None:
    """Otherwise a reason above could come from something else than what was changed."""
    assert declined(host(name), operands(name)) is None


def strange(name: str) -> Iterator[tuple[Any, ...]]:
    """Every operand in turn replaced by everything that a caller might have put there."""
    things: list[Any] = [None, True, 1, 0.5, "x", torch.zeros(()), torch.zeros(2, 3, 4, 128), torch.zeros(128)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.bool):
        shapes = ((2, 3, 128), (2, 1, 128), (1, 1, 128), (2, 3, 130), (2, 1, 130), (128,), (2, 128), (0, 3, 128))
        things += [torch.zeros(shape, dtype=dtype) for shape in shapes]
    things += [torch.zeros(256)[::2], torch.zeros(129)[1:], torch.empty(2, 1, 128, device="meta")]
    things += [torch.zeros(2, 1, 256).bfloat16()[..., ::2], torch.zeros(2, 128, 3).bfloat16().mT]
    count = len(operands(name))
    for place, thing in itertools.product(range(count), things):
        args = list(operands(name))
        args[place] = thing
        yield tuple(args)
    yield from (of_width(name, columns) for columns in (1, 4, 6, 64, 132, 32768, 32772))


@pytest.mark.parametrize("name", DOMAINS)
def test_no_other_reason_is_given(name: str) -> None:
    """By calls with strange operands; what they may miss, the next test reads in the source."""
    for op in (BY_NAME[name], host(name)):
        reasons = {declined(op, args) for args in strange(name)}
        assert reasons - {None} <= set(DOMAINS[name].reasons)


def results(value: ast.expr | None) -> Iterator[str]:
    """The words that a returned expression can be."""
    if isinstance(value, ast.IfExp):
        yield from results(value.body)
        yield from results(value.orelse)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value


def test_every_reason_in_the_predicates_source_is_listed() -> None:
    returned = {
        reason
        for module in (predicates, rms_norms, composite_rms_norms)
        for function in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(function, ast.FunctionDef) and function.returns is not None
        if ast.unparse(function.returns) == "str | None"
        for statement in ast.walk(function)
        if isinstance(statement, ast.Return)
        for reason in results(statement.value)
    }
    assert returned == set(REASONS)
    assert returned == {reason for domain in DOMAINS.values() for reason in domain.reasons}


@pytest.mark.parametrize("name", DOMAINS)
def test_the_listed_widths_are_the_ones_that_are_taken(name: str) -> None:
    domain = DOMAINS[name]
    op = host(name)
    step = domain.multiple_of
    assert declined(op, of_width(name, domain.shortest)) is None
    assert declined(op, of_width(name, domain.shortest + step)) is None
    if domain.shortest > step:
        assert declined(op, of_width(name, domain.shortest - step)) is not None
    if step > 1:
        assert declined(op, of_width(name, 2 * domain.shortest + 1)) is not None
    if domain.longest is not None:
        assert declined(op, of_width(name, domain.longest)) is None
        assert declined(op, of_width(name, domain.longest + step)) is not None


@pytest.mark.parametrize("name", DOMAINS)
def test_the_listed_dtypes_are_the_ones_that_are_taken(name: str) -> None:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    taken = {
        word
        for word, dtype in dtypes.items()
        if declined(host(name), tuple(arg.to(dtype) if isinstance(arg, Tensor) else arg for arg in operands(name)))
        is None
    }
    assert taken == set(re.findall(r"\w+\d\d", DOMAINS[name].dtypes))


def test_every_fusion_has_its_row() -> None:
    assert list(DOMAINS) == [op.name for op in FUSIONS]
    for op in FUSIONS:
        assert page().count(f"| `{op.name}` | CUDA, HIP, host | {op.contract}") == 1


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_of_the_gate_has_its_row(reason: Reason) -> None:
    told = GATE_REASONS[reason]
    assert f"| `{reason.value}` | {told.happened} | {told.remedy} |" in page().splitlines()
    assert told.happened
    assert told.remedy


def test_no_reason_of_a_predicate_is_one_of_the_gate() -> None:
    """They are counted under the same key."""
    assert not set(REASONS) & set(Reason)


@pytest.mark.skipif(not PAGE.is_file(), reason="needs the source tree")
def test_the_committed_page_is_the_generated_one(tmp_path: Path) -> None:
    written = tmp_path / "contracts.md"
    subprocess.run([sys.executable, "-m", "fusiongate.report.contracts", written], check=True, timeout=120)
    assert written.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_without_a_file_to_write_it_says_what_is_expected() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fusiongate.report.contracts"], check=False, capture_output=True, text=True, timeout=120
    )
    assert (1, "") == (done.returncode, done.stdout)
    assert "fusiongate.report.contracts: expected one argument, the file to write: docs/contracts.md\n" == done.stderr


def test_the_example_of_a_rounding_boundary_holds() -> None:
    [example] = re.findall(r"```python\n(.*?)```", page(), re.DOTALL)
    assert "assert" in example
    exec(example, {})
