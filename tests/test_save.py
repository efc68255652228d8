"""Every drawing as a file: it says what it shows, in text that can be read, and is the same when it is made again."""

import subprocess
import sys
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import msgspec
import pictures
import pytest
from matplotlib.text import Text
from pictures import ENDINGS, drawings
from PIL import Image
from text_boxes import faults
from traces import Job

from dlearn import draw
from dlearn.draw.canvas import SMALLEST_PT, WIDTH_IN

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>\"'&amp;(]]>\\"


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return drawings(tmp_path_factory.mktemp("all"))


@pytest.fixture
def strange(tmp_path):
    """Rank 2 of 4 has a name that would run, and emoji."""
    job = Job(tmp_path, ranks=4)
    job.headers[2] = msgspec.structs.replace(job.headers[2], name=f"{HOSTILE}\U0001f600\U0001fae0")
    job.collective("all_reduce", size=4000)
    return job.load()


def told(path):
    """Title and description of an svg, as a reader of its accessibility tree gets them."""
    root = ElementTree.parse(path).getroot()
    assert root.get("role") == "img"
    by_id = {each.get("id"): each for each in root.iter()}
    return by_id[root.get("aria-labelledby")].text, by_id[root.get("aria-describedby")].text


def test_every_drawing_is_here(every):
    assert {*every, "save", "small"} == {*draw.__all__}


def test_every_svg_says_its_finding_and_what_is_to_be_known_of_it(every, tmp_path):
    """Several svgs may stand in one page: their ids differ."""
    ids = set()
    for name, ax in every.items():
        draw.save(ax, tmp_path / f"{name}.svg")
        title, description = told(tmp_path / f"{name}.svg")
        assert title == " ".join(ax.get_title(loc="left").split()), name
        for line in (text.get_text() for text in ax.texts if text.get_gid() == "note"):
            assert " ".join(line.split()) in description, name
        assert len(description.split(". ")) >= 2, name
        ids.add(ElementTree.parse(tmp_path / f"{name}.svg").getroot().get("aria-labelledby"))
    assert len(ids) == len(every)


def test_what_a_picture_shows_stands_there_in_words(every, tmp_path):
    draw.save(every["traffic_graph"], tmp_path / "graph.svg")
    assert told(tmp_path / "graph.svg") == (
        "Each rank sends 100 B to the other",
        "rank 0 sends rank 1 100 B (derived). rank 1 sends rank 0 100 B (derived). Legend: all_reduce, derived."
        " Payload bytes: 200 B derived from gloo's algorithm.",
    )


def test_png_and_pdf_say_it_too(every, tmp_path):
    ax = every["reconcile"]
    draw.save(ax, tmp_path / "bytes.png")
    draw.save(ax, tmp_path / "bytes.pdf")
    text = Image.open(tmp_path / "bytes.png").text
    assert text["Title"] == "The kernel counted 2,704 B: 200 B more than predicted"
    assert "rank 1 to rank 0: payload 100 B, predicted on the wire 1,252 B" in text["Description"]
    pdf = (tmp_path / "bytes.pdf").read_bytes()
    assert b"/Title (The kernel counted 2,704 B: 200 B more than predicted)" in pdf
    assert b"/Subject (rank 0 to rank 1: payload 100 B" in pdf


def test_names_are_text_in_title_and_description(strange, tmp_path):
    ax = draw.traffic_graph(strange)
    ax.set_title(f"{HOSTILE}\U0001f600", loc="left", parse_math=False)
    for ending in ENDINGS:
        draw.save(ax, tmp_path / f"strange.{ending}")
    title, description = told(tmp_path / "strange.svg")
    assert title.startswith(HOSTILE)
    assert HOSTILE in description
    root = ElementTree.parse(tmp_path / "strange.svg").getroot()
    assert [each for each in root.iter() if each.tag == f"{SVG}script"] == []
    assert len([each for each in root.iter() if each.tag == f"{SVG}title"]) == 1
    assert HOSTILE in Image.open(tmp_path / "strange.png").text["Description"]


def test_a_figure_of_ones_own_is_saved_without_a_description(tmp_path):
    figure, axes = plt.subplots(1, 2)
    draw.save(figure, tmp_path / "bare.svg")
    root = ElementTree.parse(tmp_path / "bare.svg").getroot()
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") is None
    axes[0].set_title("left")
    axes[1].set_title("right")
    draw.save(figure, tmp_path / "two.svg")
    root = ElementTree.parse(tmp_path / "two.svg").getroot()
    assert [each.text for each in root.iter() if each.tag == f"{SVG}title"] == ["left; right"]


def test_all_text_can_be_read_from_a_projector(every, tmp_path):
    """8 pt at 9 inches, which is 4 pt on half of a sheet of paper, and 16 pt where the picture fills a slide of 18."""
    pages = dict(every)
    for count in (16, 30):
        trace = everybody_to_everybody(tmp_path / str(count), count)
        pages |= {f"traffic of {count}": draw.traffic(trace), f"graph of {count}": draw.traffic_graph(trace)}
    for name, ax in pages.items():
        assert ax.figure.get_figwidth() == WIDTH_IN, name
        sizes = [text.get_fontsize() for text in ax.figure.findobj(Text) if text.get_text() and text.get_visible()]
        assert min(sizes) >= SMALLEST_PT, name


def test_small_drawings_fit_a_column_of_400_px_and_are_no_harder_to_read(tmp_path):
    with draw.small():
        every = drawings(tmp_path)
    for name, ax in every.items():
        assert ax.figure.get_figwidth() == pytest.approx(400 / 96), name
        sizes = [text.get_fontsize() for text in ax.figure.findobj(Text) if text.get_text() and text.get_visible()]
        assert min(sizes) >= SMALLEST_PT, name
        assert faults(ax.figure) == [], name
    assert draw.timeline(everybody_to_everybody(tmp_path / "after", 3)).figure.get_figwidth() == WIDTH_IN


def everybody_to_everybody(folder, count):
    folder.mkdir(exist_ok=True)
    job = Job(folder, ranks=count)
    for src in range(count):
        for dst in range(count):
            if src != dst:
                job.send(src, dst, size=40_000 * (src + 1))
                job.recv(dst, src, size=40_000 * (src + 1))
    return job.load()


def test_numbers_of_narrow_cells_share_their_unit(tmp_path):
    ax = draw.traffic(everybody_to_everybody(tmp_path, 16))
    found = {text.get_position(): text.get_text() for text in ax.texts}
    assert found[1.5, 0.5] == "40.0"
    assert found[0.5, 15.5] == "640"
    assert "Numbers in kB. Grey: a rank to itself." in found.values()


@pytest.mark.slow
def test_saved_in_two_processes_the_bytes_are_the_same(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    saving = [subprocess.Popen([sys.executable, pictures.__file__, folder]) for folder in folders]
    assert [process.wait(timeout=100) for process in saving] == [0, 0]
    names = sorted(path.name for path in (tmp_path / "one").iterdir() if path.suffix[1:] in ENDINGS)
    assert len(names) == len(ENDINGS) * (len(draw.__all__) - 2)
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
