"""Nothing here reads or writes a pickle, which runs whatever code it holds when it is read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fusiongate
from fusiongate import kernels

MODULES = {"_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"}
"""Modules that pickle; `multiprocessing` does so with whatever it sends."""

CALLS = {"torch.load", "torch.save", "torch.jit.load", "torch.jit.save"}
"""Functions of torch that do."""

NAMES = {"ProcessPoolExecutor", "allow_pickle"}
"""A class that does, and the argument of numpy's functions that lets them, unless it is false."""


def pickles(source: str) -> Iterator[str]:
    """Each way to a pickle in a module, by its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [
                name
                for name in names
                if name.partition(".")[0] in MODULES or name in CALLS or name.rpartition(".")[2] in NAMES
            ]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found = [name] if name in CALLS or node.attr in NAMES else []
        elif isinstance(node, ast.keyword):
            refused = isinstance(node.value, ast.Constant) and node.value.value is False
            found = [str(node.arg)] if node.arg in NAMES and not refused else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"importlib.import_module", "__import__"}:
            given = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            found = [str(name) for name in given if str(name).partition(".")[0] in MODULES]
        else:
            continue
        yield from (f"{node.lineno}: {name}" for name in found)


@pytest.mark.parametrize("tree", ["fusiongate", "kernels", "suites"])
def test_no_module_has_a_way_to_a_pickle(tree: str) -> None:
    (package,) = {"fusiongate": fusiongate.__path__, "kernels": kernels.__path__}.get(tree, [Path(__file__).parents[1]])
    files = sorted(Path(package).rglob("*.py"))

    assert len(files) > 3
    assert [] == [f"{path}:{way}" for path in files for way in pickles(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import os, cPickle as c",
        "def f():\n    from dill import loads",
        "import joblib.memory",
        "from marshal import *",
        "import multiprocessing.pool",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "import torch\ntorch.load('x', weights_only=True)",
        "import torch\nwrite = torch.save",
        "from torch import load as read",
        "from torch.jit import load",
        "import importlib\nimportlib.import_module('shelve')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=trusted)",
    ],
)
def test_each_way_to_a_pickle_would_be_found(planted: str) -> None:
    assert 1 == len(list(pickles(planted)))


def test_what_only_resembles_one_is_left_alone() -> None:
    innocent = (
        "import json\nfrom .pickle import x\njson.load(y)\nnp.load('x', allow_pickle=False)\nself.load(torch.loads)"
    )

    assert [] == list(pickles(innocent))
