"""fg.scan: adaLN chains in other people's sources, by their syntax trees."""

from __future__ import annotations

import importlib
import inspect
import json
import linecache
import re
import types
from pathlib import Path
from types import FunctionType

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from fusiongate.cli import main
from fusiongate.errors import UsageError
from fusiongate.scanning import scan
from fusiongate.scanning.sources import NoSource, source_of
from fusiongate.scanning.targets import named_target

from . import scanned_models
from .scanned_models import FORMS, LEFT_ALONE, NOT_MOUNTABLE, CompositeNorm, Layered, ReadTwice


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_way_of_writing_the_chain_is_found(form: type[nn.Module]) -> None:
    expected = 2 if form.__name__ == "WithSuper" else 1

    assert expected == sum(site.reason is None for site in scan(form()))


@pytest.mark.parametrize("module", LEFT_ALONE, ids=lambda module: module.__name__)
def test_what_only_looks_like_a_chain_is_left_alone(module: type[nn.Module]) -> None:
    assert () == scan(module()).sites


@pytest.mark.parametrize(("module", "reason"), NOT_MOUNTABLE.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_chain_where_no_gate_can_stand_is_listed_with_its_reason(module: type[nn.Module], reason: str) -> None:
    reasons = [site.reason for site in scan(module()) if site.reason is not None]

    assert len(reasons) == 1
    assert reason in reasons[0]


def test_a_site_has_its_file_line_expression_and_norm() -> None:
    (site,) = scan(scanned_models.Normed())

    lines, first = inspect.getsourcelines(scanned_models.Normed.forward)
    assert site.file.name == "scanned_models.py"
    assert site.line == first + len(lines) - 1
    assert site.function == "Normed.forward"
    assert site.expression == "self.norm(x) * (1 + scale[:, None]) + shift[:, None]"
    assert site.norm == "self.norm"
    assert site.norm_note is None


def test_a_chain_over_several_lines_has_the_line_on_which_it_begins() -> None:
    (site,) = scan(scanned_models.OverLines())

    _, first = inspect.getsourcelines(scanned_models.OverLines.forward)
    assert first + 2 == site.line


def test_norms_are_told_by_what_they_are_and_shared_layers_by_each_of_them() -> None:
    sites = scan(Layered())

    assert [
        ("rms_norm_modulate", ("first",), None),
        ("composite_rms_norm_modulate", ("second",), None),
        ("layer_norm_modulate", ("third",), None),
    ] == [(site.kind, site.modules, site.norm_note) for site in sites]


def test_modules_of_one_kind_make_one_site() -> None:
    model = nn.ModuleList([scanned_models.Normed(), scanned_models.Normed()])

    (site,) = scan(model)
    assert ("0", "1") == site.modules


def test_a_norm_with_another_reader_is_not_folded_in() -> None:
    (site,) = scan(ReadTwice())

    assert "modulate" == site.kind
    assert site.norm_note is not None
    assert "reads `y` of line" in site.norm_note


def test_a_norm_with_hooks_is_not_folded_in() -> None:
    model = scanned_models.Normed()
    model.norm.register_forward_hook(lambda *args: None)

    (site,) = scan(model)
    assert "the norm carries hooks, which a kernel would not run" == site.norm_note


@pytest.mark.parametrize(
    ("norm", "note"),
    [
        (nn.RMSNorm(16), "no kernel repeats a RMSNorm without an explicit eps"),
        (nn.RMSNorm((6, 16), eps=1e-6), "no kernel normalises over several dimensions"),
        (nn.LayerNorm((6, 16)), "no kernel normalises over several dimensions"),
        (nn.Identity(), "no kernel repeats a Identity"),
    ],
)
def test_a_norm_that_no_kernel_repeats_says_why(norm: nn.Module, note: str) -> None:
    (site,) = scan(scanned_models.Normed(norm))

    assert ("modulate", note) == (site.kind, site.norm_note)


def test_the_cast_to_fp32_is_part_of_its_chain() -> None:
    (site,) = scan(scanned_models.InFp32())

    assert "modulate_fp32" == site.kind
    assert "(x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)" == site.expression


def test_a_class_and_a_python_module_can_be_scanned_too() -> None:
    """Which norm it is, they cannot tell."""
    (site,) = scan(scanned_models.Normed)
    assert ("modulate", "which norm it is, only a model can tell") == (site.kind, site.norm_note)

    found = scan(scanned_models)
    assert site in list(found)
    assert "modulate" in {found_site.function for found_site in found}


def test_a_scan_prints_every_site_with_its_reason() -> None:
    text = str(scan(scanned_models.InPlace()))

    assert text.startswith("1 site; a gate can stand at 0\n")
    assert re.search(r"cannot be mounted: line \d+: it writes in place, and a kernel returns a new tensor", text)


def test_a_source_that_changed_since_its_import_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of other code would put the gate in the wrong place."""
    path = tmp_path / "drifting_model.py"
    lines = ["from torch import nn", "class Model(nn.Module):", "    def forward(self, x, scale, shift):"]
    path.write_text("\n".join([*lines, "        return x * (1 + scale) + shift", ""]), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    drifting_model = importlib.import_module("drifting_model")
    path.write_text("\n".join([*lines, "        return x * (1 + shift) + scale", ""]), encoding="utf-8")

    assert () == scan(drifting_model.Model()).sites


def test_only_models_classes_functions_and_modules_can_be_scanned() -> None:
    with pytest.raises(UsageError, match=r"expected an nn\.Module, a class, a function or a Python module"):
        scan(3)  # type: ignore[arg-type]


def test_the_norm_of_the_written_out_kind_is_recognised_by_its_source() -> None:
    (site,) = scan(scanned_models.Normed(CompositeNorm()))

    assert "composite_rms_norm_modulate" == site.kind


SOURCE = """
def modulate(x, scale, shift):
    return x * (1 + scale) + shift

def plain(x):
    return x
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with one site."""
    path = tmp_path / "somebodys_model.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_the_command_lists_the_sites_of_a_file(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["scan", str(source)])

    assert "somebodys_model.py:3  modulate  modulate\n    x * (1 + scale) + shift" in capsys.readouterr().out


def test_the_command_gives_the_sites_as_json_too(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["scan", "--json", f"{source}:modulate"])

    (site,) = json.loads(capsys.readouterr().out)
    assert (str(source), 3, "modulate", []) == (site["file"], site["line"], site["kind"], site["modules"])


def test_the_command_exits_with_1_where_there_is_no_site(source: Path) -> None:
    assert 1 == main(["scan", f"{source}:plain"])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module_anywhere", "it cannot be imported: No module named"),
        ("no/such/file.py", "it cannot be imported"),
        ("..", "..: it cannot be imported: TypeError: "),
        (":Class", "target ':Class': expected package.module, package.module:Class or a Python file"),
        ("json:", "target 'json:': expected package.module, package.module:Class or a Python file"),
        ("json:Nothing", "json has no 'Nothing'"),
        ("json:__name__", "expected an nn.Module, a class, a function or a Python module"),
    ],
)
def test_the_command_says_in_a_line_what_it_cannot_scan(
    target: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(["scan", target])

    error = capsys.readouterr().err
    assert message in error
    assert 1 == error.count("\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("def f(:", "invalid syntax"),
        ("x = '\0'", "source code string cannot contain null bytes"),
    ],
)
def test_a_file_that_cannot_be_imported_is_a_line_too(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    assert 2 == main(["scan", str(file)])
    error = capsys.readouterr().err
    assert f"{file}: it cannot be imported: " in error
    assert message in error
    assert 1 == error.count("\n")


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Awkward(nn.Module):
    """Norms that are none, and a forward that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_of = len
        self.made_norm = types.new_class("MadeNorm", (nn.Module,))()
        self.made_norm.eps = 1e-6
        self.builtin_norm = types.new_class("BuiltinNorm", (nn.Module,), exec_body=self.fill)()
        self.builtin_norm.eps = 1e-6

    @staticmethod
    def fill(namespace: dict[str, object]) -> None:
        exec(compile("def forward(self, x):\n    return x", "<nowhere>", "exec"), namespace)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        first = self.norm_of(x) * (1 + scale) + shift
        second = self.made_norm(first) * (1 + scale) + shift
        third = self.builtin_norm(second) * (1 + scale) + shift
        return rms_norm(third) * (1 + scale) + shift


def test_a_norm_that_cannot_be_looked_into_is_not_folded_in() -> None:
    notes = [str(site.norm_note) for site in scan(Awkward())]
    assert "it is no module" == notes[0]
    assert "no kernel repeats a MadeNorm" in notes[1]
    assert "no kernel repeats a BuiltinNorm" in notes[2]
    assert "call a norm of the instance, as `self.norm(x)`" in notes[3]


def test_a_function_that_no_file_holds_has_no_source() -> None:
    namespace: dict[str, FunctionType] = {}
    exec(compile("def made(x):\n    return x", "<nowhere>", "exec"), namespace)
    with pytest.raises(NoSource, match="its source <nowhere> cannot be read"):
        source_of(namespace["made"])


def test_a_file_that_is_python_no_more_has_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "broken_model.py"
    path.write_text("def made(x):\n    return x\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("broken_model").made
    path.write_text("def made(x:\n", encoding="utf-8")
    linecache.checkcache()
    with pytest.raises(NoSource, match=r"its source .*broken_model\.py is no Python"):
        source_of(made)


def test_a_lambda_is_no_function_of_a_file() -> None:
    """Its name stands in no `def`."""
    double = lambda x: 2 * x
    assert isinstance(double, FunctionType)
    with pytest.raises(NoSource, match=r"line \d+ of .*test_scan\.py defines no function <lambda>"):
        source_of(double)


def test_a_file_without_a_python_name_cannot_be_scanned(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UsageError, match=r"folder\.py: it cannot be imported"):
        named_target(str(tmp_path / "folder.py"))
