"""Stopwatches: what arms keep between samples, and how many calls a sample is."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fusiongate.timing.stopwatches import Arm, Rotating, WallStopwatch, calls_for


def sets(number: int) -> list[tuple[Tensor]]:
    return [(torch.full((4,), float(value)),) for value in range(number)]


def test_an_arm_keeps_as_many_outputs_alive_as_there_are_sets_of_inputs() -> None:
    """So that the memory of outputs rotates as the inputs do."""
    alive: list[weakref.ref[Tensor]] = []

    def call(x: Tensor) -> Tensor:
        result = x + 1
        alive.append(weakref.ref(result))
        return result

    rotating = Rotating(Arm("a", call), sets(3))
    rotating.run(7)

    assert [False] * 4 + [True] * 3 == [ref() is not None for ref in alive]


def test_no_arm_keeps_its_outputs_beyond_a_sample() -> None:
    """The next arm can be given the same memory: where an output lies moves a kernel's time."""
    alive: list[weakref.ref[Tensor]] = []

    def call(x: Tensor) -> Tensor:
        result = x + 1
        alive.append(weakref.ref(result))
        return result

    watch = WallStopwatch([Arm("a", call), Arm("b", call)], sets(2))
    watch.sample([0, 1, 1, 0])

    assert alive
    assert not any(ref() is not None for ref in alive)


def test_the_calls_that_are_made_for_samples_are_counted() -> None:
    called = 0

    def call(x: Tensor) -> Tensor:
        nonlocal called
        called += 1
        return x + 1

    watch = WallStopwatch([Arm("a", call), Arm("b", lambda x: x * 2)], sets(2))
    before, made = called, list(watch.made)
    watch.sample([0, 1, 1, 0])

    assert called - before == watch.made[0] - made[0] == 2 * watch.calls[0]


def test_outputs_are_computed_again_over_overwritten_memory() -> None:
    watch = WallStopwatch([Arm("a", lambda x: x + 1), Arm("b", lambda x: x * 2)], sets(2))
    watch.sample([0, 1])

    assert [1.0, 2.0] == sorted(float(output[0]) for _, output in watch.outputs(0))


def test_arms_of_about_the_same_length_get_the_same_number_of_calls() -> None:
    assert [10, 10, 2] == calls_for([1e-4, 1.1e-4, 6e-4], [1, 1, 1])


def test_a_sample_is_whole_turns_of_the_rotation() -> None:
    assert [12, 4] == calls_for([1e-4, 5e-4], [4, 4])
