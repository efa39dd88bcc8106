"""What a library is built from, for which target, and by which compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusiongate.errors import NoCompiler, ProbeFailed, UsageError
from fusiongate.jit import Source, Target, forget, library, local_targets, prebuild, source_hash
from fusiongate.jit.compile import find_compiler
from fusiongate.jit.doctor import diagnose
from fusiongate.jit.targets import machine_identity

from .tiny_sources import TINY, write_tiny

pytestmark = pytest.mark.usefixtures("own_cache")

HOST = Target.host()


def test_key_follows_contents_and_not_places(tmp_path: Path) -> None:
    first = write_tiny(tmp_path / "a")
    elsewhere = write_tiny(tmp_path / "b")
    assert first.key == elsewhere.key
    (tmp_path / "b" / "headers" / "__init__.py").write_text("")
    assert first.key == elsewhere.key
    write_tiny(tmp_path / "b", addend=3)
    assert first.key != elsewhere.key
    write_tiny(tmp_path / "b", code=TINY + "\n")
    assert first.key != elsewhere.key


@pytest.mark.parametrize("quick", [False, True])
def test_a_quick_build_is_the_same_arithmetic_with_less_work_on_its_speed(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "noting"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "noted"}\nexec c++ "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))

    library(replace(write_tiny(tmp_path / "source"), quick=quick), HOST)

    (compiled,) = (line.split() for line in (tmp_path / "noted").read_text().splitlines() if " -c " in line)
    assert quick == ("-Og" == [flag for flag in compiled if flag.startswith("-O")][-1])
    assert set(HOST.flags) <= set(compiled)


def test_key_changes_with_definitions_and_with_where_bytes_stand(tmp_path: Path) -> None:
    source = write_tiny(tmp_path)
    keys = {source.key, source.with_defines("A").key, source.with_defines("A", "B").key, source.with_defines("AB").key}
    assert len(keys) == 4
    assert replace(source, quick=True).key not in keys
    one, two = tmp_path / "one.cu", tmp_path / "two.cu"
    pair = Source("pair", (one, two))
    one.write_text("ab")
    two.write_text("c")
    before = pair.key
    one.write_text("a")
    two.write_text("bc")
    assert pair.key != before


def test_source_hash_ignores_order_and_sees_every_source(tmp_path: Path) -> None:
    a, b = write_tiny(tmp_path / "a"), write_tiny(tmp_path / "b", addend=3)
    assert source_hash([a, b]) == source_hash([b, a])
    assert source_hash([a, b]) != source_hash([a])


@pytest.mark.parametrize(
    "change", [{"files": ()}, {"files": (Path("a.cpp"),)}, {"name": "../up"}, {"probe": "no colon"}], ids=str
)
def test_impossible_source_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="expected"):
        Source(**{"name": "tiny", "files": (Path("tiny.cu"),), **change})  # type: ignore[arg-type]


def test_absent_compiler_is_named_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny(tmp_path)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(NoCompiler, match=r"CXX=/nowhere/c\+\+, which is no executable; install a C\+\+17 compiler"):
        library(source, HOST)
    forget()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompiler, match=r"no c\+\+ on PATH; install a C\+\+17 compiler"):
        library(source, HOST)


@pytest.mark.parametrize(
    "target, variable, text",
    [
        (Target("cuda", "sm_90"), "CUDA_HOME", r"CUDA_HOME=\S+ is no CUDA toolkit; install the CUDA toolkit"),
        (Target("hip", "gfx942"), "ROCM_HOME", r"ROCM_HOME=\S+ holds no bin/hipcc; install ROCm's HIP compiler"),
    ],
    ids=["cuda", "hip"],
)
def test_folder_that_is_no_toolkit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    [outcome] = prebuild([write_tiny(tmp_path)], [target])
    assert isinstance(outcome.error, NoCompiler)
    with pytest.raises(NoCompiler, match=text):
        raise outcome.error


def test_compiler_that_fails_to_answer_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NoCompiler, match="does not answer"):
        find_compiler(HOST)


def test_ninja_beside_the_interpreter_is_put_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment that was not activated has its ninja there, and only there."""
    compiler = Path(shutil.which(os.environ.get("CXX", "c++")) or "")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    with pytest.raises(NoCompiler, match="pip install ninja"):
        find_compiler(HOST)
    (scripts / "ninja").write_text("#!/bin/sh\n")
    (scripts / "ninja").chmod(0o755)
    assert dict(find_compiler(HOST).environment)["PATH"] == f"{tmp_path}{os.pathsep}{scripts}"


def test_importing_the_build_package_imports_no_torch() -> None:
    program = "import fusiongate.jit, sys; sys.exit(bool({'torch', 'tvm_ffi'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_cuda_library_is_built_without_a_gpu(tmp_path: Path) -> None:
    target = Target("cuda", "sm_90")
    try:
        find_compiler(target)
    except NoCompiler as missing:
        pytest.skip(str(missing))
    [outcome] = prebuild([write_tiny(tmp_path)], [target])
    assert outcome.error is None
    assert outcome.compiled
    assert outcome.library is not None
    assert b"sm_90" in outcome.library.read_bytes()
    [again] = prebuild([write_tiny(tmp_path)], [target])
    assert (again.compiled, again.library) == (False, outcome.library)


def test_hip_library_is_built_for_the_named_architecture_without_contraction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a stand-in for hipcc that writes its arguments down and hands the file to the C++ compiler."""
    rocm = tmp_path / "rocm"
    (rocm / "bin").mkdir(parents=True)
    (rocm / "lib").mkdir()
    hipcc = rocm / "bin" / "hipcc"
    hipcc.write_text(
        "#!/bin/sh\n"
        # Without being told, it is the driver of an nvcc that it finds.
        'if [ "$HIP_PLATFORM" != amd ]; then echo "nvcc fatal" >&2; exit 1; fi\n'
        'if [ "$1" = --version ]; then echo "HIP version: 6.4.0"; exit; fi\n'
        f'echo "$@" >> {tmp_path}/arguments\n'
        f'while [ "$1" != -o ]; do shift; done\n'
        f"echo 'int nothing;' | c++ -fPIC -x c++ -c - -o \"$2\"\n"
    )
    hipcc.chmod(0o755)
    subprocess.run(["c++", "-shared", "-o", rocm / "lib" / "libamdhip64.so", "-x", "c++", os.devnull], check=True)
    monkeypatch.setenv("ROCM_HOME", str(rocm))
    [outcome] = prebuild([write_tiny(tmp_path)], [Target("hip", "gfx942")])
    assert outcome.error is None
    arguments = (tmp_path / "arguments").read_text().split()
    assert {"--offload-arch=gfx942", "-ffp-contract=off", "-O3", "-DFUSIONGATE_TARGET_HIP=1"} <= set(arguments)


@pytest.mark.parametrize(
    "text, target",
    [
        ("host", HOST),
        (str(HOST), HOST),
        ("sm_90", Target("cuda", "sm_90")),
        ("cuda-sm_120", Target("cuda", "sm_120")),
        ("gfx90a", Target("hip", "gfx90a")),
        ("hip-gfx942", Target("hip", "gfx942")),
    ],
)
def test_target_is_read_from_what_users_write(text: str, target: Target) -> None:
    assert Target.parse(text) == target
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize("text", ["", "cuda", "hopper", "sm_", "sm_9", "gfx", "cuda-gfx942", "sm_90;rm"])
def test_text_that_names_no_target_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        Target.parse(text)


@pytest.mark.parametrize(
    "arch, expected", [("sm_75", "7.5"), ("sm_90", "9.0"), ("sm_90a", "9.0a"), ("sm_100", "10.0"), ("sm_120", "12.0")]
)
def test_cuda_architecture_is_spelled_for_the_binding_layer(arch: str, expected: str) -> None:
    assert Target("cuda", arch).arch_list == expected


def test_target_of_a_device() -> None:
    assert Target.of(torch.device("cpu")) == HOST
    with pytest.raises(UsageError, match="expected a cpu or cuda device"):
        Target.of(torch.device("meta"))


def test_target_of_an_amd_device_drops_the_feature_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert Target.of(torch.device("cuda", 0)) == Target("hip", "gfx942")


def test_target_of_an_nvidia_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert Target.of(torch.device("cuda", 0)) == Target("cuda", "sm_120")


def test_kind_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(UsageError, match="target kind 'vulkan': expected one of host, cuda, hip"):
        Target("vulkan", "x86_64")  # type: ignore[arg-type]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sees two NVIDIA GPUs of one architecture, by what the build asks about them."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")


@pytest.mark.usefixtures("two_gpus")
def test_gpus_of_one_architecture_are_one_target() -> None:
    assert (HOST, Target("cuda", "sm_90")) == local_targets()


@pytest.mark.usefixtures("two_gpus")
def test_machine_with_gpus_is_diagnosed_with_their_names() -> None:
    host, cuda, hip = diagnose([])
    assert ((), None) == (host.devices, host.no_device)
    assert (("GPU 0", "GPU 1"), None) == (cuda.devices, cuda.no_device)
    assert "hip" == hip.name


def test_torch_with_a_toolkit_but_without_a_gpu_is_told_from_torch_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reasons = [state.no_device for state in diagnose([])]
    assert [
        None,
        f"torch {torch.__version__} sees no GPU",
        f"torch {torch.__version__} is built without ROCm",
    ] == reasons


def test_source_that_cannot_be_read_is_an_obstacle(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (host, *_) = diagnose([Source("tiny", (tmp_path / "absent.cu",))])
    (state,) = host.sources
    assert state.obstacle is not None
    assert "absent.cu" in state.obstacle
    assert not host.can_run


@pytest.mark.usefixtures("two_gpus")
def test_identity_of_a_gpu_names_each_kind_of_device_once() -> None:
    identity = machine_identity(Target("cuda", "sm_90"))
    assert ("cuda-sm_90", "GPU 0, GPU 1") == (identity["target"], identity["device"])
    assert identity["driver"]


@pytest.mark.usefixtures("two_gpus")
def test_identity_of_a_gpu_that_is_not_here_tells_which_are() -> None:
    with pytest.raises(ProbeFailed, match="no device for cuda-sm_120: the GPUs here are sm_90;"):
        machine_identity(Target("cuda", "sm_120"))


def test_identity_of_a_gpu_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProbeFailed, match="no device for cuda-sm_90: torch sees no GPU here;"):
        machine_identity(Target("cuda", "sm_90"))


def toolkit(folder: Path, *files: str) -> Path:
    """A folder with compilers that name a version, and whatever else is told apart by its presence."""
    for name in files:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.1\n")
        file.chmod(0o755)
    return folder


NVCC = ("bin/nvcc", "include/cuda_runtime.h")


@pytest.fixture
def _no_toolkits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "ROCM_HOME", "ROCM_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_toolkits")
def test_named_cuda_toolkit_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = toolkit(tmp_path / "cuda", *NVCC)
    monkeypatch.setenv("CUDA_PATH", str(home))
    compiler = find_compiler(Target("cuda", "sm_90"))
    assert home / "bin" / "nvcc" == compiler.path
    assert "Cuda compilation tools, release 13.0, V13.0.1" == compiler.version
    assert "9.0" == dict(compiler.environment)["TVM_FFI_CUDA_ARCH_LIST"]


@pytest.mark.usefixtures("_no_toolkits")
def test_another_host_compiler_for_nvcc_is_another_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", *NVCC)))
    before = find_compiler(Target("cuda", "sm_90"))
    monkeypatch.setenv("NVCC_CCBIN", "/usr/bin/clang++")
    after = find_compiler(Target("cuda", "sm_90"))
    assert "/usr/bin/clang++" == dict(after.environment)["NVCC_CCBIN"]
    assert before.digest != after.digest


def with_only(folder: Path, monkeypatch: pytest.MonkeyPatch, *scripts: str) -> None:
    """PATH has the C++ compiler, ninja, and these scripts."""
    found = {name: shutil.which(name) or "" for name in ("c++", "sh")}
    folder.mkdir(exist_ok=True)
    for name, path in {**found, "ninja": "/bin/sh"}.items():
        (folder / name).symlink_to(path)
    for name in scripts:
        toolkit(folder, name)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.usefixtures("_no_toolkits")
@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        ((), "no nvcc on PATH and none in /usr/local/cuda; install"),
        (("nvcc",), r"bin/nvcc has no toolkit with headers behind it; install"),
    ],
    ids=["no nvcc", "an nvcc alone"],
)
def test_cuda_toolkit_that_is_nowhere_is_missed_with_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: tuple[str, ...], expected: str
) -> None:
    with_only(tmp_path / "bin", monkeypatch, *scripts)
    # Wherever the machine has one.
    monkeypatch.setattr("fusiongate.jit.compile._is_cuda_home", lambda _: False)
    with pytest.raises(NoCompiler, match=expected):
        find_compiler(Target("cuda", "sm_90"))


@pytest.mark.usefixtures("_no_toolkits")
def test_hip_compiler_that_is_nowhere_is_missed_with_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/opt/rocm").exists():
        pytest.skip("/opt/rocm is here")
    with_only(tmp_path / "bin", monkeypatch)
    with pytest.raises(NoCompiler, match="no hipcc on PATH and none in /opt/rocm; install"):
        find_compiler(Target("hip", "gfx942"))


def test_compiler_that_cannot_be_run_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NoCompiler, match=r"the compiler does not answer: .*No such file or directory"):
        find_compiler(HOST)
