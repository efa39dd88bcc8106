"""A gate in another process: after a fork no lock is held there, and what is sent there goes by its name."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fusiongate import kernels
from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion

from .planted import fusion

FORKS = """
import os, signal, threading, torch
from fusiongate import sites
from fusiongate.gate.fusion import Fusion

torch.set_num_threads(1)
x = torch.ones(4, 8)

def doubled(kernel):
    return Fusion("doubled", reference=lambda x: x * 2, fused=kernel)

def in_child(body):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            body()
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0, (status, body)
"""

DURING_FIRST_SIGHT = """
inside, go_on = threading.Event(), threading.Event()

def slow(x):
    if threading.current_thread() is not threading.main_thread():
        inside.set()
        go_on.wait(60)
    return torch.mul(x, 2)

op = doubled(slow)

def calls():
    assert [op(x).sum().item() for _ in range(3)] == [64.0] * 3 and op.counters["fused", "verified"] == 2

def reads():
    op.counters, op.launches, op.explain(x), op.standing(x)

def verifies():
    assert op.verify(x)

def isolates():
    with op.isolated() as fresh:
        assert fresh.verify(x)

def mounts():
    module = torch.nn.Linear(2, 2)
    sites.attach(module, op), sites.mount(module)

thread = threading.Thread(target=op, args=(x,))
thread.start()
inside.wait(60)
for body in (calls, reads, verifies, isolates, mounts):
    in_child(body)
go_on.set()
thread.join()
calls_before = op.counters["fused", "verified"]
op(x)
assert op.counters["fused", "verified"] == calls_before + 1
"""

WHILE_EACH_LOCK_IS_HELD = """
op = doubled(lambda x: torch.mul(x, 2))

def uses_all():
    op(x), op(x), op.counters, op.launches
    module = torch.nn.Linear(2, 2)
    sites.attach(module, op), sites.mount(module)

for owner in (op.gate, op._tallies, op._launched, sites):
    inside, go_on = threading.Event(), threading.Event()

    def hold():
        with owner.lock:
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60)
    in_child(uses_all)
    go_on.set()
    thread.join()
"""

BY_THE_KERNEL = """
pids = []

def forking(x):
    if not pids:
        pids.append(os.fork())
        if pids[0] == 0:
            signal.alarm(30)
    return torch.mul(x, 2)

op = doubled(forking)
op(x)
elsewhere = threading.Thread(target=op, args=(x,))
elsewhere.start()
elsewhere.join(20)
free = not elsewhere.is_alive() and op.counters["fused", "verified"] == 1
if pids[0] == 0:
    os._exit(not free)
assert free and os.waitpid(pids[0], 0)[1] == 0
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    return subprocess.run(
        [sys.executable, str(path)], check=False, cwd=folder, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "what",
    [DURING_FIRST_SIGHT, WHILE_EACH_LOCK_IS_HELD, BY_THE_KERNEL],
    ids=["during-a-first-sight", "while-each-lock-is-held", "by-the-kernel"],
)
def test_a_fork_leaves_no_lock_held_in_the_child(tmp_path: Path, what: str) -> None:
    done = run(FORKS + what, tmp_path)
    assert (0, "") == (done.returncode, done.stderr)


# Pickles --------------------------------------------------------------------------------------------------------------

MODULE = """
import torch
from fusiongate.gate.fusion import Fusion

def reference(x):
    return x * 2

def kernel(x):
    return torch.mul(x, 2)

doubled = Fusion("doubled", reference=reference, fused=kernel)

class Model(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.op(x)
"""

SAVED = """
import io, pickle, torch, ops, fusiongate as fg, fusiongate.errors

for op in (ops.doubled, fg.kernels.modulate, fg.kernels.modulate.host):
    assert pickle.loads(pickle.dumps(op)) is op
model = ops.Model(ops.doubled)
with torch.no_grad():
    model(torch.ones(3)), model(torch.ones(3))
assert ops.doubled.counters["fused", "verified"] == 1
torch.save(model, "model.pt")
model.op = fg.Fusion.of(ops.doubled.spec)
for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
    try:
        save(model)
    except fg.errors.UsageError as error:
        assert "no module does" in str(error)
    else:
        raise AssertionError("saved")
kept, ops.doubled = pickle.dumps(ops.doubled), 3
try:
    pickle.loads(kept)
except fg.errors.UsageError as error:
    assert str(error) == "a pickle names the fusion ops.doubled, and there is none: 3"
"""

LOADED = """
import torch, ops
import torch.multiprocessing as mp

def child(model, queue):
    with torch.no_grad():
        queue.put((model.op.name, len(model.op.gate.signatures), float(model(torch.ones(3)).sum())))

if __name__ == "__main__":
    model = torch.load("model.pt", weights_only=False)
    assert model.op is ops.doubled and not model.op.gate.signatures and not model.op.counters
    with torch.no_grad():
        assert model(torch.ones(3)).tolist() == [2.0] * 3
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(model, queue))
    process.start()
    assert queue.get(timeout=250) == ("doubled", 0, 6.0)
    process.join(30)
"""


def test_a_model_is_saved_loaded_and_spawned_with_a_fresh_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved by this process, loaded by another one, which spawns a third."""
    (tmp_path / "ops.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    ops = ModuleType("ops")
    monkeypatch.setitem(sys.modules, "ops", ops)
    exec(MODULE, ops.__dict__)
    exec(SAVED, {})

    done = run(LOADED, tmp_path)

    assert (0, "") == (done.returncode, done.stderr)


AT_TOP_LEVEL = fusion()


def test_a_fusion_goes_by_the_name_that_a_module_has_for_it() -> None:
    assert (__name__, "AT_TOP_LEVEL") == AT_TOP_LEVEL.__reduce__()[1]
    assert kernels.modulate.host is not None
    module, path = kernels.modulate.host.__reduce__()[1]
    assert ("fusiongate.kernels", "modulate.host") == (module[:18], path)


@pytest.mark.parametrize(
    "made",
    [
        fusion,
        lambda: Fusion.of(AT_TOP_LEVEL.spec),
        lambda: AT_TOP_LEVEL.with_reference(AT_TOP_LEVEL.reference),
        lambda: AT_TOP_LEVEL.isolated().__enter__(),
    ],
    ids=["nameless", "variant", "at-a-site", "isolated"],
)
def test_a_fusion_that_no_module_names_says_so_in_a_sentence(made: Callable[[], Fusion]) -> None:
    with pytest.raises(UsageError, match=r"^Fusion\('planted'\) is pickled by the name .*, and no module does: assign"):
        made().__reduce__()


def test_a_model_that_is_copied_keeps_its_gate() -> None:
    model: Any = torch.nn.Module()
    model.op = op = fusion()

    assert op is copy.copy(op) is copy.copy(model).op is copy.deepcopy(model).op
