"""Presets that are programs: what a command writes is decoded, and the decoded tensors are what counts.

An encoder may write other bytes for the same picture: a time stamp, a version, another level of compression.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fusiongate.errors import UsageError

from .registry import Preset, Run, Size, Steps, declared
from .video import SUFFIXES, film

__all__ = ["command_preset", "decode", "decoders"]

_TAIL = 2000
"""Characters of a failed command's output that its error repeats."""

_PICKLES = (".ckpt", ".pickle", ".pkl", ".pt", ".pth")

_PACKAGES = {"PIL": "pillow", "av": "'fusiongate[video]'"}
"""Where a library that decodes has another name than the package that brings it."""


def command_preset(
    name: str,
    command: Sequence[str],
    *,
    fused: Mapping[str, str] | None = None,
    reference: Mapping[str, str] | None = None,
    sizes: Sequence[Size] = ("tiny",),
    devices: Sequence[str] = ("cpu", "cuda"),
) -> Preset:
    """A preset that runs a program and digests what it writes.

    Parameters
    ----------
    name
        As for :func:`fusiongate.preset`.
    command
        The program and its arguments, in which ``{out}``, ``{seed}``, ``{size}`` and ``{device}`` are replaced. It
        writes its results into the folder ``{out}``: ``.npy``, ``.npz``, ``.safetensors``, pictures, films and sound;
        :func:`decode` knows the suffixes.
    fused, reference
        Environment variables of the two arms; by default ``FUSIONGATE_DISABLE=1`` switches the kernels off in the
        second.
    sizes, devices
        As for :func:`fusiongate.preset`.

    Raises
    ------
    UsageError
        When it runs: the command fails, or writes nothing that can be decoded.
    """
    if not command:
        raise UsageError(f"preset {name!r}: the command is empty; expected a program and its arguments")
    surroundings = {"fused": dict(fused or {}), "reference": {"FUSIONGATE_DISABLE": "1", **(reference or {})}}

    def steps(run: Run) -> Steps:
        with tempfile.TemporaryDirectory(prefix="fusiongate-") as folder:
            words = {"out": folder, "seed": run.seed, "size": run.size, "device": run.device}
            given = [argument.format(**words) for argument in command]
            done = subprocess.run(
                given, env={**os.environ, **surroundings[run.arm]}, capture_output=True, text=True, check=False
            )
            if done.returncode:
                printed = (done.stdout + done.stderr)[-_TAIL:].strip()
                raise UsageError(f"preset {name!r}: {given[0]} exited with {done.returncode}: {printed}")
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            if not files:
                raise UsageError(f"preset {name!r}: {given[0]} wrote nothing into {{out}}; expected files of tensors")
            for file in files:
                yield file.relative_to(folder).as_posix(), dict(decode(file))

    # Another process finds it in the module that declares it, which is the caller's.
    module = sys._getframe(1).f_globals.get("__name__", "__main__")
    # What the program's gates do is not seen from here: its digests alone are held.
    return declared(name, steps, sizes=sizes, devices=devices, needs=(), module=module, fused=False)


def decode(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a file holds, by name; of a picture its pixels, of a film its frames and its sound's samples.

    Raises
    ------
    UsageError
        If files of its kind cannot be decoded here, or this one is damaged.
    """
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise UsageError(
            f"{path.name}: {suffix} is a pickle, which runs code when it is read; write .safetensors or .npy instead"
        )
    decoder = decoders().get(suffix)
    if decoder is None:
        known = ", ".join(sorted(decoders()))
        raise UsageError(
            f"{path.name}: no decoder for {path.suffix or 'a file without a suffix'}; expected one of {known}"
        )
    try:
        yield from decoder(path)
    except UsageError:
        raise
    except ImportError as error:
        needed = str(error.name).partition(".")[0]
        package = _PACKAGES.get(needed, needed)
        raise UsageError(f"{path.name}: {needed} is needed to decode it: pip install {package}") from error
    except Exception as error:  # of as many kinds as there are libraries, some of them bare
        told = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{path.name}: damaged, or no {suffix} file: {told}; write it again") from error


def decoders() -> dict[str, Callable[[Path], Iterator[tuple[str, Tensor]]]]:
    """What decodes each kind of file, by its suffix."""
    pictures = dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"), _picture)
    tensors = {".npy": _array, ".npz": _arrays, ".safetensors": _safetensors}
    return {**tensors, **pictures, **dict.fromkeys(SUFFIXES, film), ".wav": _sound}


def _array(path: Path) -> Iterator[tuple[str, Tensor]]:
    import numpy as np

    yield "array", torch.from_numpy(np.load(path, allow_pickle=False))


def _arrays(path: Path) -> Iterator[tuple[str, Tensor]]:
    import numpy as np

    with np.load(path, allow_pickle=False) as arrays:
        for name in sorted(arrays.files):
            yield name, torch.from_numpy(arrays[name])


def _safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    yield from sorted(load_file(path).items())


def _sound(path: Path) -> Iterator[tuple[str, Tensor]]:
    with wave.open(str(path), "rb") as sound:
        channels, width = sound.getnchannels(), sound.getsampwidth()
        frames = torch.frombuffer(bytearray(sound.readframes(sound.getnframes())), dtype=torch.uint8)
        yield "samples", frames.view(-1, channels, width)
        yield "rate", torch.tensor(sound.getframerate())


def _picture(path: Path) -> Iterator[tuple[str, Tensor]]:
    import PIL.Image
    import PIL.ImageSequence

    with PIL.Image.open(path) as picture:
        for number, frame in enumerate(PIL.ImageSequence.Iterator(picture)):
            # The other grey ones, of 16 and 32 bits, would be cut to eight.
            deep = frame.mode.startswith(("I", "F"))
            pixels = frame if deep else frame.convert("RGBA" if "A" in frame.getbands() or frame.mode == "P" else "RGB")
            flat = torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8)
            yield f"frame {number}", flat.view(pixels.height, pixels.width, -1)
