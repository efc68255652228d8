"""The knobs, without a browser: a slider is set, and real ranks answer."""

import gc
import weakref

import pytest

pytest.importorskip("ipywidgets")

from dlearn.analysis import iteration
from dlearn.errors import DlearnError
from dlearn.lessons import split
from dlearn.lessons.byte_bars import Bars, byte_bars, png
from dlearn.lessons.knobs import CHOICES, knobs
from dlearn.lessons.split import Size


@pytest.fixture(scope="module")
def turned():
    made = knobs()
    yield made
    made.close()


def set_to(made, **values):
    for name, value in values.items():
        made.sliders[name].value = value
    return made


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_model():
    from torch import nn

    for size in (Size(), Size(C=3, H=8)):
        model = nn.Sequential(split.First(size.C), split.Second(size.C))
        assert split.parameter_bytes(size) == sum(each.numel() * 4 for each in model.parameters())
        assert split.boundary_bytes(size) == model[0](split.batch(size)[0])[0].numel() * 4
    # 4 (28·8 + 128·256 + 256 + 2,560 + 10) = 143,272 B; 4·8·16·16 = 8,192 B.
    assert split.break_even(Size()) == 143_272 / 8_192


@pytest.mark.parametrize("values", [{"B": 1}, {"B": 32}, {"B": 2, "C": 4, "H": 8}, {"W": 32}])
def test_a_turned_slider_runs_the_job_and_changes_the_picture(turned, values):
    set_to(turned, B=8, C=8, H=16, W=16)
    before, picture = turned.bars, turned.picture.value
    set_to(turned, **values)
    size = Size(**{name: slider.value for name, slider in turned.sliders.items()})
    assert turned.answer.size == size
    assert turned.bars != before
    assert turned.picture.value != picture
    assert turned.bars.predicted == split.predicted(size)
    # What travels for each half of the model: the boundary there, with 8 bytes for each label, and its gradient back.
    _, trace = turned.answer.traces
    tensors = [sum(each.payload_bytes for each in message.tensors) for message in iteration(trace).messages]
    boundary = split.boundary_bytes(size) * size.B
    assert sorted(each for each in tensors if each > 4) == [boundary, boundary + 8 * size.B]
    # Control and framing: under 1.5 kB for an all-reduce, about 3 kB for twelve messages.
    assert 0 <= turned.answer.ddp[1] - turned.answer.ddp[0] < 1_500
    assert 0 <= turned.answer.rpc[1] - turned.answer.rpc[0] - 8 * size.B < 3_500
    assert f"in {turned.seconds:.2f} s" in turned.said.value


def test_sliders_wait_for_the_release_and_fit_their_start(turned):
    assert all(not slider.continuous_update for slider in turned.sliders.values())
    assert {name: tuple(slider.options) for name, slider in turned.sliders.items()} == CHOICES
    with pytest.raises(DlearnError, match="C is one of 1, 2, 4, 8, 16 on this slider, not 3"):
        knobs(C=3)


def test_a_notebook_without_a_kernel_keeps_the_picture(turned):
    bundle = turned._repr_mimebundle_()
    assert {"image/png", "application/vnd.jupyter.widget-view+json"} <= set(bundle)
    assert bundle["text/plain"] == turned.bars.title


# The end --------------------------------------------------------------------------------------------------------------


def test_the_ranks_end_with_the_knobs():
    made = knobs()
    cluster = made.bytes._cluster
    made.close()
    assert cluster._crew is None
    made.turn()
    assert "their ranks have ended" in made.said.value

    made = knobs()
    made.widget.close()
    assert made.bytes._cluster._crew is None

    made = knobs()
    cluster, gone = made.bytes._cluster, weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert cluster._crew is None


# The picture ----------------------------------------------------------------------------------------------------------

BARS = Bars("A title", ("one", "two"), (1000, 2_000_000), (1100, 2_010_000), "A note.")


def test_each_name_has_two_bars_with_their_bytes():
    ax = byte_bars(BARS)
    widths = {bar.get_gid(): bar.get_width() for bar in ax.patches if bar.get_gid()}
    assert widths == {"predicted one": 1000, "measured one": 1100, "predicted two": 2e6, "measured two": 2.01e6}
    assert {"1,000 B", "1,100 B", "2,000,000 B", "2,010,000 B"} <= {text.get_text() for text in ax.texts}


def test_no_text_is_clipped_or_overlaps():
    from test_cost_chart import check_texts

    check_texts(byte_bars(BARS))


def test_a_png_leaves_no_figure_behind():
    import matplotlib.pyplot as plt

    plt.close("all")
    assert png(BARS).startswith(b"\x89PNG")
    assert plt.get_fignums() == []
