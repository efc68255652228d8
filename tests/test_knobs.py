"""The knobs, without a browser: a slider is set, and real ranks answer."""

import pytest
from waiting import all_end

pytest.importorskip("ipywidgets")

from dlearn.analysis import iteration
from dlearn.errors import DlearnError
from dlearn.lessons import knobs, split


def test_a_turned_slider_runs_the_job_and_changes_the_picture_and_the_ranks_end_with_the_knobs():
    made = knobs.knobs()
    before, picture = made.bars, made.picture.value
    made.sliders["B"].value = 2
    made.sliders["H"].value = 8
    size = split.Size(**{name: slider.value for name, slider in made.sliders.items()})
    assert made.answer.size == size
    assert made.bars != before
    assert made.picture.value != picture
    assert made.bars.predicted == split.predicted(size)
    # What travels for each half of the model: the boundary there, with 8 bytes for each label, and its gradient back.
    _, trace = made.answer.traces
    tensors = [sum(each.payload_bytes for each in message.tensors) for message in iteration(trace).messages]
    boundary = split.boundary_bytes(size) * size.B
    assert sorted(each for each in tensors if each > 4) == [boundary, boundary + 8 * size.B]
    # Control and framing: under 1.5 kB for an all-reduce, about 3 kB for twelve messages.
    assert 0 <= made.answer.ddp[1] - made.answer.ddp[0] < 1_500
    assert 0 <= made.answer.rpc[1] - made.answer.rpc[0] - 8 * size.B < 3_500
    # A notebook without a kernel keeps the picture.
    assert {"text/html", "application/vnd.jupyter.widget-view+json"} <= set(made._repr_mimebundle_())
    made.close()
    made.turn()
    assert "their ranks have ended" in made.said.value
    assert all_end(process.header.pid for trace in made.answer.traces for process in trace.processes)
    with pytest.raises(DlearnError, match="C is one of 1, 2, 4, 8, 16 on this slider, not 3"):
        knobs.knobs(C=3)
