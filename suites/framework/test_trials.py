"""Trials of a class, and the table of a package's models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusiongate.cli import main
from fusiongate.report.scans import ScannedModel, page, scan_package

from .wheels import SOURCE

MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, scale, shift):
        y = self.linear(x)
        x = x * (1 + scale) + shift
        return x + y * self.gate(x)

    def gate(self, x):
        return x * 2

class Model(nn.Module):
    def __init__(self, in_channels=8, num_layers=12):
        super().__init__()
        self.layers = nn.ModuleList(Block(in_channels) for _ in range(num_layers))

    def forward(self, hidden_states, timestep):
        for layer in self.layers:
            hidden_states = layer(hidden_states, hidden_states[:, :1], hidden_states[:, 1:2])
        return (hidden_states,)

class Alone(nn.Module):
    def __init__(self, width):
        super().__init__()

    def forward(self, x, scale, shift):
        x *= 1 + scale
        x += shift
        return x

class Drifting(Model):
    def forward(self, hidden_states, timestep):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(hidden_states * self.calls, timestep)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package of models, whose name no other test has imported."""
    name = f"tried_{abs(hash(request.node.name))}"
    folder = tmp_path / name / "inner"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").touch()
    (folder / "models.py").write_text(MODELS, encoding="utf-8")
    (folder / "broken.py").write_text("import a_module_that_nobody_has\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_package_is_scanned_as_a_table_of_its_models(package: str) -> None:
    found = list(scan_package(__import__(package)))

    (told,) = (each for each in found if isinstance(each, str))
    assert f"{package}.inner.broken: it cannot be imported: ModuleNotFoundError" in told
    models = {each.name: each for each in found if isinstance(each, ScannedModel)}
    assert {"Model", "Drifting", "Alone"} == models.keys()
    model = models["Model"]
    assert (24, 12, 24, None) == (model.sites, model.mounted, model.saved, model.note)
    assert {"no kernel of the kind gated_residual is shipped": ("models.py:13",)} == {
        reason: places for reason, places in model.obstacles.items() if "gated" in reason
    }
    assert "not built" in str(models["Alone"].note)
    (reason,) = models["Alone"].obstacles
    assert reason.startswith("it writes in place")


def test_the_table_and_its_json(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["scan", package])
    printed = capsys.readouterr()
    assert ["Model", "24", "12", "24"] in [line.split() for line in printed.out.splitlines()]
    assert "broken" in printed.err
    assert 0 == main(["scan", "--json", package])
    assert {"Model", "Drifting", "Alone"} == {model["name"] for model in json.loads(capsys.readouterr().out)}
    assert 1 == main(["scan", "json"])
    assert "0 sites" in capsys.readouterr().out


def test_a_trial_prints_sites_bits_and_times(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["try", f"{package}.inner.models:Model", "--device=cpu", "--seconds=0.05"]
    assert 0 == main(words)
    text = capsys.readouterr().out
    assert "2 of 4 sites mounted; 6 calls fused" in text
    assert "bits: equal in 4 calls" in text
    assert "times of one forward: eager" in text
    assert 0 == main([*words, "--json", "--config", '{"num_layers": 1}', "--inputs", '{"hidden_states": [1, 3, 8]}'])
    trial = json.loads(capsys.readouterr().out)
    assert [True, 1, 2] == [trial["equal"], trial["mounted"], len(trial["sites"])]


def test_a_model_whose_bits_differ_ends_in_1(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == main(["try", f"{package}.inner.models:Drifting", "--device=cpu", "--seconds=0.05"])
    assert "bits: NOT equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["Alone"], "Alone needs width: give them as --config '{\"width\": …}'"),
        (["Alone", "--config", '{"width": 3}'], "Alone cannot be called: no 'x' is known; give shapes as --inputs"),
        (["Model", "--config", '{"in_channels": "a"}'], "Model cannot be built: TypeError"),
        (["Model", "--config", "[]"], "--config: expected a JSON object"),
        (["Model", "--inputs", "{"], "--inputs: it is no JSON"),
        (["Model", "--inputs", '{"y": [1]}'], "Model.forward takes no 'y': it takes hidden_states, timestep"),
        (["Model", "--inputs", '{"timestep": {"shape": [1], "dtype": "int65"}}'], "dtype 'int65': expected one of"),
        (["Model", "--dtype", "int"], "--dtype=int"),
        (["Model", "--device", "abacus"], "--device=abacus"),
        (["nn.Module.forward"], "is no class of models"),
    ],
)
def test_what_cannot_be_tried_is_told_in_one_line(
    words: list[str], expected: str, package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(["try", f"{package}.inner.models:{words[0]}", "--device=cpu", *words[1:]])
    told = capsys.readouterr().err.strip()
    assert expected in told
    assert 1 == len(told.splitlines())


@pytest.mark.skipif(not (SOURCE / "docs").is_dir(), reason="needs the source tree")
def test_the_published_list_of_pure_expressions_is_the_one_that_proofs_go_by() -> None:
    assert page() == (SOURCE / "docs" / "pure-expressions.md").read_text(encoding="utf-8")
