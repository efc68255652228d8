"""The explorer, without a browser: a control is turned, and picture and sentence answer."""

import html
import re

import pytest
from programs import train_ddp
from test_selecting import MS, one_step, star
from traces import Job, header

pytest.importorskip("ipywidgets")

from dlearn import Cluster, operations, play
from dlearn.analysis import traffic
from dlearn.errors import DlearnError
from dlearn.play.explore import ALL, DRAWINGS


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return one_step(tmp_path_factory.mktemp("trace"))


@pytest.fixture(scope="module")
def made(small):
    return play.explore(small)


@pytest.fixture
def explorer(made):
    """Drawn once: each test finds its controls at "all"."""
    set_back(made)
    return made


def set_back(explorer):
    """Every control where it leaves nothing out."""
    controls = explorer.controls
    controls["drawing"].value = "timeline"
    for name in ("kind", "op", "phase", "span"):
        controls[name].value = ALL
    controls["ranks"].value = explorer.whole.ranks
    controls["window_ms"].value = (0, controls["window_ms"].max)


def shown(explorer) -> tuple[str, str]:
    """The picture's bytes, as text, and the sentence below it, as the page has them."""
    picture, said = explorer.widget.children[1].value.split('<p role="status">')
    return picture, html.unescape(re.sub("<[^>]*>", "", said))


OF_ALL = (
    "timeline", "sequence", "traffic", "traffic, predicted", "traffic, measured", "traffic_graph", "reconcile",
)  # fmt: skip


# Controls -------------------------------------------------------------------------------------------------------------


def test_the_whole_trace_is_shown_first(explorer, small):
    picture, said = shown(explorer)
    counts = traffic(small)
    total = sum(counts.message_count.values())
    assert said == f"3 of 3 operations, {total} of {total} messages, {counts.total_bytes} B of payload."
    assert 'src="data:image/png;base64,iVBOR' in picture
    assert 'alt="' in picture
    assert explorer.trace == small


def test_each_control_changes_picture_and_sentence(explorer):
    before = shown(explorer)
    turns = {"drawing": "sequence", "kind": "p2p", "op": "broadcast", "phase": "backward", "window_ms": (5.0, 12.0)}
    for name, value in turns.items():
        was, explorer.controls[name].value = explorer.controls[name].value, value
        picture, said = shown(explorer)
        assert picture != before[0], name
        assert (said == before[1]) == (name == "drawing"), name
        explorer.controls[name].value = was
        assert shown(explorer) == before
    assert [control.description for control in explorer.controls.values()] == [
        "Drawing", "Kind", "Operation", "Phase", "Span", "Ranks", "Began (ms)",
    ]  # fmt: skip


def test_controls_offer_what_the_trace_holds(explorer):
    offered = {name: control.options for name, control in explorer.controls.items() if name != "window_ms"}
    assert offered["drawing"] == OF_ALL
    assert [name for name, _ in offered["kind"]] == ["all", "collective", "p2p"]
    assert [name for name, _ in offered["op"]] == ["all", "all_reduce", "broadcast", "recv", "send"]
    assert [name for name, _ in offered["phase"]] == ["all", "forward", "backward", "none"]
    assert explorer.controls["span"].disabled
    assert {explorer.controls[name].label for name in ("kind", "op", "phase", "span")} == {"all"}
    assert offered["ranks"] == (("rank 0", 0), ("rank 1", 1), ("rank 2", 2))
    assert (explorer.controls["window_ms"].min, explorer.controls["window_ms"].max) == (0.0, 20.0)


def test_a_rank_keeps_its_operations_whole(explorer):
    explorer.controls["ranks"].value = (1,)
    assert shown(explorer)[1].startswith("2 of 3 operations, ")


def test_nothing_selected_is_a_sentence(explorer):
    for name, value in {"ranks": (), "phase": "forward"}.items():
        explorer.controls["op"].value = "send"
        explorer.controls[name].value = value
        picture, said = shown(explorer)
        assert said.startswith("Nothing is selected: no event of this trace is all of that.")
        assert 'alt="Nothing to draw"' in picture
        set_back(explorer)


def test_a_window_ends_before_its_right_end_but_the_last_one_holds_all(tmp_path):
    job = Job(tmp_path, ranks=2)
    for start_ms in (0, 10, 20):
        job.collective("barrier", start_ns=start_ms * MS, end_ns=(start_ms + 1) * MS)
    explorer = play.explore(job.load())
    control = explorer.controls["window_ms"]
    control.value = (10.0, 19.0)
    assert [operation.start_ns for operation in operations(explorer.trace)] == [10 * MS]
    control.value = (10.0, control.max)
    assert [operation.start_ns for operation in operations(explorer.trace)] == [10 * MS, 20 * MS]


def test_python_sets_the_controls_and_takes_what_is_selected(explorer):
    import matplotlib.pyplot as plt

    explorer.controls["drawing"].value = "traffic"
    explorer.controls["op"].value = "all_reduce"
    explorer.controls["ranks"].value = (0, 2)
    assert [operation.op for operation in operations(explorer.trace)] == ["all_reduce"]
    ax = explorer.axes
    assert ax.get_title(loc="left").startswith("Each rank sends")
    plt.close(ax.figure)


def test_an_error_is_said_in_the_page(explorer, monkeypatch):
    def fails(part):
        raise DlearnError("no <picture> of this")

    monkeypatch.setitem(DRAWINGS, "sequence", (fails, DRAWINGS["sequence"][1]))
    explorer.controls["drawing"].value = "sequence"
    assert shown(explorer) == ("", "no <picture> of this")
    assert "<picture>" not in explorer.widget.children[1].value
    explorer.controls["drawing"].value = "timeline"
    assert "iVBOR" in shown(explorer)[0]


def test_names_are_text(tmp_path):
    job = Job(tmp_path, ranks=2)
    evil = '<img src=x onerror="alert(1)">\N{RIGHT-TO-LEFT OVERRIDE}'
    job.headers[0] = header(0, world_size=2, name=evil)
    job.span(0, evil)
    job.send(0, 1, size=2)
    job.recv(1, 0, size=2)
    trace = job.load()
    explorer = play.explore(trace)
    for drawing in ("timeline", "traffic"):
        explorer.controls["drawing"].value = drawing
        assert "<img src=x" not in explorer.widget.children[1].value
    explorer.controls["span"].value = trace.spans[0]
    assert "Nothing is selected" in shown(explorer)[1]


def test_no_figure_stays_open(small):
    import matplotlib.pyplot as plt

    figures = plt.get_fignums()
    play.explore(small).controls["drawing"].value = "traffic"
    assert plt.get_fignums() == figures


# Everything with everything -------------------------------------------------------------------------------------------


def empty(folder):
    return Job(folder, ranks=2).load()


def broken(folder):
    """A rank that never comes, one that nobody heard of, and a collective that nothing is known of."""
    job = Job(folder, ranks=3)
    span = job.span(0, "step 0", end_ns=None)
    job.collective("all_reduce", size=100, ranks=[0, 1], parent=span, end_ns=None)
    job.send(0, 2, size=4)
    job.recv(1, None, size=4, end_ns=None)
    job.collective("all_to_none", size=7, phase="backward")
    return job.load(died=[1], without=[2])


def training(folder):
    job = Job(folder, ranks=2)
    for rank in (0, 1):
        job.bucket(rank, 0, {"w": 8})
        job.stretch(rank, "forward", 0, 10)
        job.stretch(rank, "backward", 10, 30)
        job.gradient(rank, "w", size=8, at_ns=15)
    job.collective("all_reduce", size=8, start_ns=16, end_ns=25, launcher="reducer", backward=0, phase="backward")
    for rank in (0, 1):
        job.stretch(rank, "optimizer", 30, 40)
    return job.load()


TRACES = (empty, broken, training, one_step, star)


@pytest.mark.parametrize("make", TRACES)
def test_every_drawing_of_every_selection_is_a_picture(make, tmp_path, monkeypatch):
    """Also of what a trace does not hold: then the picture says so."""
    import matplotlib.pyplot as plt

    explorer = play.explore(make(tmp_path))
    controls = explorer.controls
    half_ms = controls["window_ms"].max / 2
    selections = [
        *((name, controls[name].options[-1][1]) for name in ("kind", "op", "phase", "span")),
        ("ranks", explorer.whole.ranks[:1]),
        ("window_ms", (0, half_ms)),
    ]
    for place, (name, value) in enumerate(selections):
        controls[name].value = value
        assert 'src="data:image/png;base64,iVBOR' in shown(explorer)[0], "the timeline of it"
        part = explorer.trace
        assert set(map(id, part.events)) <= set(map(id, explorer.whole.events))
        for drawing, (draw_it, _) in list(DRAWINGS.items())[place % 3 :: 3]:
            if drawing == controls["drawing"].value:
                continue
            ax = draw_it(part)
            ax.figure.canvas.draw()
            assert ax.get_title(loc="left")
            plt.close("all")
        with monkeypatch.context() as unseen:  # The whole was drawn once.
            unseen.setattr(explorer, "_redraw", lambda: None)
            set_back(explorer)


def test_a_real_training_job():
    """Three ranks, five steps of DDP: a step, its backward pass, and every drawing that there is."""
    trace = Cluster(3).run(train_ddp, 5).trace
    explorer = play.explore(trace)
    drawings = explorer.controls["drawing"].options
    assert drawings == (*OF_ALL, "buckets", "breakdown")
    whole = len(operations(trace))
    explorer.controls["span"].value = "step 3"
    # Two buckets, two all_reduces.
    assert shown(explorer)[1].startswith(f"2 of {whole} operations, ")
    explorer.controls["phase"].value = "forward"
    assert shown(explorer)[1].startswith((f"0 of {whole} operations, ", "Nothing is selected"))
    set_back(explorer)
    explorer.controls["phase"].value = "backward"
    pictures = set()
    for drawing in drawings:
        explorer.controls["drawing"].value = drawing
        pictures.add(shown(explorer)[0])
        assert operations(explorer.trace)
    assert len(pictures) == len(drawings)
