"""A walk as an animated GIF: packets go from sender to receiver, together where they are, the same bytes each time."""

import numpy as np
import pytest
from PIL import Image
from traces import Job

from dlearn import DlearnError
from dlearn.draw.palette import DARK, MISSING, WHOLE, look
from dlearn.play import player


def all_reduce(folder, **facts):
    job = Job(folder, ranks=2)
    job.collective("all_reduce", size=1000, **facts)
    return player(job.load())


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    """A ring of two: four rounds of two messages."""
    folder = tmp_path_factory.mktemp("ring")
    all_reduce(folder / "job").to_gif(folder / "ring.gif", seconds=0.6)
    return folder / "ring.gif"


def frames_of(path):
    with Image.open(path) as gif:
        for number in range(gif.n_frames):
            gif.seek(number)
            yield np.asarray(gif.convert("RGB")).astype(int)


def near(frame, color):
    """Which pixels have this colour, nearly."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return np.abs(frame - wanted).max(axis=2) < 24


def test_what_moves_at_the_same_time_moves_together_in_twelve_frames_a_second(ring):
    """In 0.6 s are 8 frames of 80 ms. After the last round each rank has the sum, in gold, and nobody before."""
    with Image.open(ring) as gif:
        assert (gif.n_frames, gif.info["duration"], gif.info["loop"]) == (4 * 8, 80, 0)
        gif.seek(gif.n_frames - 1)
        assert gif.info["duration"] == 3000
    first, *between, last = frames_of(ring)
    assert not near(first, WHOLE).any()
    assert near(last, WHOLE).sum() == 2 * near(between[14], WHOLE).sum() > 0  # Halfway each has a half.


def test_a_dark_page_has_a_dark_animation(tmp_path):
    all_reduce(tmp_path / "job").to_gif(tmp_path / "dark.gif", dark=True)
    assert all(near(frame, DARK["paper"]).mean() > 0.5 for frame in frames_of(tmp_path / "dark.gif"))


def test_a_packet_goes_from_its_sender_to_its_receiver(tmp_path):
    """Rank 0 stands above rank 1. Drawn again, the bytes are the same."""
    gif, again = (tmp_path / name for name in ("one.gif", "two.gif"))
    for src, dst in ((0, 1), (1, 0)):
        job = Job(tmp_path / str(src), ranks=2)
        job.message(src, dst, size=100_000)
        shown = player(job.load())
        shown.to_gif(gif)
        *moving, _ = frames_of(gif)
        places = [np.argwhere(near(frame, look("send").color))[:, 0].mean() for frame in moving]
        assert places == sorted({*places}, reverse=src > dst)
    shown.to_gif(again)
    assert gif.read_bytes() == again.read_bytes()


def test_what_never_came_is_red_and_nothing_else_is(ring, tmp_path):
    assert not any(near(frame, MISSING).any() for frame in frames_of(ring))
    all_reduce(tmp_path, ranks=[0], end_ns=None).to_gif(tmp_path / "hung.gif")
    assert any(near(frame, MISSING).any() for frame in frames_of(tmp_path / "hung.gif"))


@pytest.mark.parametrize(("collectives", "frames"), [(12, 12 * 4 * 5), (36, 64 * 4)])
def test_never_more_than_256_frames(tmp_path, collectives, frames):
    """A round of many has fewer frames than six, but four at least; rounds that do not fit are left out."""
    job = Job(tmp_path / "job", ranks=2)
    for step in range(collectives):
        job.collective("all_reduce", size=4000, start_ns=1000 * step, end_ns=1000 * step + 900)
    player(job.load()).to_gif(tmp_path / "many.gif")
    with Image.open(tmp_path / "many.gif") as gif:
        assert gif.n_frames == frames


@pytest.mark.parametrize(
    ("backend", "calls", "name", "seconds", "why"),
    [
        ("gloo", 1, "a.mp4", 1, "is saved as .gif"),
        ("gloo", 1, "a.gif", 0, "can show one for 0.1 to 60"),
        ("gloo", 1, "nowhere/a.gif", 1, "there is no folder"),
        ("gloo", 0, "a.gif", 1, "nothing to animate"),
        ("unheard_of", 1, "a.gif", 1, "no message is known here"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, backend, calls, name, seconds, why):
    job = Job(tmp_path, ranks=2, backend=backend)
    for _ in range(calls):
        job.collective("all_reduce", size=1000)
    with pytest.raises(DlearnError, match=why):
        player(job.load()).to_gif(tmp_path / name, seconds=seconds)
