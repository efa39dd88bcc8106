"""One compilation: sources and target in, shared library out, in a child process with an environment of its own."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from fusiongate.errors import BuildError

from .compilers import Compiler
from .processes import run_child
from .sources import Source
from .targets import Target

__all__ = ["COMPILE_TIMEOUT_S", "compile_library"]

COMPILE_TIMEOUT_S = 600.0
"""Seconds that one library may take to compile."""

_OUTPUT_LINES = 30

# Anything else in the caller's environment (CPATH, NVCC_APPEND_FLAGS, CXXFLAGS …) could change the bits, and the key
# would not know.
_INHERITED = ("HOME", "TMPDIR", "LD_LIBRARY_PATH", "USER", "LOGNAME", "HIP_DEVICE_LIB_PATH", "DEVELOPER_DIR", "SDKROOT")


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
    flags = [*target.flags]
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
