"""Compile every kernel for AMD GPUs, on a machine that may have none.

``python -m fusiongate.suites.framework.amd_compile [architecture …]``; without any, gfx90a and gfx942. Where hipcc
knows an architecture it builds and links the libraries; where only a newer clang does, that one compiles the device
code. Exits with 1 if a kernel fails to compile, and with 0 where there is no compiler for an architecture: nothing has
failed then, and it is reported as not run.

Distributions ship a hipcc that is older than the newest GPUs beside a clang that is not. Such a clang finds no device
libraries of its own version to link against, so it stops at the assembly.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tvm_ffi.libinfo

from fusiongate.errors import BuildError, NoCompiler
from fusiongate.jit import Source, Target, prebuild
from fusiongate.jit.compile import find_compiler
from fusiongate.kernels import SOURCES

__all__ = ["ARCHITECTURES", "Clang", "Compiled", "compile_all", "compile_device_code", "find_clang", "main"]

ARCHITECTURES = ("gfx90a", "gfx942")
"""MI200 and MI300."""

AMD_DRIVER = Path("/dev/kfd")
"""Where Linux has an AMD GPU that computes."""

_INSTALL = (
    "install ROCm's HIP compiler, or a newer clang with HIP's headers "
    "(Debian 12: apt-get install hipcc libamdhip64-dev rocm-device-libs clang-19)"
)
_EMPTY = "#include <hip/hip_runtime.h>\n__global__ void nothing(float* p) { p[threadIdx.x] = 0; }\n"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of one kernel for one architecture, or of the architecture as a whole."""

    name: str
    """The kernel and the architecture, or the architecture alone where nothing could be tried."""
    outcome: str
    """``compiled``, ``failed`` or ``not run``."""
    story: str
    """By what, where it lies, or why not."""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.name}: {self.story}"


def compile_all(sources: Sequence[Source], target: Target, folder: Path) -> Iterator[Compiled]:
    """Compile sources for one architecture, as completely as the compilers here can; assembly goes to ``folder``."""
    if hipcc_knows(target):
        for built in prebuild(sources, [target]):
            name = f"{built.source.name} for {target}"
            if built.error is None:
                yield Compiled(name, "compiled", f"linked by hipcc: {built.library}")
            else:
                yield Compiled(name, "failed", str(built.error))
        return
    try:
        clang = find_clang(target)
    except NoCompiler as missing:
        yield Compiled(str(target), "not run", str(missing))
        return
    headers = [Path(path) for path in tvm_ffi.libinfo.include_paths()]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield from pool.map(lambda source: _device_code(source, clang, folder, headers), sources)


def _device_code(source: Source, clang: Clang, folder: Path, headers: Sequence[Path]) -> Compiled:
    name = f"{source.name} for {clang.target}"
    try:
        assembly = compile_device_code(source, clang, folder, headers)
    except BuildError as error:
        return Compiled(name, "failed", str(error))
    kernels = sum(file.read_text(encoding="utf-8").count(".amdhsa_kernel ") for file in assembly)
    return Compiled(name, "compiled", f"device code of {kernels} kernels by {clang.path}, not linked")


def hipcc_knows(target: Target) -> bool:
    """Whether there is a hipcc, and its compiler has heard of the architecture."""
    try:
        compiler = find_compiler(target)
    except NoCompiler:
        return False
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.cu"
        empty.touch()
        command = [str(compiler.path), f"--offload-arch={target.arch}", "-c", str(empty), "-o", f"{folder}/empty.o"]
        surroundings = dict(compiler.environment)
        return subprocess.run(command, capture_output=True, check=False, env=surroundings).returncode == 0


@dataclass(frozen=True, slots=True)
class Clang:
    """A clang that compiles HIP for one architecture."""

    path: Path
    """The executable."""
    target: Target
    """The architecture."""
    include: Path
    """The folder that holds hip/hip_runtime.h."""

    def command(self, source: Path, output: Path, *flags: str) -> list[str]:
        """The words that compile a file's device code to assembly."""
        language = ["-x", "hip", "--cuda-device-only", "-nogpulib", f"--offload-arch={self.target.arch}", "-std=c++17"]
        # As hipcc defines it; the headers of some releases ask for it before they look at the compiler.
        platform = ["-D__HIP_PLATFORM_AMD__=1", f"-I{self.include}"]
        return [str(self.path), *language, *platform, *flags, "-S", str(source), "-o", str(output)]


def find_clang(target: Target) -> Clang:
    """Return the first clang here that compiles HIP for a target: ROCm's own, the plain one, then the newest.

    Raises
    ------
    NoCompiler
        None does; the message says what to install.
    """
    include = next((path for path in _include_folders() if (path / "hip" / "hip_runtime.h").is_file()), None)
    if include is None:
        raise NoCompiler(f"no clang for {target}: found no hip/hip_runtime.h; {_INSTALL}")
    tried = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.hip"
        source.write_text(_EMPTY, encoding="utf-8")
        for path in _clangs():
            clang = Clang(path, target, include)
            command = clang.command(source, source.with_suffix(".s"))
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return clang
            tried.append(path.name)
    found = f"{', '.join(tried)} cannot compile for it" if tried else "found no clang++"
    raise NoCompiler(f"no clang for {target}: {found}; {_INSTALL}")


def compile_device_code(source: Source, clang: Clang, folder: Path, include: Sequence[Path]) -> list[Path]:
    """Compile a source's files to assembly in a folder and return the assembly files.

    Parameters
    ----------
    source
        The files, their headers and definitions.
    clang
        From :func:`find_clang`.
    folder
        Where the assembly is written.
    include
        Folders of the binding layer's headers.

    Raises
    ------
    BuildError
        The compiler refused a file; the message holds its first error.
    """
    flags = [*clang.target.flags, *(f"-D{define}" for define in source.defines)]
    flags += [f"-I{path}" for path in (*source.include, *include)]
    assembled = []
    for file in source.files:
        output = folder / f"{source.name}-{file.stem}-{clang.target.arch}.s"
        command = clang.command(file, output, *flags)
        told = subprocess.run(command, capture_output=True, check=False, text=True, errors="replace")
        if told.returncode != 0:
            lines = told.stderr.splitlines()
            first = next((line for line in lines if "error:" in line), f"exit status {told.returncode}")
            raise BuildError(f"{source.name} for {clang.target} did not compile with {clang.path}: {first}")
        assembled.append(output)
    return assembled


def _include_folders() -> Iterator[Path]:
    named = [os.environ[variable] for variable in ("ROCM_HOME", "ROCM_PATH") if os.environ.get(variable)]
    for home in (*named, "/opt/rocm", "/usr"):
        yield Path(home) / "include"


def _clangs() -> Iterator[Path]:
    named = [os.environ[variable] for variable in ("ROCM_HOME", "ROCM_PATH") if os.environ.get(variable)]
    for home in (*named, "/opt/rocm"):
        own = Path(home) / "llvm" / "bin" / "clang++"
        if own.is_file():
            yield own
    plain = shutil.which("clang++")
    if plain is not None:
        yield Path(plain)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    numbered = [
        (int(match[1]), path)
        for folder in folders
        for path in Path(folder).glob("clang++-*")
        if (match := re.fullmatch(r"clang\+\+-(\d+)", path.name))
    ]
    yield from (path for _, path in sorted(numbered, key=lambda entry: -entry[0]))


def main(arguments: Sequence[str], say: Callable[[str], object] = lambda text: sys.stdout.write(f"{text}\n")) -> int:
    """Compile for the named architectures; 1 if a kernel failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for arch in arguments or ARCHITECTURES:
            for compiled in compile_all(SOURCES, Target("hip", arch), Path(folder)):
                say(str(compiled))
                failed += compiled.outcome == "failed"
    if AMD_DRIVER.exists():
        say("not run: these were compiled only; `nox -s gpu` runs them on this machine's AMD GPU")
    else:
        say("not run: no AMD GPU here")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
