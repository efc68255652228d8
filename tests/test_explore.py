"""The explorer, without a browser: a control is turned, and picture and sentence answer."""

import gc
import html
import re
import weakref

import matplotlib
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import train_ddp
from test_selecting import one_step, star
from test_traffic import counted
from traces import Job, header

pytest.importorskip("ipywidgets")

from dlearn import Cluster, operations, play
from dlearn.analysis import traffic
from dlearn.errors import DlearnError
from dlearn.play import Choice
from dlearn.play.explore import DRAWINGS, said_of


@pytest.fixture(scope="module", autouse=True)
def no_window():
    import matplotlib.pyplot as plt

    before = matplotlib.get_backend()
    plt.switch_backend("agg")
    yield
    plt.close("all")
    plt.switch_backend(before)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return one_step(tmp_path_factory.mktemp("trace"))


@pytest.fixture(scope="module")
def made(small):
    made = play.explore(small)
    yield made
    made.close()


@pytest.fixture
def explorer(made):
    """Drawn once: each test finds its controls at "all"."""
    made.choice = Choice()
    return made


def shown(explorer) -> tuple[str, str]:
    """The picture's bytes, as text, and the sentence below it, as the page has them."""
    *_, picture, said = explorer.widget.children
    return picture.value, html.unescape(re.sub("<[^>]*>", "", said.value))


# Controls -------------------------------------------------------------------------------------------------------------


def test_the_whole_trace_is_shown_first(explorer, small):
    picture, said = shown(explorer)
    counts = traffic(small)
    total = sum(counts.message_count.values())
    assert said == f"3 of 3 operations, {total} of {total} messages, {counts.total_bytes} B of payload."
    assert 'src="data:image/png;base64,iVBOR' in picture
    assert 'alt="' in picture
    assert (explorer.choice, explorer.trace) == (Choice(), small)


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
        "Drawing", "Bytes", "Kind", "Operation", "Phase", "Span", "Ranks", "Began within (ms)",
    ]  # fmt: skip


def test_controls_offer_what_the_trace_holds(explorer):
    offered = {name: control.options for name, control in explorer.controls.items() if name != "window_ms"}
    assert offered["drawing"] == ("timeline", "sequence", "traffic", "traffic_graph", "reconcile")
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
    assert shown(explorer)[1].endswith("An operation stays whole, with all the ranks that take part in it.")


def test_nothing_selected_is_a_sentence(explorer):
    for name, value in {"ranks": (), "phase": "forward"}.items():
        explorer.controls["op"].value = "send"
        explorer.controls[name].value = value
        picture, said = shown(explorer)
        assert said.startswith("Nothing is selected: no event of this trace is all of that.")
        assert 'alt="Nothing to draw"' in picture
        explorer.choice = Choice()


def test_a_window_ends_before_its_right_end_but_the_last_one_holds_all(explorer):
    control = explorer.controls["window_ms"]
    control.value = (10.0, 19.0)
    assert [operation.op for operation in operations(explorer.trace)] == ["all_reduce"]
    assert explorer.choice.window_ms == (10.0, 19.0)
    control.value = (10.0, control.max)
    assert explorer.choice.window_ms == (10.0, None)


def test_bytes_are_those_of_the_matrix(tmp_path):
    explorer = play.explore(counted(tmp_path).load().within("step 0"))
    said = []
    assert explorer.controls["bytes"].disabled
    explorer.controls["drawing"].value = "traffic"
    assert not explorer.controls["bytes"].disabled
    for bytes in ("payload", "predicted", "measured"):
        explorer.controls["bytes"].value = bytes
        said.append(shown(explorer)[1].rsplit(", ", 1)[1])
    assert said == ["400 B of payload.", "1.55 kB predicted on the wire.", "1.55 kB measured on the wire."]
    explorer.controls["ranks"].value = (0,)
    assert "not measured." in shown(explorer)[1]
    explorer.close()


# From Python ----------------------------------------------------------------------------------------------------------


def test_python_moves_the_controls_and_takes_what_is_selected(explorer, tmp_path):
    import matplotlib.pyplot as plt

    explorer.choice = Choice("traffic", op="all_reduce", ranks=(0, 2), window_ms=(5, None))
    assert explorer.controls["drawing"].value == "traffic"
    assert explorer.controls["ranks"].value == (0, 2)
    assert [operation.op for operation in operations(explorer.trace)] == ["all_reduce"]
    assert explorer.choice == Choice("traffic", op="all_reduce", ranks=(0, 2), window_ms=(5, None))
    ax = explorer.axes
    assert ax.get_title(loc="left").startswith("Each rank sends")
    plt.close(ax.figure)


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (Choice("autograd"), "traffic, traffic_graph, reconcile in this trace, not 'autograd'"),
        (Choice(op="gather"), "op is one of all_reduce, broadcast, recv, send in this trace, not 'gather'"),
        (Choice(ranks=(0, 9)), "ranks is one of 0, 1, 2 in this trace, not 9"),
        (Choice(window_ms=(5, 99)), "a window lies between 0 ms and 20 ms here, not"),
        (Choice(window_ms=(9, 5)), "a window lies between 0 ms and 20 ms here, not"),
    ],
)
def test_a_choice_that_the_controls_do_not_have_is_refused(explorer, choice, sentence):
    before = explorer.choice, shown(explorer)
    with pytest.raises(DlearnError, match=re.escape(sentence)):
        explorer.choice = choice
    assert (explorer.choice, shown(explorer)) == before


def test_an_error_is_said_in_the_page(explorer, monkeypatch):
    def fails(part):
        raise DlearnError("no <picture> of this")

    monkeypatch.setitem(DRAWINGS, "sequence", DRAWINGS["sequence"]._replace(draw=fails))
    explorer.choice = Choice("sequence", op="recv")
    assert shown(explorer) == ("", "no <picture> of this")
    assert "<picture>" not in explorer.widget.children[-1].value
    explorer.controls["drawing"].value = "timeline"
    assert "iVBOR" in shown(explorer)[0]


# In a page ------------------------------------------------------------------------------------------------------------


def test_a_notebook_without_a_kernel_keeps_the_picture(explorer):
    bundle, metadata = explorer._repr_mimebundle_()
    assert {"image/png", "application/vnd.jupyter.widget-view+json"} <= set(bundle)
    assert metadata["image/png"]["alt"] in bundle["text/plain"]


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
        assert "<img src=x" not in "".join(child.value for child in explorer.widget.children[-2:])
    explorer.controls["span"].value = trace.spans[0]
    assert "Nothing is selected" in shown(explorer)[1]
    explorer.close()


def test_nothing_stays_open(small):
    import matplotlib.pyplot as plt
    from ipywidgets.widgets.widget import _instances as widgets

    before, figures = set(widgets), plt.get_fignums()
    made = play.explore(small)
    made.controls["drawing"].value = "traffic"
    assert plt.get_fignums() == figures
    made.widget.close()  # as the page does
    assert set(widgets) == before
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


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


@pytest.fixture(scope="module")
def explorers(tmp_path_factory):
    made = [play.explore(make(tmp_path_factory.mktemp(make.__name__))) for make in TRACES]
    yield made
    for each in made:
        each.close()


@st.composite
def choices(draw, explorers):
    """An explorer, and where its controls may stand; any drawing, also one that it does not offer."""
    explorer = draw(st.sampled_from(explorers))
    own = explorer.controls
    named = {name: [value or None for _, value in own[name].options] for name in ("kind", "op", "phase", "span")}
    named["bytes"] = [value for _, value in own["bytes"].options]
    everybody = [rank for _, rank in own["ranks"].options]
    moments = st.floats(own["window_ms"].min, own["window_ms"].max)
    return explorer, Choice(
        drawing=draw(st.sampled_from(list(DRAWINGS))),
        ranks=draw(st.none() | st.sets(st.sampled_from(everybody)).map(tuple)),
        window_ms=draw(st.none() | st.tuples(moments, moments).map(sorted).map(tuple)),
        **{name: draw(st.sampled_from(values)) for name, values in named.items()},
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_drawing_of_every_selection_is_a_picture(explorers, data):
    """Also of what a trace does not hold: then the picture says so."""
    import matplotlib.pyplot as plt

    explorer, choice = data.draw(choices(explorers))
    part = choice.part(explorer.whole)
    ax = choice.draw(part)
    ax.figure.canvas.draw()
    assert ax.get_title(loc="left")
    assert said_of(choice, part, explorer.whole)
    assert set(map(id, part.events)) <= set(map(id, explorer.whole.events))
    plt.close("all")


def test_a_real_training_job():
    """Three ranks, five steps of DDP: a step, its backward pass, and every drawing that there is."""
    trace = Cluster(3).run(train_ddp, 5).trace
    explorer = play.explore(trace)
    drawings = explorer.controls["drawing"].options
    of_all = ("timeline", "sequence", "traffic", "traffic_graph", "reconcile")
    assert drawings == (*of_all, "buckets", "breakdown")
    whole = len(operations(trace))
    explorer.choice = Choice(span="step 3")
    # Two buckets, two all_reduces.
    assert shown(explorer)[1].startswith(f"2 of {whole} operations, ")
    explorer.choice = Choice(span="step 3", phase="forward")
    assert shown(explorer)[1].startswith((f"0 of {whole} operations, ", "Nothing is selected"))
    pictures = set()
    for drawing in drawings:
        explorer.choice = Choice(drawing, phase="backward")
        pictures.add(shown(explorer)[0])
        assert operations(explorer.trace)
    assert len(pictures) == len(drawings)
    explorer.close()
