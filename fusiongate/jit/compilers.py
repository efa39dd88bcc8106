"""The compilers of this machine: where they are, what they call themselves, and what is missing when they are not."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fusiongate.errors import NoCompiler

from .targets import Target

__all__ = ["Compiler", "find_compiler"]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that was found and answered when asked for its version."""

    path: Path
    """The compiler's executable."""
    version: str
    """The line in which it names itself and its version."""
    environment: tuple[tuple[str, str], ...]
    """The environment variables that make the binding layer use it, and the build tool's folder on PATH."""
    host: str
    """The host compiler that links, and that compiles the host part of GPU sources: its version line."""

    @property
    def digest(self) -> str:
        """The hex SHA-256 of the compiler's identity: another compiler may give other bits."""
        return hashlib.sha256(f"{self.version}\n{self.host}".encode()).hexdigest()


def find_compiler(target: Target) -> Compiler:
    """Return the compiler for a target.

    Raises
    ------
    NoCompiler
        A compiler or the ninja build tool is missing; the message says which, and what to install.
    """
    command = _host_command()
    host = _version([*command, "--version"], r".+")
    environment = {"PATH": _path_with_ninja(), "CXX": shlex.join(command)}
    if target.kind == "host":
        return Compiler(Path(command[0]), host, tuple(environment.items()), host)
    if target.kind == "cuda":
        home = _cuda_home()
        environment["CUDA_HOME"] = str(home)
        environment["TVM_FFI_CUDA_ARCH_LIST"] = target.arch_list
        path, pattern = home / "bin" / "nvcc", r".*\brelease\b.*"
        ccbin = os.environ.get("NVCC_CCBIN")
        if ccbin:
            environment["NVCC_CCBIN"] = ccbin
            host = f"{host}\n{ccbin}"
    else:
        home = _rocm_home()
        environment["ROCM_HOME"] = str(home)
        environment["TVM_FFI_ROCM_ARCH_LIST"] = target.arch_list
        # Left to itself, hipcc compiles for NVIDIA wherever it finds an nvcc.
        environment["HIP_PLATFORM"] = "amd"
        path, pattern = home / "bin" / "hipcc", r".+"
    version = _version([str(path), "--version"], pattern, environment)
    return Compiler(path, version, tuple(environment.items()), host)


def _host_command() -> list[str]:
    named = os.environ.get("CXX")
    # A variable may hold a launcher and options, as in "ccache g++".
    command = shlex.split(named) if named else ["c++"]
    executable = shutil.which(command[0])
    if executable is None:
        found = f"CXX={named}, which is no executable" if named else "no c++ on PATH"
        raise NoCompiler(
            f"no C++ compiler: {found}; install a C++17 compiler (Debian and Ubuntu: apt-get install g++) "
            f"or name one in CXX"
        )
    return [executable, *command[1:]]


def _cuda_home() -> Path:
    install = "install the CUDA toolkit, or set CUDA_HOME to the folder that holds bin/nvcc and include/cuda_runtime.h"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        named = os.environ.get(variable)
        if named:
            if _is_cuda_home(Path(named)):
                return Path(named)
            raise NoCompiler(f"no CUDA compiler: {variable}={named} is no CUDA toolkit; {install}")
    nvcc = shutil.which("nvcc")
    default = Path("/usr/local/cuda")
    # The nvcc on PATH is often a link, and sometimes a script, into a toolkit that lies elsewhere.
    candidates = [] if nvcc is None else [Path(nvcc).resolve().parent.parent, *_home_that_nvcc_tells(nvcc)]
    for home in [*candidates, default]:
        if _is_cuda_home(home):
            return home
    found = f"{nvcc} has no toolkit with headers behind it" if nvcc else f"no nvcc on PATH and none in {default}"
    raise NoCompiler(f"no CUDA compiler: {found}; {install}")


def _is_cuda_home(home: Path) -> bool:
    headers = [home / "include" / "cuda_runtime.h", *home.glob("targets/*/include/cuda_runtime.h")]
    return (home / "bin" / "nvcc").is_file() and any(header.is_file() for header in headers)


def _home_that_nvcc_tells(nvcc: str) -> list[Path]:
    try:
        told = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull, "-c", "-o", os.devnull],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [Path(top).resolve() for top in re.findall(r"^#\$ TOP=(.+)$", told.stderr, re.MULTILINE)]


def _rocm_home() -> Path:
    install = "install ROCm's HIP compiler, or set ROCM_HOME to the folder that holds bin/hipcc"
    for variable in ("ROCM_HOME", "ROCM_PATH"):
        named = os.environ.get(variable)
        if named:
            if (Path(named) / "bin" / "hipcc").is_file():
                return Path(named)
            raise NoCompiler(f"no HIP compiler: {variable}={named} holds no bin/hipcc; {install}")
    hipcc = shutil.which("hipcc")
    default = Path("/opt/rocm")
    for home in [*([] if hipcc is None else [Path(hipcc).resolve().parent.parent]), default]:
        if (home / "bin" / "hipcc").is_file():
            return home
    raise NoCompiler(f"no HIP compiler: no hipcc on PATH and none in {default}; {install}")


def _path_with_ninja() -> str:
    path = os.environ.get("PATH", os.defpath)
    if shutil.which("ninja", path=path) is not None:
        return path
    beside = Path(sys.executable).parent
    # A virtual environment that was not activated has its scripts beside the interpreter, but not on PATH.
    if shutil.which("ninja", path=str(beside)) is not None:
        return os.pathsep.join([path, str(beside)])
    raise NoCompiler(f"no ninja on PATH or in {beside}; install it with: {sys.executable} -m pip install ninja")


def _version(command: list[str], pattern: str, environment: Mapping[str, str] | None = None) -> str:
    surroundings = {**os.environ, **(environment or {})}
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=surroundings)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(
            f"the compiler does not answer: {shlex.join(command)}: {error}; repair or replace it"
        ) from error
    line = re.search(pattern, told.stdout)
    if told.returncode != 0 or line is None:
        raise NoCompiler(
            f"the compiler does not answer: {shlex.join(command)} exited with status {told.returncode}: "
            f"{told.stderr.strip()[-300:]}; repair or replace it"
        )
    return line[0].strip()
