"""Exceptions have one base, one sentence each, and say what to do."""

from __future__ import annotations

import copy
import inspect

import pytest

from fusiongate import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_every_exception_has_the_common_base_and_a_sentence(name: str) -> None:
    kind = getattr(errors, name)

    assert issubclass(kind, errors.FusiongateError)
    assert inspect.getdoc(kind) != inspect.getdoc(kind.__base__)
    assert (inspect.getdoc(kind) or "").partition("\n")[0].endswith(".")


def test_all_of_them_are_listed() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}

    assert defined == set(errors.__all__)


def test_a_poisoned_device_is_named_with_its_first_error() -> None:
    error = errors.PoisonedDevice("cuda:1", RuntimeError("illegal memory access"))

    assert str(error) == (
        "cuda:1: the device context is unusable after RuntimeError: illegal memory access; nothing more can run on it "
        "in this process: start a new one"
    )


def test_a_fall_back_names_op_path_and_reason() -> None:
    error = errors.FallbackError("modulate", "reference", "dtype")

    assert (error.op, error.path, error.reason) == ("modulate", "reference", "dtype")
    assert str(error).startswith("modulate took the reference path (reason: dtype) inside require_fused()")


@pytest.mark.parametrize(
    "error",
    [
        errors.FallbackError("modulate", "reference", "dtype"),
        errors.PoisonedDevice("cuda:1", RuntimeError("illegal memory access")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_with_fields_survive_the_way_between_processes(error: errors.FusiongateError) -> None:
    """A pool of the caller's processes sends its errors by the protocol that copying goes by too."""
    sent = copy.copy(error)

    assert sent is not error
    assert (type(error), str(error), vars(error)) == (type(sent), str(sent), vars(sent))
