"""Sources become loaded libraries through the compiler, the cache and a probing child, or a failure says why not."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from fusiongate.errors import BuildError, ProbeFailed
from fusiongate.jit import Source, Target, find_built, forget, library, load
from fusiongate.jit.cache import CACHE_VARIABLE, cache_folder, cached_entries
from fusiongate.jit.child import Outcome, run_child
from fusiongate.jit.targets import machine_identity

from .tiny_sources import TINY, write_tiny

pytestmark = pytest.mark.usefixtures("own_cache")

HOST = Target.host()


@pytest.fixture
def tiny(built_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Source:
    """Return the tiny source, with its library in this test's own cache."""
    shutil.copytree(built_cache, tmp_path / "cache")
    caplog.set_level(logging.INFO, logger="fusiongate")
    return write_tiny(tmp_path / "source")


def compilations(caplog: pytest.LogCaptureFixture) -> int:
    return sum("compiling" in message for message in caplog.messages)


def only_library() -> Path:
    [(entry, _)] = cached_entries(cache_folder())
    return entry.library


def test_source_is_compiled_loaded_and_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fusiongate")
    module = library(write_tiny(tmp_path, addend=40), HOST)
    assert module.add(2) == 42
    assert compilations(caplog) == 1


def test_cached_library_is_loaded_without_a_compiler_run(tiny: Source, caplog: pytest.LogCaptureFixture) -> None:
    written = only_library().stat().st_mtime_ns
    assert library(tiny, HOST).add(3) == 5
    assert compilations(caplog) == 0
    assert only_library().stat().st_mtime_ns == written


def test_second_call_gives_the_same_module(tiny: Source) -> None:
    assert library(tiny, HOST) is library(tiny, HOST)


def test_threads_that_ask_at_once_share_one_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fusiongate")
    source = write_tiny(tmp_path, addend=3)
    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(lambda _: library(source, HOST), range(4)))
    assert [module is modules[0] for module in modules] == [True] * 4
    assert compilations(caplog) == 1


def test_host_build_rounds_product_and_sum_apart(tiny: Source) -> None:
    """Even where the CPU has fused multiply-add, which would keep the product's last bits here."""
    cpuinfo = Path("/proc/cpuinfo")
    if HOST.arch == "x86_64" and not (cpuinfo.exists() and " fma " in cpuinfo.read_text()):
        pytest.skip("this CPU has no fused multiply-add")
    factor = 1.0 + 2.0**-30
    assert library(tiny, HOST).multiply_add(factor, factor, -(factor * factor)) == 0.0


@pytest.mark.parametrize("damage", ["truncated", "missing", "broken-manifest", "manifest-nested-too-deeply"])
def test_damaged_library_is_built_again(tiny: Source, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    path = only_library()
    manifest = path.with_name("manifest.json")
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "missing":
        path.unlink()
    else:
        manifest.write_text("{" if damage == "broken-manifest" else "[" * 100_000)
    assert library(tiny, HOST).add(3) == 5
    assert compilations(caplog) == 1
    assert sum("damaged" in message for message in caplog.messages) == (damage != "missing")
    [(entry, stored)] = cached_entries(cache_folder())
    assert hashlib.sha256(entry.library.read_bytes()).hexdigest() == stored.sha256


@pytest.mark.parametrize("name", ["library.so", "manifest.json"])
def test_a_folder_in_a_file_s_place_is_named(tiny: Source, name: str) -> None:
    """Nobody's folder is removed unasked."""
    path = only_library().with_name(name)
    path.unlink()
    path.mkdir()
    with pytest.raises(BuildError, match=rf"cannot be used: .*: {path}; .*remove what is in the way"):
        library(tiny, HOST)
    assert path.is_dir()


def test_changed_header_is_another_library(tiny: Source, tmp_path: Path) -> None:
    write_tiny(tmp_path / "source", addend=7)
    assert find_built(tiny, HOST) is None
    assert library(tiny, HOST).add(3) == 10
    assert len(cached_entries(cache_folder())) == 2


def test_missing_source_file_is_a_build_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"absent\.cu: No such file"):
        library(Source("tiny", (tmp_path / "absent.cu",)), HOST)


def test_machine_without_compiler_uses_what_was_built_for_it(tiny: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert library(tiny, HOST).add(3) == 5


def test_compile_error_tells_the_compilers_line_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failure is this process's answer too, so that a kernel that does not compile costs one compilation."""
    caplog.set_level(logging.INFO, logger="fusiongate")
    source = write_tiny(tmp_path, code="#error the moon is full\n")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"tiny for host-\w+ did not compile: .*tiny\.cu.*the moon is full"):
            library(source, HOST)
    assert compilations(caplog) == 1
    forget()
    with pytest.raises(BuildError):
        library(source, HOST)
    assert compilations(caplog) == 2
    assert [path.suffix for path in cache_folder().iterdir()] == [".lock"]


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die_halfway(source: Source, target: Target, compiler: object, folder: Path) -> Path:
        shutil.copytree(folder, folder.with_name(f"{folder.name}-left"))
        raise BuildError("killed")

    monkeypatch.setattr(load, "compile_library", die_halfway)
    for _ in range(2):
        forget()
        with pytest.raises(BuildError, match="killed"):
            library(write_tiny(tmp_path), HOST)
        assert len(list(cache_folder().glob(".building-*"))) == 1


def test_compilation_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusiongate.jit.compile.COMPILE_TIMEOUT_S", 0.05)
    with pytest.raises(BuildError, match="did not compile within"):
        library(write_tiny(tmp_path), HOST)


def test_callers_environment_does_not_reach_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPATH that the key knows nothing about could put another header before ours."""
    smuggled = tmp_path / "smuggled"
    smuggled.mkdir()
    (smuggled / "smuggled.h").write_text("")
    monkeypatch.setenv("CPATH", str(smuggled))
    code = TINY + '#if __has_include("smuggled.h")\n#error smuggled\n#endif\n'
    assert library(write_tiny(tmp_path, code=code), HOST).add(1) == 3


def test_cache_folder_and_definitions_may_hold_blanks_and_dollars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "a cache"))
    code = TINY + 'static_assert(sizeof(MOTTO) == sizeof("two $words"));\n'
    source = write_tiny(tmp_path / "a source", code=code).with_defines('MOTTO="two $words"')
    assert library(source, HOST).add(1) == 3


def test_library_that_aborts_on_loading_spares_this_process(tmp_path: Path) -> None:
    code = TINY + "#include <cstdlib>\nstatic const int kAborts = (std::abort(), 0);\n"
    source = write_tiny(tmp_path, code=code)
    with pytest.raises(ProbeFailed, match="killed the process that first loaded it, by SIGABRT"):
        library(source, HOST)
    assert list(only_library().parent.glob("probe-*.json")) == []


def test_librarys_own_probe_may_refuse(tmp_path: Path) -> None:
    code = TINY + (
        "#include <tvm/ffi/function.h>\n"
        'static void Probe() { TVM_FFI_THROW(RuntimeError) << "wrong sum"; }\n'
        "TVM_FFI_DLL_EXPORT_TYPED_FUNC(fusiongate_probe, Probe);\n"
    )
    with pytest.raises(ProbeFailed, match=r"(?s)tiny for host-\w+ failed its probe.*wrong sum"):
        library(write_tiny(tmp_path, code=code), HOST)


def test_callers_probe_runs_once_for_a_machine(tiny: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen.txt"
    (tmp_path / "tiny_probe.py").write_text(
        f"import os\n"
        f"def look(path, target):\n"
        f"    with open({str(seen)!r}, 'a') as file:\n"
        f"        print(os.getpid(), path, target, file=file)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = Source(tiny.name, tiny.files, tiny.include, probe="tiny_probe:look")
    for _ in range(2):
        library(source, HOST)
        forget()
    [(process, path, target)] = [line.split() for line in seen.read_text().splitlines()]
    assert (path, target) == (str(only_library()), str(HOST))
    assert int(process) != os.getpid()
    monkeypatch.setattr(load, "machine_identity", lambda target: {**machine_identity(target), "driver": "a newer one"})
    library(source, HOST)
    assert len(seen.read_text().splitlines()) == 2


def test_probe_that_is_not_there_fails_by_name(tiny: Source) -> None:
    source = Source(tiny.name, tiny.files, tiny.include, probe="no_such_module:look")
    with pytest.raises(ProbeFailed, match="no_such_module"):
        library(source, HOST)


def test_target_of_another_machine_is_built_but_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(ProbeFailed, match=r"no device for host-pdp11: this machine is .*`fusiongate build --arch"):
        library(write_tiny(tmp_path), Target("host", "pdp11"))


def test_two_processes_at_once_end_with_one_good_library(tmp_path: Path) -> None:
    source = write_tiny(tmp_path)
    program = (
        "import logging, sys\n"
        "from pathlib import Path\n"
        "from fusiongate.jit import Source, Target, library\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        f"source = Source('tiny', (Path({str(source.files[0])!r}),), (Path({str(source.include[0])!r}),))\n"
        "print('sum', library(source, Target.host()).add(3))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert ["sum 5" in output for output in outputs] == [True, True]
    assert sum(output.count("compiling") for output in outputs) == 1
    assert find_built(source, HOST) is not None


def test_cache_folder_is_private_and_a_loose_one_is_tightened(tiny: Source, caplog: pytest.LogCaptureFixture) -> None:
    assert cache_folder().stat().st_mode & 0o777 == 0o700
    cache_folder().chmod(0o777)
    library(tiny, HOST)
    assert cache_folder().stat().st_mode & 0o777 == 0o700
    assert sum("is writable by every user (mode 0777); it is private now" in line for line in caplog.messages) == 1


def test_cache_folder_that_cannot_be_made_is_a_build_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(BuildError, match=rf"cannot be used: .*{CACHE_VARIABLE}"):
        library(write_tiny(tmp_path), HOST)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=os.strerror)
def test_cache_folder_that_takes_nothing_is_a_build_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Set up at the first write: root, who often runs tests in containers, may write into read-only folders."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with pytest.raises(BuildError, match=rf"cannot be used: {os.strerror(error)}.*; make room, give write permission"):
        library(write_tiny(tmp_path), HOST)


def test_compiler_that_is_killed_or_silent_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome, expected in [
        (
            Outcome(-signal.SIGKILL, "cc1plus\n"),
            "did not compile: the compiling process was killed by SIGKILL\ncc1plus",
        ),
        (Outcome(-63, ""), "did not compile: the compiling process was killed by signal 63"),
        (Outcome(3, "nothing to say\n"), "did not compile (exit status 3)\nnothing to say"),
    ]:
        forget()
        monkeypatch.setattr("fusiongate.jit.compile.run_child", lambda *_, outcome=outcome: outcome)
        with pytest.raises(BuildError) as raised:
            library(write_tiny(tmp_path), HOST)
        assert f"tiny for {HOST} {expected}" == str(raised.value)


def test_library_that_hangs_on_loading_is_given_up(tiny: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = {**machine_identity(HOST), "driver": "one that has probed nothing"}
    monkeypatch.setattr(load, "machine_identity", lambda _: identity)
    monkeypatch.setattr(load, "_PROBE_TIMEOUT_S", 0.01)
    with pytest.raises(ProbeFailed, match=r"did not return from its probe within 0 s; it is not loaded here"):
        library(tiny, HOST)


def test_library_that_only_this_process_cannot_load_says_where_to_look(
    tiny: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise OSError("libother.so: undefined symbol")

    monkeypatch.setattr("tvm_ffi.load_module", refuse)
    with pytest.raises(BuildError, match=r"passed its probe but cannot be loaded into this process: libother\.so"):
        library(tiny, HOST)


def test_machine_without_compiler_has_nothing_that_was_built_for_another(
    tiny: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert find_built(tiny, HOST) is not None
    assert find_built(write_tiny(tmp_path / "changed", addend=7), HOST) is None


def test_lock_that_another_process_keeps_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_in_vain(lock: FileLock, **_: object) -> None:
        raise Timeout(lock.lock_file)

    monkeypatch.setattr("filelock.FileLock.acquire", wait_in_vain)
    with pytest.raises(BuildError, match=r"another process has held \S+\.lock for 660 s; end it and try again"):
        library(write_tiny(tmp_path), HOST)


def test_child_does_not_outlive_the_user_who_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    communicate = subprocess.Popen.communicate

    def interrupt(process: subprocess.Popen[str], *args: object, **named: object) -> object:
        if not started:
            started.append(process)
            raise KeyboardInterrupt
        return communicate(process)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_child({"task": "probe"}, os.environ, 60)
    (process,) = started
    assert -signal.SIGKILL == process.returncode


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_beside_a_build_leaves_no_lock_held_in_the_child(
    tiny: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that builds is not in the child, which would wait for it for ever."""
    began, end = threading.Event(), threading.Event()

    def compile_slowly(*_: object) -> Path:
        began.set()
        end.wait(60)
        raise BuildError("ended by the test")

    monkeypatch.setattr(load, "compile_library", compile_slowly)

    def build() -> None:
        with contextlib.suppress(BuildError):
            library(write_tiny(tmp_path / "other", addend=9), HOST)

    builder = threading.Thread(target=build)
    builder.start()
    assert began.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(30)
        os._exit(0 if library(tiny, HOST).add(3) == 5 else 1)
    try:
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        end.set()
        builder.join()
