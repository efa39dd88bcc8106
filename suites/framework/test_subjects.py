"""A subject's launches are counted where its launcher is looked up."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusiongate.errors import UsageError
from fusiongate.subjects import Spy, Subject


class Kernel:
    """Launches by index, as Triton's kernels do."""

    version = 3

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda x: x + len(grid)


@pytest.fixture
def foreign() -> Iterator[types.ModuleType]:
    """Somebody's module: a launcher, a second name for it, a kernel with a grid, and a class that launches."""
    module = types.ModuleType("somebodys_module")
    source = """
def launch(x):
    return x + 1

copied = launch

class Holder:
    @staticmethod
    def static(x):
        return x + 2

    def method(self, x):
        return x + 3

def call(x):
    return copied(x)
"""
    exec(compile(source, "somebodys_module", "exec"), module.__dict__)
    module.kernel = Kernel()  # type: ignore[attr-defined]
    sys.modules["somebodys_module"] = module
    yield module
    del sys.modules["somebodys_module"]


def subject(call: Any, fused: Any, **options: Any) -> Subject:
    return Subject("somebodys", call=call, reference=lambda x: x, fused=fused, **options)


def test_an_attribute_is_counted_where_it_is_looked_up(foreign: Any) -> None:
    with subject(foreign.call, "somebodys_module:copied").trial() as trial:
        assert 4 == trial.call(3)
        assert 1 == trial.launches


def test_a_name_that_is_not_looked_up_counts_nothing(foreign: Any) -> None:
    """The copy made by ``from module import launch`` is another name."""
    with subject(foreign.call, "somebodys_module:launch").trial() as trial:
        trial.call(3)
        assert 0 == trial.launches


def test_an_object_is_counted_under_all_its_names(foreign: Any) -> None:
    with subject(foreign.call, foreign.launch).trial() as trial:
        trial.call(3)
        foreign.launch(3)
        assert 2 == trial.launches


def test_a_launch_that_fails_is_not_counted(foreign: Any) -> None:
    with subject(foreign.call, "somebodys_module:copied").trial() as trial:
        with pytest.raises(TypeError):
            trial.call("three")
        assert 0 == trial.launches


def test_a_kernel_with_a_grid_is_counted_by_its_launches(foreign: Any) -> None:
    def call(x: int) -> int:
        result: int = foreign.kernel[(1, 2)](x)
        return result

    with subject(call, "somebodys_module:kernel").trial() as trial:
        foreign.kernel[(1, 2)]
        assert 0 == trial.launches
        assert 5 == trial.call(3)
        assert 1 == trial.launches
        assert 3 == foreign.kernel.version


@pytest.mark.parametrize("path, call", [("Holder.static", "static"), ("Holder.method", "method")])
def test_a_method_is_counted(foreign: Any, path: str, call: str) -> None:
    def called(x: int) -> int:
        result: int = getattr(foreign.Holder(), call)(x)
        return result

    due = {"static": 5, "method": 6}[call]
    with subject(called, f"somebodys_module:{path}").trial() as trial:
        assert due == trial.call(3)
        assert 1 == trial.launches
    assert due == called(3)


def test_everything_is_put_back_even_after_an_error(foreign: Any) -> None:
    launch = foreign.launch
    with pytest.raises(ZeroDivisionError), subject(foreign.call, launch).trial():
        raise ZeroDivisionError
    assert launch is foreign.launch
    assert launch is foreign.copied


def test_a_stand_in_launches_instead_and_is_counted(foreign: Any) -> None:
    with subject(foreign.call, "somebodys_module:copied").trial(lambda launcher: lambda x: launcher(x) * 10) as trial:
        assert 40 == trial.call(3)
        assert 1 == trial.launches


def test_reset_is_called_around_each_trial(foreign: Any) -> None:
    resets: list[str] = []
    with subject(foreign.call, foreign.launch, reset=lambda: resets.append("reset")).trial():
        assert ["reset"] == resets
    assert ["reset", "reset"] == resets


def test_without_a_predicate_nothing_is_declined(foreign: Any) -> None:
    assert None is subject(foreign.call, foreign.launch).declined(3)
    assert "odd" == subject(foreign.call, foreign.launch, declines=lambda x: "odd" if x % 2 else None).declined(3)


@pytest.mark.parametrize(
    "fused, told",
    [
        ("somebodys_module", 'write "package.module:attribute"'),
        (":launch", 'write "package.module:attribute"'),
        ("nobodys_module:launch", "cannot import nobodys_module"),
        ("somebodys_module:lunch", "somebodys_module has no attribute 'lunch'"),
        ("somebodys_module:Holder.lunch", "somebodys_module.Holder has no attribute 'lunch'"),
        (lambda x: x, "no module holds <function"),
    ],
)
def test_a_launcher_that_cannot_be_found_is_told_at_once(foreign: Any, fused: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        subject(foreign.call, fused)
    assert told in str(caught.value)


def test_threads_lose_no_count() -> None:
    spy = Spy(lambda: None)
    threads = [threading.Thread(target=lambda: [spy() for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 8000 == spy.launches


def test_a_foreign_gate_publishes_no_counts(foreign: Any) -> None:
    with subject(foreign.call, foreign.launch).trial() as trial:
        assert None is trial.counts
        assert torch.equal(torch.ones(1), trial.call(torch.zeros(1)))


@pytest.mark.parametrize(
    "name", ["", "../../elsewhere", "a/b", "a\\b", ".hidden", "two\nlines", "\x1b[31m", "x" * 101, 3]
)
def test_a_subjects_name_is_fit_for_a_file(name: Any) -> None:
    with pytest.raises(UsageError, match="expected a name of 1 to 100 printable characters"):
        Subject(name, call=abs, reference=abs, fused="math:floor")
