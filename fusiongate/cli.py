"""The console command ``fusiongate``: a table of commands, each of which imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from .errors import FusiongateError, UsageError
from .io import obstacle, one_line, parse_json, visible

if TYPE_CHECKING:
    from types import ModuleType

    from rich.console import Console

    from .jit import Source

__all__ = ["app", "main"]

app = typer.Typer(
    name="fusiongate",
    help="Bit-exact fused kernels: what this machine can run, and builds ahead of time.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def doctor() -> None:
    """Tell what this machine can run, and why not; exits with 1 if it can run nothing."""
    from .jit.doctor import diagnose
    from .report import machine

    _say(machine.versions())
    try:
        sources = _kernel_sources()
    except UsageError as error:
        # A broken installation is one more finding: the rest of the diagnosis still helps.
        _say(str(error))
        sources = ()
    states = diagnose(sources)
    for line in machine.lines(states):
        _say(line)
    if not any(state.can_run for state in states):
        _say("nothing can run here; the lines above say why")
        raise typer.Exit(1)


@app.command()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="host, sm_90, gfx942 …; may be given again. Default: everything this machine can run."),
    ] = None,
) -> None:
    """Compile every kernel ahead of time, loading none; exits with 1 if one cannot be built."""
    from .jit import Target, local_targets, prebuild
    from .jit.cache import CACHE_VARIABLE, exposed_cache
    from .progress import track

    if exposed := exposed_cache():
        raise UsageError(
            f"no library would be loaded from the kernel cache, because others could put one there: {exposed}; take "
            f"away that permission, or set {CACHE_VARIABLE} to a folder that only you may write"
        )
    targets = tuple(dict.fromkeys(map(Target.parse, arch))) if arch else local_targets()
    sources = _kernel_sources()
    failed = 0
    for outcome in track(prebuild(sources, targets), "building", len(sources) * len(targets)):
        label = f"{outcome.source.name} for {outcome.target}"
        if outcome.error is not None:
            failed += 1
            _say(f"{label}: failed: {outcome.error}", stderr=True)
        elif outcome.compiled:
            _say(f"{label}: built in {outcome.seconds:.1f} s: {outcome.library}")
        else:
            _say(f"{label}: already built: {outcome.library}")
    if failed:
        raise typer.Exit(1)


@app.command()
def judge(
    base: Annotated[Path, typer.Argument(help="The run to hold the other against, as --benchmark-json wrote it.")],
    new: Annotated[Path, typer.Argument(help="The run that is judged.")],
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="slower:1%, faster:1% or inconclusive:1%: exit with 1 where a kernel is; may be given again."
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Write a table for a pull request.")] = False,
    allow_environment: Annotated[
        bool, typer.Option("--allow-environment", help="Judge runs of different environments all the same.")
    ] = False,
) -> None:
    """Judge the kernels of two recorded runs, by their ratios to their references and by their times."""
    from .timing import judging
    from .timing.recorded import read_run

    conditions = [judging.FailOn.parse(text) for text in fail_on or ()]
    judgement = judging.judge(read_run(base), read_run(new), conditions, allow_environment=allow_environment)
    for line in judgement.markdown() if markdown else judgement.lines():
        _say(line)
    if judgement.failures:
        raise typer.Exit(1)


@app.command()
def timings(
    run: Annotated[Path, typer.Argument(help="A recorded run, as --benchmark-json wrote it.")],
) -> None:
    """Print a recorded run as a table in Markdown: times, share of the copy's bandwidth, ratios with intervals."""
    from .report.timings import markdown
    from .timing.recorded import read_run

    _say(markdown(read_run(run)).rstrip("\n"))


@app.command()
def report(
    ledgers: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[LEDGER]...", help="Ledgers of runs. Default: the newest in .fusiongate."),
    ] = None,
    timings: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="A recorded run, as --benchmark-json wrote it; may be given again."),
    ] = None,
    output: Annotated[Path, typer.Option(help="The page; an older report there is replaced.")] = Path(
        "fusiongate-report.html"
    ),
) -> None:
    """Write one HTML page about runs and machines: outcomes, reasons, what was not run, presets and timings."""
    from .report.files import newest_ledger, write_report

    chosen = ledgers or [newest_ledger(Path())]
    told = write_report(chosen, timings or (), output)
    for torn in told.torn:
        _say(f"fusiongate: {one_line(torn)}; the report says so", stderr=True)
    _say(f"{one_line(str(output))}: made from {one_line(', '.join(told.files))}")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="The repository. Default: the working directory.")] = Path(),
) -> None:
    """Write a first test, a preset and a nightly workflow into a repository."""
    from .report.starting import started

    for path in started(folder):
        _say(f"{one_line(str(path))}: written")


@app.command()
def explain(
    cell: Annotated[str, typer.Argument(help="A cell's id, subject[id], or its test's node id.")],
    ledger: Annotated[
        Path | None, typer.Option(help="The ledger of the run that had it. Default: the newest in .fusiongate.")
    ] = None,
) -> None:
    """Say what a cell is, how it was made, what came of it, and how to run it alone."""
    from .report.explaining import explained
    from .report.files import newest_ledger

    for line in explained(ledger or newest_ledger(Path()), cell):
        _say(line)


@app.command()
def certify(
    kernel: Annotated[str, typer.Argument(help="modulate, modulate_fp32, or a norm with a witness.")],
    dtype: Annotated[
        list[str] | None, typer.Option(help="bf16 or fp16; may be given again. Default: both, one after the other.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, host, cuda or cuda:<n>: where the kernel runs.")] = "auto",
    sample: Annotated[
        int | None, typer.Option(help="Try so many of the 65,536 values of x, or rows of a norm: no certificate then.")
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Where <platform>/certificates/<kernel>-<dtype>.json is written.")
    ] = Path("snapshots"),
) -> None:
    """Try a kernel's arithmetic on every operand there is, against eager; exits with 1 on a counterexample."""
    from .certificates import Found, StageResult, certify, check_request, device_named, stage_names
    from .progress import Progress

    chosen, names = device_named(device), dtype or ["bf16", "fp16"]
    for name in names:
        check_request(kernel, name, sample)
    if hindrance := obstacle(folder):
        raise UsageError(f"--folder={folder}: cannot be written to: {hindrance}; name another folder")
    for name in names:
        _say(f"{kernel} in {name} on {chosen}")
        try:
            with Progress(f"{kernel} in {name}", stage_names(kernel)) as progress:

                def done(stage: StageResult, progress: Progress = progress) -> None:
                    _say(f"  {stage.name}: {stage.tried:,} results are eager's; {stage.what}; md5 {stage.md5}")
                    progress.advance()

                certificate = certify(kernel, name, chosen, sample=sample, done=done)
        except Found as found:
            _say(f"counterexample: {found}")
            raise typer.Exit(1) from None
        if certificate.is_sample:
            _say("  a sample, which is no certificate: nothing is written")
            continue
        _say(f"  {certificate.claim}: {certificate.write(folder)}")


@app.command()
def evidence(
    snapshots: Annotated[Path, typer.Argument(help="The folder of the platforms' folders.")] = Path("snapshots"),
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if anything is found.")] = False,
) -> None:
    """List what was recorded on a GPU and is falsified, stale or missing, and what to run to record it again."""
    from .report import manifest

    findings = manifest.check(snapshots)
    for finding in findings:
        _say(one_line(str(finding)))
    if findings and check:
        raise typer.Exit(1)


@app.command()
def scan(
    target: Annotated[str, typer.Argument(help="package.module, package.module:Class, a Python file, or a package.")],
    json: Annotated[bool, typer.Option("--json", help="Print the sites as JSON.")] = False,
) -> None:
    """List the adaLN chains in somebody else's source, of a package as a table; exits with 1 if there is none."""
    from .scanning import scan as find
    from .scanning.targets import named_target

    named = named_target(target)
    if hasattr(named, "__path__"):
        raise typer.Exit(_scan_package(named, json=json))
    found = find(named)
    if json:
        _say(found.to_json())
    else:
        _say(str(found))
    if not found.sites:
        raise typer.Exit(1)


def _scan_package(package: ModuleType, *, json: bool) -> int:
    from dataclasses import asdict
    from json import dumps

    from .progress import Progress
    from .report.scans import ScannedModel, scan_package, table

    with Progress(f"scanning {package.__name__}", 1):
        found = list(scan_package(package))
    models = [each for each in found if isinstance(each, ScannedModel)]
    for told in found:
        if isinstance(told, str):
            _say(told, stderr=True)
    if json:
        _console().print(dumps([asdict(model) for model in models], indent=2, ensure_ascii=False))
    elif models:
        for line in table(models):
            _say(line)
    else:
        _say("0 sites")
    return 0 if models else 1


@app.command("try")
def try_(
    target: Annotated[str, typer.Argument(help="package.module:Class, a class of models.")],
    config: Annotated[str, typer.Option(help="Arguments of its constructor, as a JSON object.")] = "{}",
    inputs: Annotated[
        str, typer.Option(help="Arguments of its forward, as a JSON object: a shape each, or what its help says.")
    ] = "{}",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, cpu. Default: a GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="The dtype of the weights.")] = "bfloat16",
    seconds: Annotated[float, typer.Option(help="How long to measure.")] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print the trial as JSON.")] = False,
) -> None:
    """Build a tiny random model of a class, run it in eager and rewired, and print sites, bits and times.

    Exits with 1 if the bits differ.
    """
    import torch

    from .scanning.targets import named_target
    from .trials import try_model

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UsageError(f"--dtype={dtype}: expected a floating one of torch's, such as bfloat16")
    given = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        place = torch.device(given)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device={device}: {one_line(str(error))}") from error
    trial = try_model(
        named_target(target),
        _object(config, "--config"),
        _object(inputs, "--inputs"),
        device=place,
        dtype=kind,
        seconds=seconds,
    )
    if json:
        _console().print(trial.to_json())
    else:
        _say(str(trial))
    if not trial.equal:
        raise typer.Exit(1)


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise UsageError(
            f"{option}: it is no JSON: {error}; expected an object, such as '{{\"num_layers\": 1}}'"
        ) from error
    if not isinstance(found, dict):
        raise UsageError(f"{option}: expected a JSON object, such as '{{\"num_layers\": 1}}', and it is {text}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 for a negative answer, 2 for input that cannot be used.

    Parameters
    ----------
    arguments
        The words after ``fusiongate``; by default those of the process.
    """
    try:
        # Outside standalone mode the parser raises what it would have printed, framed and over several lines.
        status = app(
            sys.argv[1:] if arguments is None else list(arguments), prog_name="fusiongate", standalone_mode=False
        )
    except FusiongateError as error:
        message = str(error)
    except _PARSER_ERROR as error:
        message = f"{error.format_message().rstrip('.')}; `fusiongate --help` lists what there is"
    except OSError as error:
        message = f"{error.filename or 'the output'}: {error.strerror or error}; nothing more is done"
        _drop_output()
    except (typer.Abort, KeyboardInterrupt):
        return 130
    else:
        return status if isinstance(status, int) else 0
    _say(f"fusiongate: {one_line(message)}", stderr=True)
    return 2


# Newer typers carry a parser of their own and older ones stand on click: this reaches the usage errors of both.
_PARSER_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


def _drop_output() -> None:
    # What a full disk or a closed pipe did not take would be tried once more when the interpreter ends.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str, *, stderr: bool = False) -> None:
    # Much of it is what others have named, or a compiler said.
    _console(stderr=stderr).print(visible(text))


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    # Paths and compiler messages hold brackets and are read by machines: no markup, and no line is folded.
    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)


def _kernel_sources() -> tuple[Source, ...]:
    try:
        from .kernels import SOURCES
    except ImportError as error:
        raise UsageError(f"the kernels' sources are missing: {error}; install fusiongate again") from error
    return tuple(SOURCES)


if __name__ == "__main__":
    sys.exit(main())
