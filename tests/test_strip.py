"""The strip: what its page holds of a trace, and what a reader selects with it in a real browser."""

from __future__ import annotations

import zipfile

import frozen_answers
import numpy as np
import pytest
from test_player import after, in_browser
from traces import Job, tensor

from dlearn import Trace, messages, operations
from dlearn.analysis import traffic
from dlearn.analysis.ddp.step_times import step_times
from dlearn.errors import DlearnError
from dlearn.play import player, strip
from dlearn.play.strip import contents
from dlearn.trace.event import NOT_OBSERVED, Collective


def held(trace: Trace) -> tuple[dict, list[np.ndarray]]:
    return contents(trace, step_times(trace))


def job(folder, *, ranks=3, steps=6, size=300) -> Job:
    """Steps of 1 ms: in each an all-reduce, to which rank 1 comes late, and a send from rank 0 to rank 1."""
    made = Job(folder, ranks=ranks)
    for step in range(steps):
        begin = step * 1_000_000
        # A parent has the same number on all ranks: each makes three events in a step.
        [parent] = {made.span(rank, f"step {step}", start_ns=begin, end_ns=begin + 900_000) for rank in range(ranks)}
        starts = {rank: begin + 1000 + 50_000 * (rank == 1) for rank in range(ranks)}
        made.collective("all_reduce", size=size, start_ns=starts, end_ns=begin + 200_000, parent=parent)
        times = {"start_ns": begin + 300_000, "end_ns": begin + 310_000, "parent": parent}
        made.send(0, 1, size=8, **times)
        made.recv(1, 0, size=8, **times)
        for rank in range(2, ranks):
            made.span(rank, "idle", **times)
    return made


@pytest.mark.parametrize("name", frozen_answers.names())
def test_the_page_holds_all_calls_messages_and_bytes_of_every_recorded_job(name, tmp_path):
    with zipfile.ZipFile(frozen_answers.HERE / f"{name}.zip") as archive:
        archive.extractall(tmp_path)
    found = [Trace.load(path) for path in tmp_path.iterdir() if path.is_dir()]
    assert [check_contents(trace) for trace in found if len(operations(trace).calls)]


def check_contents(trace: Trace) -> None:
    shown = operations(trace)
    data, [differences, took, waited, operation, kind, within] = held(trace)
    assert len(differences) == data["first"][-1] == len(shown.calls)
    start = np.concatenate([np.cumsum(each) for each in np.split(differences, data["first"][1:-1])])
    assert (start >= 0).all()
    assert (waited <= np.where(took < 0, waited, took)).all()
    assert data["length"] > (start + np.maximum(0, took)).max()
    assert sorted(set(operation.tolist())) == list(range(data["operations"])) == list(range(len(shown)))
    sums = [sum(pair[2:][field] for pair in data["kinds"][each]["pairs"]) for field in (0, 1) for each in kind.tolist()]
    sent = [message for message in messages(trace) if message.how != "missing"]
    assert sum(sums[len(kind) :]) == len(sent)
    assert sum(sums[: len(kind)]) == sum(message.payload_bytes or 0 for message in sent)
    for place, span in enumerate(data["spans"]):
        assert (within == place).sum() == len(operations(trace.within(span)))


def test_a_long_trace_is_told_in_coarser_units_and_nothing_overflows(tmp_path):
    made = Job(tmp_path, ranks=2)
    for hour in range(10):
        made.collective("all_reduce", size=8, start_ns=hour * 3600 * 10**9, end_ns=hour * 3600 * 10**9 + 10**9)
    data, columns = held(made.load())
    assert data["length"] * data["unit_ns"] >= 9 * 3600 * 10**9 + 10**9
    assert all(np.abs(column).max() < 2**31 for column in columns)


def test_a_trace_without_calls_is_one_sentence(tmp_path):
    made = Job(tmp_path, ranks=2)
    made.span(0, "alone", start_ns=0, end_ns=5)
    with pytest.raises(DlearnError, match="nothing to travel through"):
        strip(made.load())


def test_names_are_text(tmp_path):
    made = Job(tmp_path, ranks=2)
    made.span(0, "</script><img src=x onerror=1> 1", start_ns=0, end_ns=9)
    made.collective("all_reduce", size=8, start_ns=1, end_ns=5)
    page = strip(made.load()).to_html()
    assert "<img" not in page
    assert page.count("</script>") == page.count("<script") == 2


def test_a_notebook_nobody_trusts_shows_a_picture(tmp_path):
    shown = strip(job(tmp_path).load())
    assert '<img class="still" alt="A column for each step' in shown._repr_html_()
    assert repr(shown) == "30 calls of 3 ranks: 6 steps of 900 µs each"


SELECT = """
    const root = find(".dlearn-strip"), travel = root.dlearnStrip;
    const tell = () => say(text("code"), travel.found.length, text(".sentence"));
"""


@in_browser
def test_the_copied_python_selects_what_the_page_shows(tmp_path):
    trace = job(tmp_path).load()
    script = (
        SELECT
        + """
        tell();
        find("select").value = 2; find("select").dispatchEvent(new Event("change")); tell();
        travel.look(10000, 33000); tell();
        for (const key of ["n", "n", "ArrowDown"]) { press(key, ".lanes"); tell(); }
        press("Escape", ".lanes"); press("Home", ".lanes"); tell();
        press("+", ".lanes"); tell(); press("ArrowRight", ".lanes"); tell();
    """
    )
    told = after(strip(trace).to_html(), tmp_path, script)
    for python, count, sentence in told:
        assert len(operations(eval(python, {"trace": trace}))) == count, (python, sentence)
    pythons = [python for python, _, _ in told]
    assert pythons[:3] == ["trace", 'trace.within("step 2")', "trace.between(1, 3.3)"]
    assert pythons[6] == "trace"
    assert told[0][2] == "12 operations in view: 150 messages, 7.25 kB of payload."
    assert sum(traffic(trace).message_count.values()) == 150
    assert len({python for python in pythons if ".where(" in python}) == 2


@in_browser
def test_a_call_is_told_with_its_line_its_wait_and_how_it_is_known(tmp_path):
    made = Job(tmp_path, ranks=3)
    made.collective("all_reduce", size=300, start_ns={0: 0, 1: 400_000, 2: 0}, end_ns=1_000_000, site="train.py:31")
    made.collective("all_reduce", size=300, ranks=[0, 2], start_ns=2_000_000, end_ns=None)
    script = (
        SELECT
        + """
        for (const call of [0, 1]) { travel.choose(call); tell(); }
    """
    )
    (_, _, first), (python, count, second) = after(strip(made.load()).to_html(), tmp_path, script)
    assert first == (
        "all_reduce of uint8[300] (train.py:31): rank 0 was in it for 1.00 ms, 0.400 ms of it waiting for rank 1."
        " Messages: derived. 24 messages, 1.20 kB of payload."
    )
    assert second == (
        "all_reduce of uint8[300], which rank 1 never called: rank 0 never came out of it."
        " Messages: missing. 0 messages, 0 B of payload."
    )
    assert (python, count) == ('trace.between(2, 2.0001).where(op="all_reduce")', 1)


@in_browser
def test_wheel_drag_and_click_travel_and_choose(tmp_path):
    script = (
        SELECT
        + """
        const [over, lanes] = [find(".overview"), find(".lanes")];
        const at = (canvas, type, share, y = 40, more = {}) => {
            const box = canvas.getBoundingClientRect();
            const made = type === "wheel" ? WheelEvent : PointerEvent;
            canvas.dispatchEvent(new made(type, { pointerId: 1, bubbles: true, cancelable: true,
                clientX: box.left + 92 + share * (box.width - 92), clientY: box.top + y, ...more }));
        };
        Element.prototype.setPointerCapture = () => {};
        const wide = () => Math.round(100 * (travel.window[1] - travel.window[0]) / travel.data.length);
        at(lanes, "wheel", 0, 40, { deltaY: -1 }); say(wide(), travel.window[0]);
        at(over, "pointerdown", 0.25); at(over, "pointermove", 0.75); at(over, "pointerup", 0.75); say(wide());
        at(lanes, "pointerdown", 0.5); at(lanes, "pointermove", 1); at(lanes, "pointerup", 1);
        say(wide(), travel.window[0]);
        at(lanes, "pointerdown", 0.01); at(lanes, "pointerup", 0.01); tell();
    """
    )
    zoomed, brushed, panned, chosen = after(strip(job(tmp_path).load()).to_html(), tmp_path, script)
    assert zoomed == [74, 0]
    assert brushed == [50]
    assert panned == [50, 0]
    assert chosen[1] == 1
    assert chosen[2].startswith("all_reduce of uint8[300]: rank 0 was in it for 0.199 ms, 0.0500 ms of it waiting")


@in_browser
def test_the_player_on_the_same_page_goes_to_a_chosen_call(tmp_path):
    trace = job(tmp_path).load()
    page = strip(trace).to_html().replace("<body>", f"<body>{player(trace)._repr_html_()}")
    script = (
        SELECT
        + """
        await new Promise((done) => setTimeout(done, 50));
        travel.choose(3); say(text(".position"), text(".dlearn-player[data-player] .sentence"));
    """
    )
    [[position, sentence]] = after(page, tmp_path, script)
    assert position.startswith("step ")
    assert "8 B: uint8[8]" in sentence


@in_browser
def test_a_call_outside_of_what_the_player_plays_is_told_with_the_python_that_plays_it(tmp_path):
    trace = job(tmp_path).load()
    page = strip(trace).to_html().replace("<body>", f"<body>{player(trace.within('step 2'))._repr_html_()}")
    script = (
        SELECT
        + """
        const told = () => say(text("code"), travel.found.length, root.querySelector(".sentence").textContent);
        await new Promise((done) => setTimeout(done, 50));
        const stage = document.querySelector(".dlearn-player[data-player]");
        stage.querySelector("[data-view=stage]").click();
        travel.choose(0); told();
        const count = (selector) => stage.querySelectorAll(selector).length;
        const words = (selector) => stage.querySelector(selector).textContent;
        const totals = stage.querySelector(".totals");
        say(words(".position"), words(".sentence"), count(".packet"), count(".wire.used"), totals.hidden);
        stage.dlearnPlayer.go(1);
        say(words(".position"), totals.hidden);
        const inside = travel.data.begins.findIndex((begin) => begin >= 20000);
        travel.choose(travel.data.operation.indexOf(inside));
        told();
    """
    )
    (python, _, outside), (position, sentence, packets, wires, hidden), back, (_, _, inside) = after(
        page, tmp_path, script
    )
    assert position == "outside of what is played"
    assert outside.startswith(sentence)
    assert packets == wires > 0
    assert hidden
    assert back == ["step 1 of 26", False]
    told = " The player on this page plays another part of the run; this call is played by "
    assert outside.endswith(f"{told}player({python}).")
    assert told not in inside
    assert "in 8 messages: 24 steps" in repr(player(eval(python, {"trace": trace})))


@in_browser
def test_an_arrow_begins_and_ends_on_bars_of_its_operation_and_height_means_nothing(tmp_path):
    """Three buckets under way at once, which begin in another order in the second step; rank 2 has one call at once."""
    made = Job(tmp_path, ranks=3)
    facts = {"launcher": "reducer", "phase": "backward", "size": 4}
    for rank in range(3):
        for index in range(3):
            made.bucket(rank, index, {f"p{index}": 4}, count=3)
    for step, starts in enumerate(((10, 12, 14), (60, 90, 120))):
        for at in starts:
            late = {rank: 1000 * (at + rank) for rank in range(3)}
            made.collective("all_reduce", start_ns=late, end_ns=1000 * (at + 20), backward=step, **facts)
    made.span(0, "end", start_ns=140_000, end_ns=150_000)
    script = (
        SELECT
        + """
        const paint = CanvasRenderingContext2D.prototype, fill = paint.fillRect, bars = [], tips = [];
        const [move, line] = [paint.moveTo, paint.lineTo], looks = travel.data.colors.map((each) => each.toLowerCase());
        paint.fillRect = function (...box) {
            const on = this.canvas.className === "lanes" && this.globalAlpha === 1;
            if (on && looks.includes(this.fillStyle)) bars.push([this.fillStyle, ...box]);
            fill.apply(this, box);
        };
        paint.moveTo = function (...at) { this.begin = at; move.apply(this, at); };
        paint.lineTo = function (...at) {
            this.begin && tips.push(this.begin, at); delete this.begin; line.apply(this, at); };
        for (const call of [0, 1, 2, 3]) {
            bars.length = tips.length = 0;
            travel.choose(call);
            say(travel.data.kinds[travel.data.kind[travel.data.operation[call]]].color, bars.slice(), tips.slice());
        }
        travel.choose(-1);
        travel.look(235, 255); tell();
    """
    )
    *chosen, (_, begin, told) = after(strip(made.load()).to_html(), tmp_path, script)
    for color, bars, tips in chosen:
        own = [box for look, *box in bars if look.lower() == color.lower()]
        assert len(tips) >= 6, "round the ring of three"
        for x, y in tips[::4] + tips[1::4]:
            assert any(left - 1 <= x <= left + wide + 1 and top < y < top + high for left, top, wide, high in own)
        assert len({round(high, 3) for *_, high in bars}) == 1
        rows = {(look, round((box[1] - 16) % 70)) for look, *box in bars}
        assert len(rows) == 3, "a bucket has one row on all ranks and in all steps"
    assert (begin, told.partition(":")[0]) == (0, "3 operations in view, of which 0 begin here")


@in_browser
def test_who_never_came_has_a_red_empty_mark_in_its_lane_while_the_others_wait(tmp_path):
    made = Job(tmp_path, ranks=3)
    made.collective("all_reduce", size=300, start_ns=0, end_ns=1_000_000)
    made.collective("all_reduce", size=300, ranks=[0, 2], start_ns=2_000_000, end_ns=None)
    trace = made.load()
    assert [kind["absent"] for kind in held(trace)[0]["kinds"]] == [[], [1]]
    script = (
        SELECT
        + """
        const red = getComputedStyle(root).getPropertyValue("--missing"), drawn = [];
        const paint = CanvasRenderingContext2D.prototype, frame = paint.strokeRect, shape = paint.stroke;
        const plain = Object.assign(find(".traffic").getContext("2d"), { strokeStyle: red }).strokeStyle;
        paint.strokeRect = function (...at) {
            if (this.strokeStyle === plain && this.canvas.className === "lanes") drawn.push(at);
            frame.apply(this, at);
        };
        let arrows = 0;
        paint.stroke = function () { arrows += this.getLineDash().length > 0; shape.apply(this); };
        travel.look(0, travel.data.length);
        const lanes = find(".lanes");
        const begins = 92 + (travel.data.begins[1] * (lanes.clientWidth - 92)) / travel.data.length;
        say(drawn.length, drawn[0][0] - begins, drawn[0][1], arrows);
        travel.choose(0);
        say(arrows);
    """
    )
    [[marks, away, top, arrows], [with_chosen]] = after(strip(trace).to_html(), tmp_path, script)
    assert (marks, arrows) == (1, 0)
    assert abs(away) < 1
    assert top == 16 + 70 + 2  # in the second lane
    assert with_chosen == 3  # around the ring of three; derived, hence dashed


def test_a_step_that_was_never_finished_lasts_until_the_last_moment(tmp_path):
    made = job(tmp_path, steps=5)
    made.span(0, "step 5", start_ns=5_000_000, end_ns=None)
    made.collective("all_reduce", size=8, start_ns=5_100_000, end_ns={0: None, 1: 7_000_000, 2: 7_000_000})
    data, _ = held(made.load())
    assert data["steps"][-1] == ["step 5", 50_000, 70_001, 5]
    assert data["heat"][-1] == (0, 50_000, 70_000, -1)
    assert 80_000 < data["length"] <= 80_501  # room for the call that has not come out
    assert all(shade >= 0 for *_, shade in data["heat"][:-1])


@in_browser
def test_an_end_that_nobody_saw_is_not_called_stuck(tmp_path):
    made = Job(tmp_path, ranks=2)
    made.collective("all_reduce", size=8, start_ns=0, end_ns=1_000_000)
    made.event(
        Collective, 0, op="all_reduce", group="world", seq=2, inputs=(tensor(8),), start_ns=2_000_000, by=NOT_OBSERVED
    )
    made.collective("barrier", group="world", ranks=[1], start_ns=2_000_000, end_ns=None)
    trace = made.load()
    took = held(trace)[1][1].tolist()
    assert took == [10_000, -2, 10_000, -1]
    told = after(strip(trace).to_html(), tmp_path, SELECT + "travel.choose(1); tell(); travel.choose(3); tell();")
    assert "rank 0 was in it; nobody saw its end." in told[0][2]
    assert "rank 1 never came out of it." in told[1][2]
