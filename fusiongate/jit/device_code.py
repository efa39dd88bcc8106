"""AMD device code alone, by any clang that knows the architecture: proof that a source compiles, and nothing to load.

Distributions ship a hipcc that is older than the newest GPUs beside a clang that is not. Such a clang finds no device
libraries of its own version to link against, so this stops at the assembly.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusiongate.errors import BuildError, NoCompiler

from .sources import Source
from .targets import Target

__all__ = ["Clang", "compile_device_code", "find_clang"]

_INSTALL = (
    "install ROCm's HIP compiler, or a newer clang with HIP's headers "
    "(Debian 12: apt-get install hipcc libamdhip64-dev rocm-device-libs clang-19)"
)
_EMPTY = "#include <hip/hip_runtime.h>\n__global__ void nothing(float* p) { p[threadIdx.x] = 0; }\n"


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
