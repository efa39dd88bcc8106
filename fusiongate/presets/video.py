"""What a film shows and sounds like: its frames and its samples, decoded by PyAV.

Nothing of the container is left in them, and nothing of the encoder's bytes: no title, no date, no cover.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusiongate.errors import UsageError

if TYPE_CHECKING:
    from av import AudioFrame, VideoFrame

__all__ = ["SUFFIXES", "film"]

SUFFIXES = (
    *(".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"),
    *(".aac", ".flac", ".m4a", ".mp3", ".ogg", ".opus"),
)
"""The files that are read here: films, and sound in other forms than ``.wav``."""

_SCALING = 0x4 | 0x2000 | 0x4000 | 0x40000 | 0x80000
"""How libswscale turns YUV into RGB: bicubic, chroma in full, rounded exactly, and with the same bits on every CPU."""


def film(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The frames of a film and the samples of its sound, by name.

    A frame is uint8, ``(height, width, channels)``: red, green and blue, and alpha where the film has it. Where a
    component has more than eight bits, each takes two bytes, the lower one first. Sound is ``(channels, samples)`` in
    the dtype that its codec decodes to, and its rate is in Hz.

    Raises
    ------
    UsageError
        The film is damaged, even if a player would show what is left of it; or it has neither frames nor sound.
    """
    import av
    from av.stream import Disposition

    tensors: dict[str, Tensor] = {}
    sounds: defaultdict[int, list[AudioFrame]] = defaultdict(list)
    # A film cut short and a frame that a fault has left grey are no errors to the decoder, which only logs them.
    with _errors_logged() as logged, av.open(str(path)) as container:
        streams = [
            stream
            for stream in (*container.streams.video, *container.streams.audio)
            # The cover of a sound file is a video to its container.
            if not stream.disposition & Disposition.attached_pic
        ]
        for stream in streams:
            # A second thread would log while this one holds the interpreter, and could wait for it for ever.
            stream.codec_context.thread_type = "NONE"
            stream.codec_context.thread_count = 1
        counts = dict.fromkeys((stream.index for stream in streams), 0)
        for packet in container.demux(*streams) if streams else ():
            for frame in packet.decode():
                index = packet.stream.index
                if isinstance(frame, av.VideoFrame):
                    tensors[f"stream {index} frame {counts[index]}"] = _pixels(frame)
                    counts[index] += 1
                elif isinstance(frame, av.AudioFrame):
                    sounds[index].append(frame)
    if logged:
        _, source, message = logged[0]
        raise UsageError(f"{path.name}: damaged, by {source}: {' '.join(message.split())}; write it again")
    for index, frames in sounds.items():
        tensors[f"stream {index} samples"] = torch.cat([_samples(frame) for frame in frames], dim=1)
        tensors[f"stream {index} rate"] = torch.tensor(frames[0].sample_rate)
    if not tensors:
        raise UsageError(f"{path.name}: neither frames nor sound in it; expected a film or a sound")
    yield from tensors.items()


@contextlib.contextmanager
def _errors_logged() -> Iterator[list[tuple[int, str, str]]]:
    from av import logging

    level, skips = logging.get_level(), logging.get_skip_repeated()
    logging.set_level(logging.ERROR)
    # What was wrong with one film would be a repetition in the next, and left out.
    logging.set_skip_repeated(False)
    try:
        with logging.Capture(local=False) as logged:
            yield logged
    finally:
        logging.set_skip_repeated(skips)
        logging.set_level(level)


def _pixels(frame: VideoFrame) -> Tensor:
    components = frame.format.components
    deep = any(component.bits > 8 for component in components)
    alpha = any(component.is_alpha for component in components)
    fixed = {(False, False): "rgb24", (False, True): "rgba", (True, False): "rgb48le", (True, True): "rgba64le"}
    pixels = frame.reformat(format=fixed[deep, alpha], interpolation=_SCALING).to_ndarray()
    return torch.from_numpy(pixels.view("uint8"))


def _samples(frame: AudioFrame) -> Tensor:
    samples = torch.from_numpy(frame.to_ndarray())
    # Some codecs decode to one row a channel, others to one row of all in turns.
    return samples if frame.format.is_planar else samples.view(-1, frame.layout.nb_channels).T
