"""Films and sound: what they show and sound like counts, and nothing else of their files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import av
import av.logging
import numpy as np
import numpy.typing as npt
import pytest
import torch
from av.audio.stream import AudioStream
from av.stream import Disposition
from av.video.stream import VideoStream

from fusiongate.comparison.digests import digest
from fusiongate.errors import UsageError
from fusiongate.presets import PRESETS, command_preset, decode, first_difference, run_arm
from fusiongate.presets.outputs import decoders
from fusiongate.presets.video import SUFFIXES

HEIGHT, WIDTH, RATE = 48, 64, 8000
FRAMES = tuple(
    np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8) for number in range(4)
)
SAMPLES = np.random.default_rng(9).integers(-(2**15), 2**15, (2, 3000), dtype=np.int16)

PROGRAM = """
import os, sys
import av
import numpy as np
out, seed = sys.argv[1:]
with av.open(os.path.join(out, "film.mkv"), "w") as film:
    film.metadata["comment"] = f"written by process {os.getpid()}"
    video = film.add_stream("ffv1", rate=24)
    video.width, video.height, video.pix_fmt = 32, 16, "bgr0"
    pixels = np.random.default_rng(int(seed)).integers(0, 256, (16, 32, 3), dtype=np.uint8)
    film.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
    film.mux(video.encode(None))
"""

Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


def heard(sound: npt.NDArray[np.int16], form: str = "s16") -> av.AudioFrame:
    """Samples of two channels as an encoder takes them: in turns, or (s16p) a row each."""
    laid = sound if form == "s16p" else sound.T.reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(laid.copy(), format=form, layout="stereo")
    frame.sample_rate, frame.pts = RATE, 0
    return frame


def write(
    path: Path,
    frames: Sequence[Pixels] = FRAMES,
    sound: npt.NDArray[np.int16] | None = None,
    *,
    codec: str = "ffv1",
    stored: str = "bgr0",
    given: str = "rgb24",
    options: Mapping[str, str] | None = None,
    **metadata: str,
) -> Path:
    """A film of these frames, by default in a codec that loses nothing; with sound if there is any."""
    with av.open(str(path), "w") as container:
        container.metadata.update(metadata)
        video = container.add_stream(codec, rate=24, options=dict(options or {})) if frames else None
        audio = container.add_stream("flac", rate=RATE) if sound is not None else None
        if isinstance(audio, AudioStream):
            audio.layout = "stereo"
        if isinstance(video, VideoStream):
            video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, stored
            for number, pixels in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(pixels, format=given)
                frame.pts = number
                container.mux(video.encode(frame))
            container.mux(video.encode(None))
        if isinstance(audio, AudioStream) and sound is not None:
            container.mux(audio.encode(heard(sound)))
            container.mux(audio.encode(None))
    return path


def test_frames_come_back_as_they_were_shown(tmp_path: Path) -> None:
    decoded = dict(decode(write(tmp_path / "film.mkv")))

    assert [f"stream 0 frame {number}" for number in range(len(FRAMES))] == list(decoded)
    for shown, frame in zip(FRAMES, decoded.values(), strict=True):
        assert (torch.uint8, shown.shape) == (frame.dtype, frame.shape)
        assert torch.equal(torch.from_numpy(shown), frame)


def test_what_the_container_says_does_not_count(tmp_path: Path) -> None:
    """The same frames and samples, muxed twice: other bytes, and the same digest."""
    one = write(tmp_path / "one.mkv", sound=SAMPLES, title="one", creation_time="2020-01-01T00:00:00Z")
    other = write(tmp_path / "other.mkv", sound=SAMPLES, title="the other", comment="of another day")

    assert one.read_bytes() != other.read_bytes()
    assert digest(dict(decode(one))) == digest(dict(decode(other)))


@pytest.mark.parametrize(
    "name, codec, stored",
    [("film.avi", "ffv1", "bgra"), ("film.mov", "png", "rgb24"), ("film.mp4", "libx264rgb", "rgb24")],
)
def test_how_the_frames_are_packed_does_not_count(tmp_path: Path, name: str, codec: str, stored: str) -> None:
    """Another container and another codec without loss; alpha, which was never given, is a channel of its own."""
    packed = write(tmp_path / name, codec=codec, stored=stored, options={"qp": "0"} if codec == "libx264rgb" else {})

    found = [frame[..., :3] for frame in dict(decode(packed)).values()]

    assert digest(found) == digest([torch.from_numpy(frame) for frame in FRAMES])


def test_a_program_that_dates_its_films_is_a_preset_that_repeats(tmp_path: Path) -> None:
    """What runs it again is another process, which writes another date and the same frames."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    preset = command_preset("a-film", [sys.executable, str(program), "{out}", "{seed}"])
    try:
        one, again, other = (
            run_arm(preset, "reference", seed=seed, device=torch.device("cpu")).steps for seed in (0, 0, 1)
        )
    finally:
        PRESETS.pop("a-film")

    assert first_difference(one, again) is None
    assert "step 'film.mkv', tensor 'stream 0 frame 0'" in str(first_difference(one, other))


def test_one_pixel_counts(tmp_path: Path) -> None:
    changed = [frame.copy() for frame in FRAMES]
    changed[2][5, 7, 1] ^= 1
    one, other = write(tmp_path / "one.mkv"), write(tmp_path / "other.mkv", changed)

    before, after = digest(dict(decode(one))), digest(dict(decode(other)))

    assert ["stream 0 frame 2"] == [name for name in before if before[name] != after[name]]


def test_the_lowest_of_sixteen_bits_counts(tmp_path: Path) -> None:
    deep = np.random.default_rng(1).integers(0, 2**16, (HEIGHT, WIDTH, 3), dtype=np.uint16)
    film = write(tmp_path / "film.mkv", [deep], stored="gbrp16le", given="rgb48le", options={"level": "3"})

    (frame,) = dict(decode(film)).values()

    assert torch.equal(torch.from_numpy(deep.view(np.uint8)), frame)


@pytest.mark.parametrize(
    "name, codec", [("film.webm", "libvpx-vp9"), ("film.mp4", "libx264"), ("film.avi", "mpeg4"), ("film.m4v", "mpeg4")]
)
def test_the_usual_films_are_read(tmp_path: Path, name: str, codec: str) -> None:
    decoded = dict(decode(write(tmp_path / name, codec=codec, stored="yuv420p")))

    assert len(FRAMES) == len(decoded)
    assert {(HEIGHT, WIDTH, 3)} == {tuple(frame.shape) for frame in decoded.values()}


def test_every_sample_of_the_sound_counts(tmp_path: Path) -> None:
    changed = SAMPLES.copy()
    changed[1, 1234] ^= 1
    one = dict(decode(write(tmp_path / "one.mkv", sound=SAMPLES)))
    other = dict(decode(write(tmp_path / "other.mkv", sound=changed)))

    assert torch.equal(torch.from_numpy(SAMPLES), one["stream 1 samples"])
    assert torch.equal(torch.from_numpy(changed), other["stream 1 samples"])
    assert RATE == one["stream 1 rate"]


def test_samples_of_each_channel_in_turn_are_sorted_by_channel(tmp_path: Path) -> None:
    """FLAC decodes to all channels in turns, AAC to one row a channel."""
    flac = write(tmp_path / "sound.flac", frames=(), sound=SAMPLES)
    with av.open(str(tmp_path / "sound.m4a"), "w") as container:
        stream = container.add_stream("aac", rate=RATE)
        stream.layout = "stereo"
        container.mux(stream.encode(heard(SAMPLES)))
        container.mux(stream.encode(None))

    assert torch.equal(torch.from_numpy(SAMPLES), dict(decode(flac))["stream 0 samples"])
    samples = dict(decode(tmp_path / "sound.m4a"))["stream 0 samples"]
    assert (torch.float32, 2) == (samples.dtype, samples.shape[0])


def test_the_cover_of_a_sound_file_is_no_frame(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        sound, cover = container.add_stream("alac", rate=RATE), container.add_stream("png", rate=1)
        sound.layout = "stereo"
        cover.width, cover.height, cover.pix_fmt = WIDTH, HEIGHT, "rgb24"
        # The setter of older versions takes a number alone.
        cover.disposition = Disposition.attached_pic.value  # type: ignore[assignment]
        container.mux(sound.encode(heard(SAMPLES, "s16p")))
        container.mux(cover.encode(av.VideoFrame.from_ndarray(FRAMES[0], format="rgb24")))
        container.mux(sound.encode(None))

    assert ["stream 0 samples", "stream 0 rate"] == list(dict(decode(tmp_path / "sound.mp4")))


@pytest.mark.parametrize(
    "damage, told",
    [
        pytest.param(lambda whole: whole[: len(whole) * 2 // 3], "matroska,webm: File ended prematurely", id="cut"),
        pytest.param(
            lambda whole: whole[: len(whole) // 2] + b"\x00\xff" * 8 + whole[len(whole) // 2 + 16 :],
            "ffv1: slice CRC mismatch",
            id="overwritten",
        ),
    ],
)
def test_a_damaged_film_is_one_line_and_not_what_is_left_of_it(tmp_path: Path, damage: object, told: str) -> None:
    """Said twice, the second time as loudly as the first; PyAV's own settings stay as they are."""
    assert callable(damage)
    path = write(tmp_path / "film.mkv", options={"level": "3", "slicecrc": "1"})
    path.write_bytes(damage(path.read_bytes()))
    before = av.logging.get_level(), av.logging.get_skip_repeated()

    for _ in range(2):
        with pytest.raises(UsageError) as refused:
            dict(decode(path))
        assert str(refused.value).startswith(f"film.mkv: damaged, by {told}")
        assert str(refused.value).endswith("; write it again")
        assert "\n" not in str(refused.value)
    assert before == (av.logging.get_level(), av.logging.get_skip_repeated())


def test_a_film_cut_short_before_its_index_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "film.mp4", codec="libx264", stored="yuv420p")
    path.write_bytes(path.read_bytes()[:2000])

    with pytest.raises(UsageError, match=r"\Afilm.mp4: damaged, or no .mp4 file: [^\n]*; write it again\Z"):
        dict(decode(path))


def test_a_sound_with_nothing_in_it_is_none(tmp_path: Path) -> None:
    """An empty file of this form is one without frames."""
    (tmp_path / "sound.flac").write_bytes(b"")

    with pytest.raises(UsageError, match=r"sound.flac: neither frames nor sound in it; expected a film or a sound"):
        dict(decode(tmp_path / "sound.flac"))


def test_every_suffix_of_a_film_has_its_decoder() -> None:
    assert set(SUFFIXES) < decoders().keys()
