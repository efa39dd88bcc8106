"""The kernels for AMD GPUs, on a machine that has none: compiled where a compiler knows them, else said not to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusiongate.errors import BuildError, NoCompiler
from fusiongate.jit import Source, Target

from . import amd_compile
from .amd_compile import Clang, compile_device_code, find_clang
from .tiny_sources import TINY, write_tiny

pytestmark = pytest.mark.usefixtures("own_cache")

MI300 = Target("hip", "gfx942")
MULTIPLY_ADD = "__global__ void MultiplyAdd(float* p) { p[0] = p[1] * p[2] + p[3]; }\n"
CONTRACTED = re.compile(r"v_(pk_)?fm(a|ac)_f32")


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A ROCm with headers, and no compiler yet; PATH holds nothing but a folder that is empty so far."""
    home = tmp_path / "rocm"
    (home / "include" / "hip").mkdir(parents=True)
    (home / "include" / "hip" / "hip_runtime.h").touch()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("ROCM_HOME", str(home))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return home


@pytest.fixture
def clang() -> Clang:
    try:
        return find_clang(MI300)
    except NoCompiler as missing:
        pytest.skip(f"not run: {missing}")


def stand_in(path: Path, *knows: str) -> None:
    """A compiler that writes a kernel's assembly for the architectures it knows, and refuses a `#error`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    accepted = "|".join(f"*--offload-arch={arch}*" for arch in knows) or "never"
    path.write_text(
        "#!/bin/sh\n"
        f'case "$*" in {accepted}) ;; *) echo "clang: error: invalid target ID" >&2; exit 1;; esac\n'
        'for word; do case "$last" in -S) file=$word;; -o) output=$word;; esac; last=$word; done\n'
        "while read -r line; do\n"
        '  case "$line" in "#error"*) echo "$file:1:2: error: ${line#\\#error }" >&2; exit 1;; esac\n'
        'done < "$file"\n'
        'echo ".amdhsa_kernel one" > "$output"\n'
    )
    path.chmod(0o755)


def lines_of(*arguments: str) -> tuple[int, list[str]]:
    """The exit status and what was said."""
    said: list[str] = []
    return amd_compile.main(arguments, said.append), said


def test_without_any_compiler_nothing_is_run_and_it_says_what_to_install(rocm: Path) -> None:
    status, said = lines_of("gfx942")
    assert 0 == status
    assert said[0].startswith(
        "not run: hip-gfx942: no clang for hip-gfx942: found no clang++; install ROCm's HIP compiler"
    )
    assert "apt-get install hipcc" in said[0]
    assert said[-1].startswith("not run: ")


def test_without_hips_headers_no_clang_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(amd_compile, "_include_folders", lambda: iter([tmp_path]))
    with pytest.raises(NoCompiler, match=r"found no hip/hip_runtime\.h; install"):
        find_clang(MI300)


def test_a_clang_that_has_not_heard_of_the_architecture_is_passed_over(rocm: Path, tmp_path: Path) -> None:
    """ROCm's own comes first, then the plain one, then the newest."""
    stand_in(tmp_path / "bin" / "clang++-14")
    with pytest.raises(NoCompiler, match=r"clang\+\+-14 cannot compile for it; install"):
        find_clang(MI300)
    stand_in(tmp_path / "bin" / "clang++-9", "gfx942")
    assert "clang++-9" == find_clang(MI300).path.name
    stand_in(tmp_path / "bin" / "clang++-19", "gfx942")
    assert "clang++-19" == find_clang(MI300).path.name
    stand_in(tmp_path / "bin" / "clang++", "gfx942")
    assert "clang++" == find_clang(MI300).path.name
    stand_in(rocm / "llvm" / "bin" / "clang++", "gfx942")
    assert rocm / "llvm" / "bin" / "clang++" == find_clang(MI300).path


def test_device_code_is_compiled_where_only_a_clang_knows_the_architecture(
    rocm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "bin" / "clang++-19", "gfx942")
    monkeypatch.setattr(amd_compile, "SOURCES", (write_tiny(tmp_path),))
    status, said = lines_of("gfx942")
    assert 0 == status
    by = f"device code of 1 kernels by {tmp_path}/bin/clang++-19, not linked"
    assert f"compiled: tiny for hip-gfx942: {by}" == said[0]


def test_a_kernel_that_does_not_compile_fails_the_run_with_the_compilers_line(
    rocm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "bin" / "clang++-19", "gfx942")
    monkeypatch.setattr(amd_compile, "SOURCES", (write_tiny(tmp_path, code="#error the moon is full\n"),))
    status, said = lines_of("gfx942")
    assert 1 == status
    assert said[0].startswith("failed: tiny for hip-gfx942: ")
    assert said[0].endswith("error: the moon is full")


def test_the_last_line_says_what_compiling_does_not_show(
    rocm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amd_compile, "AMD_DRIVER", tmp_path / "absent")
    assert "not run: no AMD GPU here" == lines_of("gfx942")[1][-1]
    monkeypatch.setattr(amd_compile, "AMD_DRIVER", tmp_path)
    assert "`nox -s gpu` runs them" in lines_of("gfx942")[1][-1]


def test_the_target_keeps_a_product_and_its_sum_apart(clang: Clang, tmp_path: Path) -> None:
    """By the flags of the target: the same source is contracted where they allow it."""
    source = write_tiny(tmp_path, code=f"#include <hip/hip_runtime.h>\n{MULTIPLY_ADD}")
    [assembly] = compile_device_code(source, clang, tmp_path, [])
    assert ".amdhsa_kernel" in assembly.read_text()
    assert CONTRACTED.search(assembly.read_text()) is None
    source.files[0].write_text(f"#include <hip/hip_runtime.h>\n#pragma clang fp contract(fast)\n{MULTIPLY_ADD}")
    [contracted] = compile_device_code(source, clang, tmp_path, [])
    assert CONTRACTED.search(contracted.read_text()) is not None


def test_a_source_that_clang_refuses_is_a_build_error(clang: Clang, tmp_path: Path) -> None:
    source: Source = write_tiny(tmp_path, code=f"{TINY}\n#error the moon is full\n")
    with pytest.raises(BuildError, match=r"tiny for hip-gfx942 did not compile with .*error: "):
        compile_device_code(source, clang, tmp_path, [])
