"""One measuring process a device: the second one waits, and says so when it has waited too long."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from fusiongate.errors import TimingError
from fusiongate.timing.device_lock import lock_path, turn

CPU = torch.device("cpu")

HOLDER = """\
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def test_a_device_that_another_process_measures_on_is_waited_for() -> None:
    command = [sys.executable, "-c", HOLDER, str(lock_path(CPU))]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert "held\n" == holder.stdout.readline()
        held = pytest.raises(TimingError, match=r"^cpu: another process has been measuring on it")
        with held, turn(CPU, patience_s=0.1):
            pass
    finally:
        holder.communicate("")
    with turn(CPU, patience_s=5.0):
        assert lock_path(CPU).exists()


def test_a_turn_ends_with_a_failed_measurement() -> None:
    with pytest.raises(ZeroDivisionError), turn(CPU):
        raise ZeroDivisionError
    with turn(CPU, patience_s=0.1):
        pass


@pytest.mark.parametrize("obstacle", ["a folder", "a link of another user's", "no folder to put it into"])
def test_where_no_lock_can_be_had_nothing_is_measured(obstacle: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    path = lock_path(CPU)
    if obstacle == "a folder":
        path.mkdir()
    elif obstacle == "a link of another user's":
        path.symlink_to(tmp_path / "precious")
    else:
        (tmp_path / "precious").rename(tmp_path.with_name("precious"))
        tmp_path.rmdir()
        tmp_path.write_text("")
    with (
        pytest.raises(TimingError, match=r"^cpu: nothing shows .*set TMPDIR to a folder that you may write"),
        turn(CPU),
    ):
        pass
    assert obstacle == "no folder to put it into" or "kept" == (tmp_path / "precious").read_text()


def test_each_gpu_has_a_lock_by_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: types.SimpleNamespace(uuid=f"{d.index}/x"))
    names = {lock_path(torch.device("cuda", index)).name for index in (0, 1)}
    assert 2 == len(names)
    assert all(name.endswith("_x.lock") for name in names)
