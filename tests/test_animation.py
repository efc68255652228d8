"""A walk as an animated GIF: what moves at the same time moves together, and the same bytes each time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from traces import Job, header

from dlearn.analysis.walking import walkthrough
from dlearn.draw import animation
from dlearn.draw.animation import animate, rounds_of
from dlearn.draw.layout.stage_spots import spots_of
from dlearn.draw.palette import MISSING, SERIES
from dlearn.errors import DlearnError
from dlearn.play import player


def all_reduce(folder, ranks=2, **facts):
    job = Job(folder, ranks=ranks)
    job.collective("all_reduce", size=500 * ranks, **facts)
    return job


@pytest.fixture
def written(monkeypatch):
    """Every text that is drawn, in order."""
    texts = []
    write = animation.write
    monkeypatch.setattr(
        animation, "write", lambda ax, x, y, text, **how: (texts.append(text), write(ax, x, y, text, **how))
    )
    return texts


def frames_of(path):
    with Image.open(path) as gif:
        for number in range(gif.n_frames):
            gif.seek(number)
            yield np.asarray(gif.convert("RGB")).astype(int)


def near(frame, color):
    """How many pixels have this colour, nearly."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(frame - wanted).max(axis=2) < 24).sum())


def test_what_moves_at_the_same_time_is_one_round_and_the_bytes_are_the_same_again(tmp_path):
    shown = player(all_reduce(tmp_path / "job").load())
    shown.to_gif(tmp_path / "one.gif", seconds=0.6)
    shown.to_gif(tmp_path / "two.gif", seconds=0.6)
    assert (tmp_path / "one.gif").read_bytes() == (tmp_path / "two.gif").read_bytes()
    rounds = rounds_of(shown.walk)
    assert [len(each.steps) for each in rounds] == [2, 2, 2, 2]
    with Image.open(tmp_path / "one.gif") as gif:
        assert gif.n_frames == 4 * 6
        assert gif.info["duration"] == 100
        assert gif.info["loop"] == 0
        gif.seek(gif.n_frames - 1)
        assert gif.info["duration"] == 3000


def test_cells_fill_with_the_parts_of_other_ranks(tmp_path):
    """At the end each of two ranks has all pieces in both colours, at the beginning its own."""
    animate(walkthrough(all_reduce(tmp_path / "job").load()), tmp_path / "one.gif")
    first, *_, last = frames_of(tmp_path / "one.gif")
    for color in SERIES[:2]:
        assert near(last, color) > 1.6 * near(first, color) > 0


def test_the_sentence_the_bytes_and_the_place_are_written(tmp_path, written):
    walk = walkthrough(all_reduce(tmp_path / "job").load())
    animate(walk, tmp_path / "one.gif")
    assert walk.title in written
    assert written.count("250 B") == 2 * 24, "two packets in each frame"
    assert "2 messages at the same time. One of them: " in " ".join(written)
    assert "step 8 of 8" in written


def test_what_never_came_is_red_and_nothing_else_is(tmp_path):
    job = all_reduce(tmp_path / "job", start_ns=0, end_ns=100)
    animate(walkthrough(job.load()), tmp_path / "fine.gif")
    assert not any(near(frame, MISSING) for frame in frames_of(tmp_path / "fine.gif"))
    hung = Job(tmp_path / "hung", ranks=2)
    hung.collective("all_reduce", size=1000, ranks=[0], start_ns=10, end_ns=None)
    animate(walkthrough(hung.load()), tmp_path / "hung.gif")
    assert any(near(frame, MISSING) for frame in frames_of(tmp_path / "hung.gif"))


def test_what_is_left_out_is_said(tmp_path, written, monkeypatch):
    monkeypatch.setattr(animation, "MOST_FRAMES", 9)
    job = Job(tmp_path / "job", ranks=2)
    for i in range(3 + 5):
        job.send(0, 1, size=8, start_ns=10 * i, end_ns=10 * i + 5)
        job.recv(1, 0, size=8, start_ns=10 * i, end_ns=10 * i + 5)
    told = []
    animate(walkthrough(job.load()), tmp_path / "long.gif", tell=lambda *frames: told.append(frames))
    assert "step 3 of 8; 5 later steps left out" in written
    assert told == [(number, 9) for number in range(1, 10)]


def test_never_more_than_forty_frames_and_each_packet_moves(tmp_path):
    job = Job(tmp_path / "job", ranks=4)
    for step in range(30):
        job.collective("all_reduce", size=4000, start_ns=1000 * step, end_ns=1000 * step + 900)
    animate(walkthrough(job.load()), tmp_path / "many.gif")
    with Image.open(tmp_path / "many.gif") as gif:
        assert 36 <= gif.n_frames <= 40


def test_names_are_cut_to_their_room(tmp_path, written):
    job = all_reduce(tmp_path)
    job.headers = [header(rank, world_size=2, name=name) for rank, name in enumerate(("$x^2$", "a" * 200))]
    animate(walkthrough(job.load()), tmp_path / "names.gif")
    assert "$x^2$" in written
    assert max(map(len, written)) < 150


def test_a_webp_shows_the_same_at_the_same_times_in_fewer_bytes(tmp_path):
    shown = player(all_reduce(tmp_path / "job").load())
    shown.to_gif(tmp_path / "one.gif")
    shown.to_gif(tmp_path / "one.webp")
    with Image.open(tmp_path / "one.gif") as gif, Image.open(tmp_path / "one.webp") as webp:
        assert webp.format == "WEBP"
        assert (webp.n_frames, webp.size, webp.info["loop"]) == (gif.n_frames, gif.size, 0)
        gif.seek(gif.n_frames - 1)
        webp.seek(webp.n_frames - 1)
        webp.load()
        assert gif.info["duration"] == webp.info["duration"] == 3000
        drawn = [np.asarray(each.convert("RGB")).astype(int) for each in (gif, webp)]
    far = np.abs(drawn[0] - drawn[1]).max(axis=2) > 48  # A GIF has 64 colours.
    assert far.mean() < 0.01
    assert (tmp_path / "one.webp").stat().st_size < (tmp_path / "one.gif").stat().st_size


@pytest.mark.parametrize(
    ("name", "seconds", "why"),
    [
        ("a.mp4", 1, "is saved as .gif or .webp"),
        ("a.gif", 0, "can show one for 0.1 to 60"),
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


pairs = st.integers(1, 64).flatmap(
    lambda count: st.tuples(st.just(count), st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))))
)


@given(pairs)
def test_no_rank_stands_on_another_whoever_talks_to_whom(found):
    count, sends = found
    spots = spots_of(range(count), {pair for pair in sends if pair[0] != pair[1]})
    places = list(spots.middles.values())
    assert len(places) == count
    for i, (x, y) in enumerate(places):
        assert spots.wide / 2 <= x <= 760 - spots.wide / 2
        assert spots.high / 2 <= y <= spots.height - spots.high / 2
        for other_x, other_y in places[i + 1 :]:
            assert abs(x - other_x) >= spots.wide or abs(y - other_y) >= spots.high


@pytest.mark.parametrize("hub", [0, 1])
def test_three_ranks_around_one_stand_in_a_row_with_it_in_the_middle(hub):
    spots = spots_of(range(3), [(rank, hub) for rank in {0, 1, 2} - {hub}])
    assert spots.in_row
    assert sorted(range(3), key=lambda rank: spots.middles[rank][0])[1] == hub
