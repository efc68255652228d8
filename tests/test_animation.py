"""A walk as an animated GIF: a frame for each step, the same bytes each time."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from PIL import Image
from traces import Job, header

from dlearn.analysis.walking import walkthrough
from dlearn.draw import animation
from dlearn.draw.animation import animate, draw_frame
from dlearn.errors import DlearnError
from dlearn.play import player


def all_reduce(folder, **facts):
    job = Job(folder, ranks=2)
    job.collective("all_reduce", size=1000, **facts)
    return job


def texts(walk, place, **facts):
    figure = Figure()
    draw_frame(figure, walk, place, **facts)
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_frame_for_each_step_and_the_same_bytes_again(tmp_path):
    shown = player(all_reduce(tmp_path / "job").load())
    shown.to_gif(tmp_path / "one.gif", seconds=0.5)
    shown.to_gif(tmp_path / "two.gif", seconds=0.5)
    assert (tmp_path / "one.gif").read_bytes() == (tmp_path / "two.gif").read_bytes()
    with Image.open(tmp_path / "one.gif") as gif:
        assert gif.n_frames == 1 + 8  # nothing yet, and 8 messages; the last frame stays for four
        assert gif.info["duration"] == 500
        assert gif.info["loop"] == 0
        gif.seek(gif.n_frames - 1)
        assert gif.info["duration"] == 2000


def test_a_frame_has_the_sentence_the_bytes_and_what_each_rank_holds(tmp_path):
    walk = walkthrough(all_reduce(tmp_path).load())
    shown = texts(walk, 1)
    assert walk.title in shown
    said = " ".join(shown).replace("\u00a0", " ")  # which keeps a number with its unit
    assert "rank 1 sends rank 0 250 of 1,000 B for all_reduce: uint8[1000] (derived). Then rank 0" in said
    assert shown.count("250 B") == 1
    assert shown.count("1: sum") == 1
    assert "2: 0" in shown
    assert "step 1 of 8" in shown
    assert [text for text in texts(walk, 8) if text.endswith("sum")] == [f"{i}: sum" for i in (1, 2, 3, 4, 1, 2, 3, 4)]


def test_what_is_left_out_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(animation, "MOST_FRAMES", 3)
    job = Job(tmp_path / "job", ranks=2)
    for i in range(3 + 5):
        job.send(0, 1, size=8, start_ns=10 * i, end_ns=10 * i + 5)
        job.recv(1, 0, size=8, start_ns=10 * i, end_ns=10 * i + 5)
    walk = walkthrough(job.load())
    assert texts(walk, 3, left_out=5)[-1] == "step 3 of 8; 5 later steps left out"
    told = []
    animate(walk, tmp_path / "long.gif", tell=lambda *frames: told.append(frames))
    assert told[-1] == (3, 3)


def test_names_are_text(tmp_path):
    job = all_reduce(tmp_path)
    job.headers = [header(rank, world_size=2, name=name) for rank, name in enumerate(("$x^2$", "a" * 200))]
    shown = texts(walkthrough(job.load()), 1)
    assert "$x^2$" in shown
    assert max(map(len, shown)) < 150


@pytest.mark.parametrize(
    ("name", "seconds", "why"),
    [
        ("a.mp4", 1, "is saved as .gif"),
        ("a.gif", 0, "can show one for 0.02 to 60"),
        ("nowhere/a.gif", 1, "there is no folder"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, name, seconds, why):
    with pytest.raises(DlearnError, match=why):
        animate(walkthrough(all_reduce(tmp_path).load()), tmp_path / name, seconds=seconds)


def test_nothing_to_animate(tmp_path):
    with pytest.raises(DlearnError, match="nothing to animate"):
        animate(walkthrough(Job(tmp_path, ranks=2).load()), tmp_path / "none.gif")


def test_what_is_not_known_is_not_called_nothing(tmp_path):
    job = Job(tmp_path, ranks=2, backend="nccl")
    job.collective("all_reduce", size=1000)
    with pytest.raises(DlearnError, match="no message is known here"):
        animate(walkthrough(job.load()), tmp_path / "none.gif")
