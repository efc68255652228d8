"""The player's step in Python. What the page does with it is clicked in test_browser.py."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import IPython
import pytest
from traces import Job

from dlearn.errors import DlearnError
from dlearn.play import bridge, player

widget = bridge._widget.__wrapped__


def exchange(folder, count=4):
    """Rank 0 sends rank 1 `count` messages."""
    job = Job(folder, ranks=2)
    for i in range(count):
        job.send(0, 1, start_ns=10 * i, end_ns=10 * i + 5)
        job.recv(1, 0, start_ns=10 * i, end_ns=10 * i + 5)
    return job.load()


def test_without_a_kernel_the_step_is_remembered(tmp_path):
    shown = player(exchange(tmp_path))
    heard = []
    shown.on_step(heard.append)
    assert shown.step == 0
    for step in (3, 3, 4, 0):
        shown.step = step
    assert shown.step == 0
    assert heard == [3, 4, 0]
    assert shown._repr_mimebundle_() == {"text/html": shown._repr_html_(), "text/plain": repr(shown)}
    assert shown.bridge._widget is None


@pytest.mark.parametrize("step", [-1, 5, 1.5, "two", None])
def test_a_step_that_is_not_there(tmp_path, step):
    shown = player(exchange(tmp_path))
    with pytest.raises(DlearnError, match=rf"no step {step!r}: choose one from 0 \(before the first message\) to 4"):
        shown.step = step
    assert shown.step == 0


@pytest.fixture
def kernel(monkeypatch):
    """IPython says that it runs in one. Its messages go nowhere."""
    pytest.importorskip("anywidget")
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    made = []
    monkeypatch.setattr(bridge, "_widget", cache(lambda name: made.append(widget(name)) or made[-1]))
    yield
    for each in made:
        each.close()


@pytest.mark.usefixtures("kernel")
def test_what_the_page_says_is_heard_and_what_python_says_is_sent(tmp_path):
    shown = player(exchange(tmp_path))
    heard = []
    shown.on_step(heard.append)
    shown.step = 1
    shown._repr_mimebundle_()
    page = shown.bridge._widget
    assert (page.player, page.step) == (shown.bridge._name, 1)
    page.step = 2
    shown.step = 3
    assert (page.step, heard) == (3, [1, 2, 3])
    shown._repr_mimebundle_()
    assert shown.bridge._widget is page, "shown twice, joined once"


@pytest.mark.usefixtures("kernel")
def test_two_that_are_the_same_move_together_from_where_the_last_one_shown_stands(tmp_path):
    trace = exchange(tmp_path)
    first, second = player(trace), player(trace)
    first._repr_mimebundle_()
    first.step = 2
    second._repr_mimebundle_()
    assert first.bridge._widget is second.bridge._widget
    assert (first.step, second.step) == (0, 0)
    second.bridge._widget.step = 1
    assert (first.step, second.step) == (1, 1)


NOTEBOOK = """\
# ---
# jupyter:
#   dlearn: {{}}
# ---
# %%
import sys
sys.modules['anywidget'] = None  # as where it is not installed
from dlearn import Trace, play
trace = Trace.load({folder!r})
player = play.player(trace)
player
# %%
display(player, 1)
# %%
del sys.modules['anywidget']
player = play.player(trace)
player
# %%
display(player, 1)
"""


def test_a_notebook_holds_the_player_and_nothing_else(build, tmp_path):
    """Without anywidget, and with it."""
    exchange(tmp_path / "trace")
    source = tmp_path / "shown.py"
    source.write_text(NOTEBOOK.format(folder=str(tmp_path / "trace")))
    notebook = build.read(source)
    build.execute(notebook)
    build.scrub(notebook)
    kinds = [[sorted(output.data) for output in cell.outputs] for cell in notebook.cells]
    shown = ["text/html", "text/plain"]
    assert kinds == [[shown], [shown, ["text/plain"]]] * 2
    assert "widgets" not in notebook.metadata
