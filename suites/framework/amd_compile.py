"""Compile every kernel for AMD GPUs, on a machine that may have none.

``python -m fusiongate.suites.framework.amd_compile [architecture …]``; without any, gfx90a and gfx942. Where hipcc
knows an architecture it builds and links the libraries; where only a newer clang does, that one compiles the device
code. Exits with 1 if a kernel fails to compile, and with 0 where there is no compiler for an architecture: nothing has
failed then, and it is reported as not run.
"""

from __future__ import annotations

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
from fusiongate.jit.compilers import find_compiler
from fusiongate.jit.device_code import Clang, compile_device_code, find_clang
from fusiongate.kernels import SOURCES

__all__ = ["ARCHITECTURES", "Compiled", "compile_all", "main"]

ARCHITECTURES = ("gfx90a", "gfx942")
"""MI200 and MI300."""

AMD_DRIVER = Path("/dev/kfd")
"""Where Linux has an AMD GPU that computes."""


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
