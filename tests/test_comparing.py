"""The traffic of two runs side by side."""

from test_draw import texts, title
from traces import Job

from dlearn import analysis, draw
from dlearn.analysis.volume.comparing import Amount


def two_runs(tmp_path):
    """`a` all-reduces 1000 B, `b` 500 B, and `b` broadcasts 8 B from rank 0 before."""
    a, b = Job(tmp_path / "a", ranks=2), Job(tmp_path / "b", ranks=2)
    a.collective("all_reduce", size=1000, phase="backward")
    b.collective("broadcast", size=8, root=0, phase="forward")
    b.collective("all_reduce", size=500, phase="backward")
    return a.load(), b.load()


def test_what_came_and_what_went(tmp_path):
    a, b = two_runs(tmp_path)
    found = analysis.compare(a, b)
    reduced = found.by_kind["backward", "all_reduce"]
    # A ring of two sends each byte once from each rank: 2 · 1/2 · 1000 · 2 ranks, and half of that.
    assert (reduced.a.payload_bytes, reduced.b.payload_bytes, reduced.added_bytes) == (2000, 1000, -1000)
    sent = found.by_kind["forward", "broadcast"]
    assert (sent.a, sent.b.payload_bytes) == (Amount(0, 0), 8)
    assert (found.came, found.went) == ((("forward", "broadcast"),), ())
    assert analysis.compare(b, a).went == found.came
    assert found.total.added_bytes == 8 - 1000
    # Pairs: rank 1 sends its half of the ring only.
    assert found.by_pair["rank 1", "rank 0"].added_bytes == -500
    assert found.by_pair["rank 0", "rank 1"].added_bytes == -500 + 8
    assert sum(each.added_bytes for each in found.by_pair.values()) == found.total.added_bytes


def test_it_shows_itself(tmp_path):
    a, b = two_runs(tmp_path)
    found = analysis.compare(a, b, names=("plain", "<half>"))
    # Rings: 1000 and 500 B from each of 2 ranks, and 8 B more from rank 0.
    assert found.sentence.startswith("<half> sends 992 B less than plain (1,008 instead of 2,000 B), in ")
    lines = str(found).splitlines()
    assert lines[1].split() == [
        *["phase", "operation", "messages", "plain", "<half>", "+/-", "bytes", "plain", "<half>", "+/-"]
    ]
    assert [line.split()[-3:] for line in lines if line.startswith("backward")] == [["2,000", "1,000", "-1,000"]]
    assert "&lt;half&gt;" in found._repr_html_()
    assert "<half>" not in found._repr_html_()


def test_a_run_is_like_itself_and_nothing_is_like_nothing(tmp_path):
    a, _ = two_runs(tmp_path)
    assert analysis.compare(a, a).sentence == "b sends as many bytes in as many messages as a"
    nothing = a.where(kind="span")
    assert analysis.compare(nothing, nothing).total.added_bytes == 0
    assert analysis.compare(nothing, a).total.added_bytes == 2000


def test_what_is_not_known_is_said(tmp_path):
    job = Job(tmp_path / "odd", ranks=2)
    job.collective("all_to_none", size=100)
    a, _ = two_runs(tmp_path)
    found = analysis.compare(a, job.load())
    assert found.unexplained == (0, 1)
    assert found.sentence.endswith("; not counted: 1 operation of b whose messages are not known")


def test_the_picture_names_what_came_and_what_changed(tmp_path):
    a, b = two_runs(tmp_path)
    ax = draw.compare(a, b, names=("plain", "<half>"))
    assert title(ax) == "<half> sends 992 B less than plain: 1.01 kB and not 2.00 kB, in 1 message more"
    assert dict(label.get_text().split("\n") for label in ax.get_yticklabels()) == {
        "all_reduce, backward": "-1.00 kB",
        "broadcast, forward": "came: 8 B",
        "rank 0 → rank 1": "-492 B, +1 message",
        "rank 1 → rank 0": "-500 B",
    }
    changes = [line.get_xdata().tolist() for line in ax.lines if line.get_gid() == "change"]
    assert changes == [[1, 0.5], [0, 0.004], [1, 0.5], [1, 0.508]], "shares of the largest kind, of the largest pair"
    assert {"2.00 kB", "1.00 kB"} <= set(texts(ax))


def test_pairs_that_send_the_same_in_both_runs_share_a_row(tmp_path):
    runs = []
    for name, size in (("a", 100), ("b", 300)):
        job = Job(tmp_path / name, ranks=64)
        for rank in range(64):
            job.send(rank, (rank + 1) % 64, size=size + (rank == 5))
            job.recv((rank + 1) % 64, rank, size=size + (rank == 5))
        runs.append(job.load())
    rows = [label.get_text().split("\n") for label in draw.compare(*runs).get_yticklabels()]
    assert sorted(rows) == [
        ["rank 0 → rank 1 and 62 more", "+200 B"],
        ["rank 5 → rank 6", "+200 B"],
        ["send", "+12.8 kB"],
    ]


def test_a_picture_of_many_pairs_draws_those_that_differ_most_and_says_so(tmp_path):
    a, b = Job(tmp_path / "a", ranks=6), Job(tmp_path / "b", ranks=6)
    for src in range(6):
        for dst in range(6):
            if src != dst:
                for job, size in ((a, 100), (b, 100 + 10 * src + dst)):
                    job.send(src, dst, size=size)
                    job.recv(dst, src, size=size)
    first = a.load()
    ax = draw.compare(first, b.load())
    assert len(ax.get_yticks()) == 1 + 12
    assert "Of 30 rows of pairs the 12 whose bytes differ most." in texts(ax)
    assert ax.get_yticklabels()[-1].get_text().startswith("rank 5 → rank 4\n")
    assert title(draw.compare(first, first)) == "b sends as many bytes as a: 3.00 kB, in as many messages"


def test_a_picture_of_nothing_says_so(tmp_path):
    nothing = Job(tmp_path, ranks=2).load()
    assert title(draw.compare(nothing, nothing)) == "Nothing to draw"
