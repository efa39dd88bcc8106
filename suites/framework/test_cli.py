"""The console command: what it prints, and the exit status that scripts go by."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fusiongate.certificates  # noqa: F401  # stands on the real kernels: before a test puts others in their place
from fusiongate.cli import main
from fusiongate.jit import Source, Target
from fusiongate.jit.cache import CACHE_VARIABLE

from .recorded_runs import row, write_run
from .tiny_sources import write_tiny

HOST = Target.host()


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Source:
    """Put the tiny source in the place of the installed kernels, with an empty cache."""
    source = write_tiny(tmp_path / "source")
    module = ModuleType("fusiongate.kernels")
    module.SOURCES = (source,)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fusiongate.kernels", module)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return source


def test_build_compiles_for_the_named_architecture_and_only_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--arch", "host", "--arch", str(HOST)]) == 0
    first = capsys.readouterr().out.splitlines()
    assert [line.startswith(f"tiny for {HOST}: built in ") for line in first] == [True]
    assert main(["build", "--arch", "host"]) == 0
    assert capsys.readouterr().out.startswith(f"tiny for {HOST}: already built: ")
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out.splitlines()
    assert f"{HOST}: can run" in report
    assert "  tiny: built" in report
    assert any(line.startswith("cache: ") and line.endswith(", 1 library") for line in report)


def test_build_that_fails_exits_with_one_and_tells_the_compilers_line(
    kernels: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.files[0].write_text("#error the moon is full\n")
    assert main(["build", "--arch", "host"]) == 1
    assert "the moon is full" in capsys.readouterr().err


def test_what_a_compiler_says_moves_no_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\nprintf 'compiler \\033[2J \\342\\200\\256 1.0'\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    main(["doctor"])
    told = capsys.readouterr().out
    assert r"compiler: compiler \x1b[2J \u202e 1.0" in told
    assert not {"\x1b", "\u202e"} & set(told)


def test_build_without_the_compiler_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROCM_HOME", str(tmp_path))
    assert main(["build", "--arch", "gfx942"]) == 1
    assert "tiny for hip-gfx942: failed: no HIP compiler" in capsys.readouterr().err


def test_nothing_is_built_ahead_where_it_would_not_be_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert main(["build", "--arch", "host"]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path}/cache is writable by every user (mode 0777)" in told
    assert CACHE_VARIABLE in told
    assert main(["doctor"]) == 0
    assert "not used, because others could put a library there" in capsys.readouterr().out


def test_a_user_without_a_home_is_told_what_to_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "~no-such-user/cache")
    assert main(["doctor"]) == 1
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("cache: "))
    assert CACHE_VARIABLE in told


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("build --arch hopper", "architecture 'hopper': expected host, an NVIDIA name such as sm_90"),
        ("build --frobnicate", "No such option"),
        ("build --arch", "Option '--arch' requires an argument"),
        ("judge a\x1b[31m\x07b.json c.json", r"a\x1b[31m\x07b.json: cannot be read: No such file or directory"),
        ("certify modulate --device host --dtype bf16 --dtype fp8", "dtype 'fp8': expected bf16 or fp16"),
        (
            "certify modulate --device host --folder /dev/null/x",
            "--folder=/dev/null/x: cannot be written to: /dev/null",
        ),
        ("frobnicate", "No such command 'frobnicate'"),
        ("", "Missing command"),
    ],
)
def test_input_that_cannot_be_used_is_one_line_and_status_two(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"fusiongate: {message}")
    assert len(captured.err.splitlines()) == 1


def test_a_name_over_two_lines_is_told_in_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    named = tmp_path / "first\nsecond.json"
    named.write_text("{")
    assert main(["judge", str(named), str(named)]) == 2
    assert capsys.readouterr().err.startswith(rf"fusiongate: {tmp_path}/first\nsecond.json: no JSON, or cut short")


def test_output_that_nobody_takes_is_one_line() -> None:
    command = [sys.executable, "-m", "fusiongate.cli", "--help"]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["fusiongate: the output: No space left on device; nothing more is done"]


def test_doctor_says_that_the_cache_cannot_be_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    main(["doctor"])
    obstacle = f"{tmp_path / 'file'} is no folder; set {CACHE_VARIABLE} to another folder"
    assert f"  no kernel can be stored in it: {obstacle}" in capsys.readouterr().out.splitlines()


def test_doctor_finds_the_host_runnable_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out.splitlines()
    assert f"{HOST}: can run" in report
    assert "  tiny: can be built" in report


def test_doctor_says_why_nothing_can_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert f"{HOST}: cannot run\n  compiler: no C++ compiler: CXX=/nowhere/c++" in report
    assert "  tiny: cannot be built: no C++ compiler" in report


def test_doctor_goes_on_without_the_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fusiongate.kernels", None)
    assert main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert "the kernels' sources are missing" in report
    assert "FUSIONGATE_DISABLE: " in report


@pytest.mark.parametrize(
    "switch, told",
    [
        (None, "not set"),
        ("1", "'1', so every fusion takes its reference"),
        ("off", "'off', so every fusion takes its reference"),
        ("0", "'0'"),
        ("", "''"),
    ],
)
def test_doctor_tells_the_switch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, switch: str | None, told: str
) -> None:
    if switch is None:
        monkeypatch.delenv("FUSIONGATE_DISABLE", raising=False)
    else:
        monkeypatch.setenv("FUSIONGATE_DISABLE", switch)
    main(["doctor"])
    assert f"FUSIONGATE_DISABLE: {told}" in capsys.readouterr().out.splitlines()


def test_help_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from fusiongate.cli import main\n"
        "status = main(['--help'])\n"
        "sys.exit(status or 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "doctor" in result.stdout


HOSTILE = "a\x1b[2Jb\u202ec\u2066d\x07"


def test_no_command_passes_on_what_would_move_a_cursor_or_turn_the_writing(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """From a name, or from what a file holds; NUL too, which no name can have."""
    run = write_run(tmp_path / f"{HOSTILE}.json", row(f"{HOSTILE}\0[1x2x3-bfloat16]"), device_name=f"{HOSTILE}\0")
    source = tmp_path / f"{HOSTILE}.py"
    source.write_text(f"def forward(x, scale, shift):\n    '{HOSTILE}'\n    return x * (1 + scale) + shift\n")
    ledger = tmp_path / f"{HOSTILE}.jsonl"
    ledger.write_text(json.dumps({"kind": f"{HOSTILE}\0"}) + "\n", encoding="utf-8")
    commands = [
        ["timings", str(run)],
        ["judge", str(run), str(run)],
        ["judge", str(run), str(run), "--markdown", "--fail-on", HOSTILE],
        ["report", str(ledger), "--output", str(tmp_path / "page.html")],
        ["report", "--timings", str(run), "--output", str(tmp_path / f"{HOSTILE}.html")],
        ["scan", str(source)],
        ["scan", "--json", str(source)],
        ["build", "--arch", HOSTILE],
        ["certify", HOSTILE],
        ["doctor", HOSTILE],
        [HOSTILE],
    ]
    for command in commands:
        main(command)
        told = "".join(capfd.readouterr())
        assert told.strip(), command
        assert not [sign for sign in told if not sign.isprintable() and sign != "\n"], command
