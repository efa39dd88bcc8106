"""The digests of every preset on emulated x86-64 CPUs: ``nox -s portable``, which takes minutes."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from typing import ClassVar

import pytest

from fusiongate.presets import Preset, PresetProcess, judge

from .catalogue import ALL
from .functions import functions

if "FUSIONGATE_EMULATE" not in os.environ:
    pytest.skip("not run: an emulator takes minutes: nox -s portable", allow_module_level=True)
if platform.machine() not in ("x86_64", "AMD64"):
    pytest.skip("not run: the digests of x86-64 CPUs need one", allow_module_level=True)
if shutil.which("qemu-x86_64") is None:
    pytest.skip("not run: no qemu-x86_64: apt-get install qemu-user", allow_module_level=True)


@pytest.fixture(scope="module")
def here() -> Iterator[PresetProcess]:
    """A process on this machine's CPU."""
    with PresetProcess() as process:
        yield process


@pytest.fixture(scope="class")
def elsewhere(request: pytest.FixtureRequest) -> Iterator[PresetProcess]:
    """A process on another CPU, which runs one preset after another."""
    with PresetProcess(interpreter=("qemu-x86_64", "-cpu", request.cls.cpu, sys.executable)) as process:
        yield process


class AnotherCpu:
    """A class for each CPU: what pytest-xdist's ``loadscope`` gives to one worker."""

    cpu: ClassVar[str]

    @pytest.mark.parametrize("preset", [functions, *ALL], ids=lambda preset: preset.name)
    def test_a_presets_digests_are_the_same(
        self, preset: Preset, here: PresetProcess, elsewhere: PresetProcess
    ) -> None:
        judgement = judge(here.run(preset).record, elsewhere.run(preset).record)

        assert judgement, str(judgement)


class TestNehalem(AnotherCpu):
    """SSE4.2 and no AVX."""

    cpu = "Nehalem"


class TestHaswell(AnotherCpu):
    """AVX2 and fused multiply-adds."""

    cpu = "Haswell"


class TestEPYC(AnotherCpu):
    """The same from the other maker, whose libraries may choose by it."""

    cpu = "EPYC"
