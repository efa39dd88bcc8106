"""Presets that are programs: their outputs are decoded before they are hashed."""

from __future__ import annotations

import importlib
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fusiongate.errors import UsageError
from fusiongate.presets import PRESETS, command_preset, decode, first_difference, run_arm, run_fresh

CPU = torch.device("cpu")

PROGRAM = """
import os, sys
import numpy as np
out, seed = sys.argv[1:]
values = np.arange(6, dtype=np.float32) + int(seed)
np.save(os.path.join(out, "values.npy"), values)
if os.environ.get("FUSIONGATE_DISABLE") != "1":
    np.save(os.path.join(out, "values.npy"), values + float(os.environ.get("FAULT", 0)))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that writes an array, a faulty one where it is told to."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Each test may declare its preset anew."""
    yield
    PRESETS.pop("a-program", None)


def command(program: Path) -> list[str]:
    return [sys.executable, str(program), "{out}", "{seed}"]


def test_a_programs_files_are_the_steps(program: Path) -> None:
    preset = command_preset("a-program", command(program))

    one, other = (run_arm(preset, "reference", seed=seed, device=CPU).steps for seed in (0, 1))

    assert ["values.npy"] == list(one)
    assert ("float32", (6,)) == (one["values.npy"]["array"].dtype, one["values.npy"]["array"].shape)
    assert first_difference(one, other) is not None


def test_the_reference_arm_runs_with_the_kernels_switched_off(program: Path) -> None:
    right = command_preset("a-program", command(program))
    assert (
        first_difference(
            run_arm(right, "reference", device=CPU).steps, run_arm(right, "fused", device=CPU, ops=()).steps
        )
        is None
    )

    wrong = command_preset("a-program", command(program), fused={"FAULT": "1"})
    assert (
        first_difference(
            run_arm(wrong, "reference", device=CPU).steps, run_arm(wrong, "fused", device=CPU, ops=()).steps
        )
        is not None
    )


def test_a_program_that_fails_is_reported_with_its_output() -> None:
    preset = command_preset("a-program", [sys.executable, "-c", "import sys; sys.exit('no model here')"])

    with pytest.raises(UsageError, match=r"exited with 1: no model here"):
        run_arm(preset, "reference", device=CPU)


def test_a_program_that_writes_nothing_is_no_preset() -> None:
    preset = command_preset("a-program", [sys.executable, "-c", "pass"])

    with pytest.raises(UsageError, match=r"wrote nothing into \{out\}"):
        run_arm(preset, "reference", device=CPU)


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(UsageError, match="the command is empty"):
        command_preset("a-program", [])


@pytest.mark.usefixtures("forked")
def test_a_program_runs_in_another_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Path) -> None:
    """The module that declares it is imported there."""
    (tmp_path / "declares_a_program.py").write_text(
        f"from fusiongate.presets import command_preset\nit = command_preset('a-program', {command(program)!r})\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    declares_a_program = importlib.import_module("declares_a_program")

    (run,) = run_fresh([declares_a_program.it])

    assert ["values.npy"] == list(run.record.fused)


def test_pictures_are_compared_by_their_pixels(tmp_path: Path) -> None:
    """Another level of compression is another file, and the same picture."""
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    for name, level in (("small.png", 9), ("large.png", 0)):
        Image.fromarray(pixels).save(tmp_path / name, compress_level=level)

    small, large = (dict(decode(tmp_path / name)) for name in ("small.png", "large.png"))

    assert (tmp_path / "small.png").read_bytes() != (tmp_path / "large.png").read_bytes()
    assert torch.equal(small["frame 0"], large["frame 0"])
    assert torch.equal(torch.from_numpy(pixels), small["frame 0"])


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_the_lowest_bit_of_a_deep_picture_counts(tmp_path: Path, dtype: type[np.generic]) -> None:
    """A map of depths, say."""
    depths = np.arange(300 * 7, dtype=dtype).reshape(300, 7)
    Image.fromarray(depths).save(tmp_path / "depths.tif")

    (pixels,) = dict(decode(tmp_path / "depths.tif")).values()

    assert torch.equal(torch.from_numpy(depths.view(np.uint8)).view(300, 7, -1), pixels)


def test_every_frame_of_a_film_counts(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 3), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "film.webp", save_all=True, append_images=frames[1:], lossless=True)

    assert ["frame 0", "frame 1"] == [name for name, _ in decode(tmp_path / "film.webp")]


def test_sound_is_compared_by_its_samples(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as sound:
        sound.setparams((2, 2, 8000, 0, "NONE", ""))
        sound.writeframes(np.arange(8, dtype=np.int16).tobytes())

    decoded = dict(decode(path))

    assert (4, 2, 2) == decoded["samples"].shape
    assert 8000 == decoded["rate"]


def test_tensors_are_read_by_name(tmp_path: Path) -> None:
    save_file({"b": torch.ones(2, dtype=torch.bfloat16), "a": torch.zeros(1)}, tmp_path / "tensors.safetensors")
    np.savez(tmp_path / "arrays.npz", x=np.zeros(2), w=np.ones(3))

    tensors = dict(decode(tmp_path / "tensors.safetensors"))
    assert ["a", "b"] == list(tensors)
    assert torch.bfloat16 == tensors["b"].dtype
    assert ["w", "x"] == [name for name, _ in decode(tmp_path / "arrays.npz")]


@pytest.mark.parametrize("suffix", [".pt", ".PTH", ".pkl"])
def test_a_pickle_is_not_read(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UsageError) as refused:
        dict(decode(tmp_path / f"tensors{suffix}"))

    assert (
        f"tensors{suffix}: {suffix.lower()} is a pickle, which runs code when it is read; write .safetensors or .npy "
        f"instead"
    ) == str(refused.value)


def test_an_array_of_objects_is_a_pickle_too(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))

    with pytest.raises(UsageError, match=r"objects.npy: damaged, or no .npy file: .* allow_pickle=False; write it"):
        dict(decode(tmp_path / "objects.npy"))


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".wav", ".png", ".gif", ".mp4", ".mkv"])
@pytest.mark.parametrize("content", [b"", b"no such thing\nas this"], ids=["empty", "foreign"])
def test_a_file_that_is_something_else_is_one_line(tmp_path: Path, suffix: str, content: bytes) -> None:
    (tmp_path / f"output{suffix}").write_bytes(content)

    with pytest.raises(UsageError) as refused:
        dict(decode(tmp_path / f"output{suffix}"))

    assert str(refused.value).startswith(f"output{suffix}: damaged, or no {suffix} file: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name, needed, package",
    [("film.mp4", "av", "'fusiongate[video]'"), ("picture.png", "PIL", "pillow")],
)
def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, needed: str, package: str
) -> None:
    for module in [needed, *(module for module in sys.modules if module.startswith(f"{needed}."))]:
        monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(UsageError) as refused:
        dict(decode(tmp_path / name))

    assert f"{name}: {needed} is needed to decode it: pip install {package}" == str(refused.value)


def test_a_file_that_nobody_can_decode_says_what_could_be(tmp_path: Path) -> None:
    (tmp_path / "film.xyz").write_bytes(b"?")

    with pytest.raises(UsageError, match=r"film.xyz: no decoder for .xyz; expected one of .aac, .avi, .bmp, "):
        dict(decode(tmp_path / "film.xyz"))
