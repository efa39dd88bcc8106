"""Platform keys come from vendor and arch, and environments say in words what differs."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusiongate import platforms, switches
from fusiongate.errors import UsageError
from fusiongate.platforms import Environment, available_cores, environment, platform_of


def made(**changes: Any) -> Environment:
    """An environment of a GPU machine that is not this one."""
    known = Environment(
        platform="cuda-sm_90",
        device_name="NVIDIA H200",
        torch="2.11.0+cu130",
        runtime="cuda 13.0",
        driver="580.1",
        python="3.12.3",
        threads=8,
        libraries={"triton": "3.6.0"},
        switches={"cudnn.benchmark": "off"},
    )
    return dataclasses.replace(known, **changes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Properties of the one GPU that torch then reports, for tests to fill in."""
    properties = SimpleNamespace(major=9, minor=0, gcnArchName="")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    return properties


@pytest.mark.usefixtures("gpu")
def test_nvidia_is_keyed_by_its_capability() -> None:
    assert platform_of("cuda:0") == "cuda-sm_90"


@pytest.mark.parametrize("arch", ["gfx942:sramecc+:xnack-", "gfx942"])
def test_amd_is_keyed_by_its_arch_although_its_capability_reads_like_hopper(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    gpu.gcnArchName = arch
    gpu.minor = 4

    assert platform_of("cuda") == "rocm-gfx942"


@pytest.mark.usefixtures("gpu")
def test_without_a_device_the_gpu_is_meant() -> None:
    assert platform_of() == platform_of("cuda")


@pytest.mark.parametrize(
    ("machine", "capability", "key"),
    [
        ("x86_64", "AVX512", "cpu-x86_64-avx512"),
        ("AMD64", "AVX2", "cpu-x86_64-avx2"),
        ("x86_64", "NO AVX", "cpu-x86_64-default"),
        ("arm64", "DEFAULT", "cpu-aarch64-default"),
        ("aarch64", "SVE256", "cpu-aarch64-sve256"),
    ],
)
def test_a_cpu_is_keyed_by_machine_and_vector_isa(
    monkeypatch: pytest.MonkeyPatch, machine: str, capability: str, key: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    assert platform_of("cpu") == key


HELD = made(platform="cpu-x86_64-default", threads=1, switches={**switches.PORTABLE, "cudnn.benchmark": "off"})


def test_digests_of_a_process_that_was_held_to_one_instruction_set_are_any_x86_64_cpus() -> None:
    assert "cpu-x86_64" == HELD.digest_platform


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (dataclasses.replace(HELD, threads=2), "cpu-x86_64-default"),
        (dataclasses.replace(HELD, platform="cpu-aarch64-sve256"), "cpu-aarch64-sve256"),
        (dataclasses.replace(HELD, platform="cpu-x86_64-avx512", switches={}), "cpu-x86_64-avx512"),
        *(
            (dataclasses.replace(HELD, switches={**HELD.switches, name: "changed"}), "cpu-x86_64-default")
            for name in switches.PORTABLE
        ),
        (made(), "cuda-sm_90"),
    ],
)
def test_digests_of_any_other_process_are_its_platforms(other: Environment, key: str) -> None:
    """A setting that is another, or missing, could be what moved the bits."""
    assert key == other.digest_platform


def test_the_c_library_stands_beside_a_cpus_results_and_not_beside_a_gpus(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch and NumPy call its functions on a CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(platforms, "_libc", lambda: {"glibc": "2.99"})

    assert "2.99" == environment("cpu").libraries["glibc"]
    assert "glibc" not in environment("cuda").libraries


@pytest.mark.parametrize(("told", "expected"), [(("glibc", "2.36"), {"glibc": "2.36"}), (("", ""), {})])
def test_a_c_library_that_python_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch, told: tuple[str, str], expected: dict[str, str]
) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: told)
    assert expected == platforms._libc.__wrapped__()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu please", "'gpu please' is no device: expected cpu, cuda or cuda:<number>"),
        ("meta", "meta has no platform: expected a CPU, CUDA or ROCm device"),
        ("cuda:7", "cuda:7 is not here: this process sees 1 GPUs"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_a_device_that_is_not_here_is_one_clear_line(device: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        platform_of(device)

    assert str(raised.value) == message


def test_this_machine_has_an_environment() -> None:
    here = environment("cpu")

    assert here.platform == platform_of("cpu")
    assert here.torch == str(torch.__version__)
    assert here.threads == torch.get_num_threads()
    assert (here.runtime, here.driver) == (None, None)
    assert here.device_name


def test_an_environment_does_not_differ_from_itself() -> None:
    assert made().diff(made()) == []


def test_differences_are_told_in_words_in_both_directions() -> None:
    other = made(
        torch="2.12.0+cu130",
        driver=None,
        device_name="NVIDIA H100",
        libraries={"diffusers": "0.37.0"},
        switches={"cudnn.benchmark": "on"},
    )

    assert made().diff(other) == [
        "device name NVIDIA H200 → NVIDIA H100",
        "torch 2.11.0+cu130 → 2.12.0+cu130",
        "driver 580.1 → none",
        "diffusers not installed → 0.37.0",
        "triton 3.6.0 → not installed",
        "cudnn.benchmark off → on",
    ]
    assert other.diff(made())[1] == "torch 2.12.0+cu130 → 2.11.0+cu130"


@pytest.mark.parametrize("changes", [{f.name: "another"} for f in dataclasses.fields(Environment)[:6]])
def test_every_field_is_looked_at(changes: dict[str, str]) -> None:
    assert len(made().diff(made(**changes))) == 1


@pytest.mark.parametrize("variable", switches.VARIABLES)
def test_a_variable_that_moves_bits_is_recorded(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv(variable, raising=False)
    before = environment("cpu")
    monkeypatch.setenv(variable, "changed")

    assert before.diff(environment("cpu")) == [f"{variable} unset → changed"]


def test_settings_of_torch_are_recorded() -> None:
    before = environment("cpu")
    torch.use_deterministic_algorithms(True)
    try:
        assert before.diff(environment("cpu")) == ["deterministic_algorithms off → on"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_flushing_of_subnormals_is_seen_although_torch_cannot_tell_it() -> None:
    before = environment("cpu")
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        assert before.diff(environment("cpu")) == ["flush_denormal off → on"]
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("known", [made(), made(runtime=None, driver=None, libraries={}, switches={})])
def test_an_environment_survives_json(known: Environment) -> None:
    assert Environment.from_json(json.loads(json.dumps(known.to_json()))) == known


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threads": "8"}, "Expected `int`, got `str` - at `$.threads`"),
        ({"threads": True}, "Expected `int`, got `bool` - at `$.threads`"),
        ({"threads": 0}, "Expected `int` >= 1 - at `$.threads`"),
        ({"platform": ""}, "Expected `str` of length >= 1 - at `$.platform`"),
        ({"driver": 580}, "Expected `str | null`, got `int` - at `$.driver`"),
        ({"libraries": {"triton": 3}}, "Expected `str`, got `int` - at `$.libraries[...]`"),
        ({"switches": []}, "Expected `object`, got `array` - at `$.switches`"),
        ({"colour": "red"}, "Object contains unknown field `colour`"),
    ],
)
def test_a_damaged_record_names_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        Environment.from_json(made().to_json() | changes)

    assert str(raised.value).startswith(f"environment record: {message}; record it again, or read it with the version")


def test_a_record_that_is_none_or_lacks_a_field_is_refused() -> None:
    record = made().to_json()
    del record["torch"]

    with pytest.raises(UsageError, match=r"^environment record: Object missing required field `torch`;"):
        Environment.from_json(record)
    with pytest.raises(UsageError, match=r"^environment record: Expected `object`, got `array`; record it again"):
        Environment.from_json([])


def test_the_module_loads_without_torch() -> None:
    """The command line imports it before it knows whether torch is wanted."""
    code = "import sys, fusiongate.platforms, fusiongate.errors; print('torch' in sys.modules)"

    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert told.stdout == "False\n"


def driver(monkeypatch: pytest.MonkeyPatch, amd: bool, **nvml: object) -> str | None:
    """The driver's version as it is found anew, by way of an NVML with these functions."""
    fake = SimpleNamespace(**{"nvmlInit": lambda: None, "nvmlShutdown": lambda: None, **nvml})
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return platforms._driver.__wrapped__(amd)


@pytest.mark.parametrize("answer", ["580.95", b"580.95"], ids=["text", "bytes"])
def test_an_nvidia_drivers_version_is_nvmls(monkeypatch: pytest.MonkeyPatch, answer: str | bytes) -> None:
    """Older releases of the library answer in bytes."""
    assert "580.95" == driver(monkeypatch, amd=False, nvmlSystemGetDriverVersion=lambda: answer)


def test_a_driver_that_does_not_answer_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def refuse() -> str:
        raise RuntimeError("NVML: driver not loaded")

    assert driver(monkeypatch, False, nvmlSystemGetDriverVersion=refuse, nvmlShutdown=lambda: closed.append(1)) is None
    assert [1] == closed


@pytest.mark.parametrize(("written", "expected"), [("6.12.12\n", "6.12.12"), ("\n", None), (None, None)])
def test_an_amd_drivers_version_is_its_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str | None, expected: str | None
) -> None:
    version = tmp_path / "version"
    if written is not None:
        version.write_text(written)
    monkeypatch.setattr(platforms, "Path", lambda place: {"/sys/module/amdgpu/version": version}[place])
    assert expected == driver(monkeypatch, amd=True)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n", "Some CPU @ 3 GHz"),
        ("processor\t: 0\n", "what Python says"),
        (None, "what Python says"),
    ],
)
def test_a_cpus_name_is_its_model_where_linux_tells_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str | None, expected: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if written is not None:
        cpuinfo.write_text(written)
    monkeypatch.setattr(platforms, "Path", lambda place: {"/proc/cpuinfo": cpuinfo}[place])
    monkeypatch.setattr(platform, "processor", lambda: "what Python says")
    assert expected == platforms._cpu_name.__wrapped__()


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert 3 == available_cores()
    monkeypatch.delattr(os, "sched_getaffinity")
    assert 64 == available_cores()
