"""Every picture of every kind of job: it can be read, has a mark for each fact of the tables, and its title is true.

The lessons' own pictures are checked where the lessons run (test_notebooks.py), in the same way.
"""

import re
import subprocess
import sys
from collections import Counter, defaultdict
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pictures
import pytest
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Text
from pictures import BY_HAND, ENDINGS, HOSTILE, RECORDED, STRANGE, drawings, recorded_job, texts, title
from PIL import Image
from text_boxes import faults
from traces import Job

from dlearn import DlearnError, Trace, analysis, draw, export, messages, operations, play

SVG = "{http://www.w3.org/2000/svg}"
OF_ONE = [getattr(draw, name) for name in draw.__all__ if name not in {"save", "scaling", "small"}]
QUICK = ["DDP", "RPC", "hang", "strange_names"]
KNOWN = {"distributed autograd": {"traffic": ["'from' leaves the figure by 9 px"]}}
JOBS = {**dict.fromkeys(RECORDED), **{make.__name__: make for make in BY_HAND}}


@pytest.fixture(
    scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in JOBS]
)
def job(request, tmp_path_factory):
    """Its name, its trace, and its pictures as they are asked for, each drawn once."""
    folder, make = tmp_path_factory.mktemp("job"), JOBS[request.param]
    return Drawn(request.param, make(folder).load() if make else recorded_job(request.param, folder))


class Drawn(dict):
    def __init__(self, name, trace):
        self.name, self.trace = name, trace

    def __missing__(self, picture):
        self[picture] = picture(self.trace)
        return self[picture]


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return drawings(tmp_path_factory.mktemp("all"))


def boxes(ax, gid):
    """Left, right and middle height of each box of this kind."""
    paths = [path for part in ax.collections if str(part.get_gid()).startswith(gid) for path in part.get_paths()]
    found = [path.get_extents() for path in paths]
    return [(round(box.x0, 6), round(box.x1, 6), round((box.y0 + box.y1) / 2, 3)) for box in found]


def three_digits(number, units):
    """ "1.50 kB" of (1500, {"B": 1, "kB": 1000}); what is less than the second unit has no digits behind the point."""
    unit, factor = [each for each in units.items() if number >= 0.9995 * each[1] or each[1] == 1][-1]
    value = number / factor
    digits = 0 if factor == 1 else sum(value < limit for limit in (9.995, 99.95))
    return f"{value:.{digits}f} {unit}"


def size(number):
    return three_digits(number, {"B": 1, "kB": 1e3, "MB": 1e6})


def test_no_text_lies_on_another_or_is_cut_off(job):
    found = {picture.__name__: faults(job[picture].figure) for picture in OF_ONE}
    assert {name: told for name, told in found.items() if told} == KNOWN.get(job.name, {})


@pytest.mark.parametrize("picture", [draw.timeline, draw.sequence, draw.traffic], ids=lambda picture: picture.__name__)
def test_neither_in_a_narrow_column_nor_on_given_axes_beside_another_picture(job, picture):
    if job.name in ("DDP", "hang"):
        with draw.small():
            assert faults(picture(job.trace).figure) == []
    elif job.name == "tagged":
        sides = {"left": 0.19, "wspace": 0.8, "bottom": 0.25, "top": 0.85}
        figure, both = plt.subplots(1, 2, figsize=(16, 8), gridspec_kw=sides)
        assert [picture(job.trace, ax=ax) for ax in both] == [*both]
        assert plt.get_fignums() == [figure.number], "no other figure is opened"
        assert faults(figure) == []


def test_every_drawing_is_large_enough_for_a_projector_and_small_ones_fit_a_column(every, tmp_path):
    """8 pt at least; 400 px are a notebook's narrow column."""
    assert {*every, "save", "small"} == {*draw.__all__}, "a new drawing has to be added in pictures.py"
    plt.close("all")
    with draw.small():
        narrow = drawings(tmp_path)
    for width, drawn in {9: every, 400 / 96: narrow}.items():
        for name, ax in drawn.items():
            assert ax.figure.get_figwidth() == pytest.approx(width), name
            shown = [text for text in ax.figure.findobj(Text) if text.get_text() and text.get_visible()]
            assert min(text.get_fontsize() for text in shown) >= 8, name
            assert faults(ax.figure) == [], name


def test_the_check_itself_finds_what_is_planted():
    figure, (left, right) = plt.subplots(1, 2, figsize=(6, 3), dpi=100)
    left.text(0.1, 0.5, "alone")
    left.text(0.3, 0.1, "a long diagonal text", rotation=45)
    assert faults(figure) == []
    left.text(0.12, 0.5, "over it")
    left.text(0.5, 0.32, "on the diagonal")
    left.text(0.9, 0.2, "cut off", clip_on=True)
    left.text(0.95, 0.7, "a text that is too long")
    right.text(0.7, 0.9, "a text that leaves the figure")
    told = " ".join(faults(figure))
    planted = ["'alone' and 'over it' overlap", "diagonal text' and 'on the diagonal' overlap", "cut off' is cut off"]
    assert [fault for fault in (*planted, "over other axes", "leaves the figure") if fault not in told] == []


def test_a_timeline_has_as_many_bars_as_calls(job):
    """What waits and then transfers is two boxes in a row; RPC's own calls are counted in a sentence."""
    ax = job[draw.timeline]
    if boxes(ax, "cells"):
        return  # Too long for lanes: the picture of its steps.
    control = [each for each in operations(job.trace) if all_control(each, job.trace)]
    began = [int(text.split()[5]) for text in texts(ax) if text.startswith("Before the program's first call: ")]
    assert any(text.startswith(f"{len(control)} control call") for text in texts(ax)) is bool(control)
    calls = [len(each.ends) for each in operations(job.trace) if each not in control]
    waiting, transfer = boxes(ax, "waiting"), Counter((left, y) for left, _, y in boxes(ax, "transfer"))
    alone = [box for box in waiting if not transfer[box[1], box[2]]]
    assert len(alone) + transfer.total() == sum(calls) - 2 * sum(began)
    assert len(boxes(ax, "absent")) == sum(len(each.missing) for each in operations(job.trace))


def all_control(operation, trace):
    own = [message for message in messages(trace) if message.operation is operation]
    return bool(own) and all(message.control for message in own)


def test_a_matrix_has_the_bytes_of_every_pair_and_each_rank_s_sums(job):
    sent, ranks = analysis.traffic(job.trace).payload_bytes, [*analysis.traffic(job.trace).ranks]
    if len(ranks) > 16:
        return  # Shades and bars instead of numbers.
    expected = {(src, dst): sent.get((src, dst), 0) for src in ranks for dst in ranks if src != dst}
    found = {text.get_position(): text.get_text().replace("\u00a0", " ") for text in job[draw.traffic].texts}
    at = {rank: place + 0.5 for place, rank in enumerate(ranks)}
    beside = max(x for x, _ in found if isinstance(x, float))
    for (src, dst), number in expected.items():
        assert found[at[dst], at[src]] == (size(number) if number else "·")
    for rank in ranks:
        assert found[beside, at[rank]] == size(sum(number for (src, _), number in expected.items() if src == rank))
        assert found[at[rank], beside] == size(sum(number for (_, dst), number in expected.items() if dst == rank))


def test_a_traffic_graph_has_an_arrow_for_every_pair_that_sends_and_no_other(job):
    ax, sent = job[draw.traffic_graph], analysis.traffic(job.trace).payload_bytes
    if boxes(ax, "cells"):
        return  # What cannot be told apart in a circle is a matrix.
    ranks = [each for each in ax.patches if isinstance(each, FancyBboxPatch)]
    places = {
        (round(box.get_x() + box.get_width() / 2, 3), round(box.get_y() + box.get_height() / 2, 3)): box.get_gid()
        for box in ranks
    }
    assert len(places) == len(ranks), "no two ranks stand in one place"
    drawn = [arrow for arrow in ax.patches if isinstance(arrow, FancyArrowPatch) and arrow.get_gid() != "head"]
    ends = [[places[round(x, 3), round(y, 3)].removeprefix("rank ") for x, y in arrow._posA_posB] for arrow in drawn]
    moved = {(str(each.src), str(each.dst)) for each in messages(job.trace) if each.src != each.dst}
    assert {*map(tuple, ends)} == moved
    assert {(str(src), str(dst)) for (src, dst), number in sent.items() if number and src != dst} <= moved


@pytest.mark.parametrize("picture", [draw.timeline, draw.sequence, draw.traffic])
def test_a_title_is_the_maximum_over_all_ranks(job, picture):
    told, trace = title(job[picture]), job.trace
    sums = defaultdict(Counter)
    for (src, dst), number in analysis.traffic(trace).payload_bytes.items():
        sums["sends"][src] += number
        sums["receives"][dst] += number
    if most := re.match(r"(.+) (sends|receives) the most: (.+? .?B) of (.+? .?B)", told):
        name, does, number, total = most.groups()
        ((rank, largest), *others) = sums[does].most_common()
        assert name.lower() == trace.label(rank).lower()
        assert (number, total) == (size(largest), size(sums["sends"].total()))
        assert all(largest > other for _, other in others)
    if count := re.search(r"([\d,]+) messages in all", told):
        assert int(count[1].replace(",", "")) == len(messages(trace))
    if longest := re.match(r"Longest wait: (.+) for (.+), ([\d.]+ \S+) in (.+)", told):
        waits = {each: waits_of(each) for each in operations(trace) if not all_control(each, trace)}
        waited_ns, rank, whom = max(each for found in waits.values() for each in found)
        assert longest[3] == three_digits(waited_ns, {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9})
        assert longest[1].lower() == trace.label(rank).lower()
        assert longest[2].lower() == trace.label(whom).lower()
    stuck = analysis.hangs(trace)
    if stuck and stuck[0].operation.exchange is None:
        who = [trace.label(rank) for rank in stuck[0].waiting]
        assert told.lower().startswith(" and ".join(who).lower()) or f"{len(who)} ranks wait for" in told
        assert all(trace.label(rank).lower() in told.lower() for rank in stuck[0].operation.missing)


def waits_of(operation):
    """How long each rank waits for the last one, or for the answer to its call by RPC: [(ns, rank, for whom)]."""
    ends = operation.ends
    if operation.exchange is not None:
        first = [end for end in ends[:1] if end.end_ns is not None and len(ends) > 1 and not end.failed]
        return [(end.end_ns - end.start_ns, end.rank, ends[1].rank) for end in first]
    last = max(ends, key=lambda end: end.start_ns)
    came = [end for end in ends if end.end_ns is not None and not end.failed and end.end_ns > last.start_ns]
    return [(last.start_ns - end.start_ns, end.rank, last.rank) for end in came if not operation.missing]


def told_by(path):
    """Title and description of an svg, as a reader of its accessibility tree gets them."""
    root = ElementTree.parse(path).getroot()
    assert root.get("role") == "img"
    by_id = {each.get("id"): each for each in root.iter()}
    return by_id[root.get("aria-labelledby")].text, by_id[root.get("aria-describedby")].text


def test_every_svg_says_in_words_what_it_shows_and_a_name_is_text(tmp_path):
    """Several svgs may stand in one page: their ids differ."""
    ids, name = set(), f'<b>&"{HOSTILE}'
    for kind, ax in drawings(tmp_path, name=name).items():
        file = tmp_path / f"{kind}.svg"
        draw.save(ax, file)
        finding, description = told_by(file)
        assert title(ax) == " ".join(finding.split()), kind
        for line in (text.get_text() for text in ax.texts if text.get_gid() == "note"):
            assert " ".join(line.split()) in description, kind
        assert len(description.split(". ")) >= 2, kind
        tags = Counter(each.tag.removeprefix(SVG) for each in ElementTree.parse(file).getroot().iter())
        assert (tags["title"], tags["script"], tags["b"]) == (1, 0, 0), kind
        ids.add(ElementTree.parse(file).getroot().get("aria-labelledby"))
        page = ax.figure._repr_html_()
        assert page.count("<img") == 2, "a notebook shows images, for wide and narrow cells, without ids"
        assert not re.search("<script|<b>", page), kind
        assert kind not in ("traffic", "traffic_graph") or name in description, kind
    assert len(ids) == len(draw.__all__) - 2


def test_png_and_pdf_say_it_too_and_a_title_of_ones_own_is_text(every, tmp_path):
    ax = every["traffic"]
    ax.set_title(f"{HOSTILE}\U0001f600", loc="left", parse_math=False)
    for ending in ENDINGS:
        draw.save(ax, tmp_path / f"strange.{ending}")
    assert told_by(tmp_path / "strange.svg")[0].startswith(HOSTILE)
    assert Image.open(tmp_path / "strange.png").text["Title"].startswith(HOSTILE)
    assert "rank 0" in Image.open(tmp_path / "strange.png").text["Description"]
    assert b"/Subject" in (tmp_path / "strange.pdf").read_bytes()
    figure, _ = plt.subplots()
    draw.save(figure, tmp_path / "own.svg")
    assert "@media" not in (tmp_path / "own.svg").read_text(), "only dlearn's own figures are dark on a dark page"
    assert "@media(prefers-color-scheme:dark)" in (tmp_path / "strange.svg").read_text()
    for name in ("picture.gif", "picture"):
        with pytest.raises(DlearnError, match=r"\.svg, \.png or \.pdf"):
            draw.save(ax, tmp_path / name)


@pytest.mark.slow
def test_saved_in_two_processes_the_bytes_are_the_same(tmp_path):
    """Without torch in the other."""
    subprocess.run([sys.executable, pictures.__file__, tmp_path / "one"], check=True, timeout=100)
    pictures.save(tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir() if path.suffix[1:] in ENDINGS)
    assert len(names) == len(ENDINGS) * 4
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


@pytest.mark.parametrize("picture", OF_ONE, ids=lambda picture: picture.__name__)
def test_an_empty_trace_gives_a_sentence_and_a_notebook_one_figure(tmp_path, picture):
    ax = picture(Trace(tmp_path, (), ()))
    assert len(title(ax).split()) >= 3
    assert not texts(ax)
    assert [plt.figure(number) for number in plt.get_fignums()] == [ax.figure]
    draw.save(picture(Job(tmp_path, ranks=2).load()), tmp_path / "empty.svg")


@pytest.mark.parametrize("damage", ["lost", "empty", "doubled", "died"])
def test_damaged_traces_are_shown_as_far_as_they_go(tmp_path, damage):
    """A rank without a file, one that died, a recv from any source, different ops in one exchange."""
    job = Job(tmp_path, ranks=4, names=(STRANGE[1], "", "", ""))
    job.collective("all_gather", size=100, end_ns=90)
    job.message(0, 3, size=8)
    job.collective("all_reduce", size=100, end_ns=None)
    job.collective("broadcast", size=100, ranks=[0], root=1)
    job.collective("barrier", ranks=[1])
    job.recv(2, None, end_ns=None)
    path = job.write(died=[1])[3]
    if damage == "doubled":
        path.write_bytes((tmp_path / "host-1002.jsonl").read_bytes())
    elif damage != "died":
        path.write_bytes(b"") if damage == "empty" else path.unlink()
    for part in (Trace.load(tmp_path), Trace.load(tmp_path).where(rank=0)):
        for picture in OF_ONE:
            assert picture(part).figure
            plt.close("all")
        for page in (play.player(part).to_html(), play.strip(part).to_html(), export.html(part)):
            assert page.count("</script>") == page.count("<script")
        assert export.mermaid(part)
        assert "".join(export.perfetto(part))
