"""The compilers of this machine, and one compilation: in a child process, with an environment of its own."""

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

from fusiongate.errors import BuildError, NoCompiler

from .child import run_child
from .sources import Source
from .targets import Target

__all__ = ["COMPILE_TIMEOUT_S", "Compiler", "compile_library", "find_compiler"]

COMPILE_TIMEOUT_S = 600.0
"""Seconds that one library may take to compile."""

_OUTPUT_LINES = 30

# Anything else in the caller's environment (CPATH, NVCC_APPEND_FLAGS, CXXFLAGS …) could change the bits, and the key
# would not know.
_INHERITED = ("HOME", "TMPDIR", "LD_LIBRARY_PATH", "USER", "LOGNAME", "HIP_DEVICE_LIB_PATH", "DEVELOPER_DIR", "SDKROOT")


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
    named = os.environ.get("CXX", "").strip()
    try:
        # A variable may hold a launcher and options, as in "ccache g++".
        command = shlex.split(named or "c++")
        executable = shutil.which(command[0])
        found = "which is no executable" if named else "no c++ on PATH"
    except ValueError as error:
        command, executable, found = [], None, str(error)
    if executable is None:
        raise NoCompiler(
            f"no C++ compiler: {f'CXX={named}, ' * bool(named)}{found}; install a C++17 compiler (Debian and Ubuntu: "
            f"apt-get install g++) or name one in CXX"
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
    if not _is_file(home / "bin" / "nvcc"):
        return False
    headers = [home / "include" / "cuda_runtime.h", *home.glob("targets/*/include/cuda_runtime.h")]
    return any(_is_file(header) for header in headers)


def _is_file(path: Path) -> bool:
    # Unlike Path.is_file, also where a name is too long or a folder may not be looked into.
    return os.path.isfile(path)  # noqa: PTH113


def _home_that_nvcc_tells(nvcc: str) -> list[Path]:
    try:
        told = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull, "-c", "-o", os.devnull],
            capture_output=True,
            text=True,
            errors="replace",
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
            if _is_file(Path(named) / "bin" / "hipcc"):
                return Path(named)
            raise NoCompiler(f"no HIP compiler: {variable}={named} holds no bin/hipcc; {install}")
    hipcc = shutil.which("hipcc")
    default = Path("/opt/rocm")
    for home in [*([] if hipcc is None else [Path(hipcc).resolve().parent.parent]), default]:
        if _is_file(home / "bin" / "hipcc"):
            return home
    raise NoCompiler(f"no HIP compiler: no hipcc on PATH and none in {default}; {install}")


def _path_with_ninja() -> str:
    path = os.environ.get("PATH", os.defpath)
    if shutil.which("ninja", path=path) is not None:
        return path
    beside = Path(sys.executable or os.devnull).parent
    # A virtual environment that was not activated has its scripts beside the interpreter, but not on PATH.
    if shutil.which("ninja", path=str(beside)) is not None:
        return os.pathsep.join([path, str(beside)])
    raise NoCompiler(f"no ninja on PATH or in {beside}; install it with: {sys.executable} -m pip install ninja")


def _version(command: list[str], pattern: str, environment: Mapping[str, str] | None = None) -> str:
    surroundings = {**os.environ, **(environment or {})}
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=False, env=surroundings
        )
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


def compile_library(source: Source, target: Target, compiler: Compiler, folder: Path) -> Path:
    """Compile a source into a shared library inside an empty folder and return the library's path.

    Raises
    ------
    BuildError
        The compiler refused the source (the message ends with the last lines of its output), died or took too long.
    """
    suffix = ".cpp" if target.kind == "host" else ".cu"
    units = []
    for index, file in enumerate(source.files):
        # The binding layer chooses the compiler by the file's extension, so each unit is included under a fitting name.
        unit = folder / f"unit{index}{suffix}"
        unit.write_text(f'#include "{file.resolve().as_posix()}"\n', encoding="utf-8")
        units.append(str(unit))
    # The last level counts; it changes no bits.
    flags = [*target.flags, *(["-Og"] if source.quick and target.kind == "host" else [])]
    flags += [f"-D{define}" for define in source.defines]
    flags += [f"-I{include.resolve()}" for include in source.include]
    quoted = [_quoted(flag) for flag in flags]
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    environment.update(compiler.environment)
    environment["LC_ALL"] = "C"
    outcome = run_child(
        {
            "task": "compile",
            "name": source.name,
            # The binding layer does not escape blanks for ninja.
            "sources": [unit.replace("$", "$$").replace(" ", "$ ") for unit in units],
            "cflags": quoted if target.kind == "host" else [],
            "cuda_cflags": quoted if target.kind != "host" else [],
            "ldflags": [_quoted(flag) for flag in _link_flags(target, dict(compiler.environment))],
            "build_directory": str(folder),
            "backend": None if target.kind == "host" else target.kind,
        },
        environment,
        COMPILE_TIMEOUT_S,
    )
    built = folder / f"{source.name}.so"
    if outcome.returncode == 0 and built.is_file():
        return built
    raise BuildError(
        f"{source.name} for {target} {_what_happened(outcome.returncode, outcome.signal_name, outcome.output)}"
    )


def _link_flags(target: Target, environment: dict[str, str]) -> list[str]:
    # The runtime library is found at load time even where torch brings another major version, or none is imported.
    if target.kind == "cuda":
        return [f"-Wl,-rpath,{environment['CUDA_HOME']}/lib64"]
    if target.kind == "hip":
        return [f"-Wl,-rpath,{environment['ROCM_HOME']}/lib"]
    return []


def _quoted(flag: str) -> str:
    # The flags pass through ninja, where a dollar is special, and then through a shell.
    return shlex.quote(flag).replace("$", "$$")


def _what_happened(returncode: int | None, signal_name: str | None, output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    # The first error is the cause, and long template notes may push it out of the last lines.
    first_error = next((line.strip() for line in lines if "error:" in line or "fatal" in line), "")
    if returncode is None:
        headline = f"did not compile within {COMPILE_TIMEOUT_S:.0f} s"
    elif signal_name is not None:
        headline = f"did not compile: the compiling process was killed by {signal_name}"
    elif first_error:
        headline = f"did not compile: {first_error}"
    else:
        headline = f"did not compile (exit status {returncode})"
    return "\n".join([headline, *lines[-_OUTPUT_LINES:]])
