"""Every sentence about a trace."""

from traces import Job, header, tensor

from dlearn.analysis import explain
from dlearn.analysis.telling.words import NAMES_SHOWN
from dlearn.shown import count_text
from dlearn.trace.event import REFUSED, Bucket
from dlearn.trace.wording import bucket_text


def sentences(trace):
    return list(explain(trace).sentences)


def test_a_whole_trace_in_words(tmp_path):
    """An all-reduce of 1,000 B on 4 ranks: 2 x 3/4 x 1000 = 1,500 B to the left."""
    job = Job(tmp_path, ranks=4)
    job.collective("all_reduce", size=1000)
    job.collective("barrier")
    assert sentences(job.load()) == [
        "4 ranks (gloo): 2 of 2 operations explained by 56 messages (56 derived from the backend's algorithm).",
        "In all: all_reduce of 1,000 B (uint8[1000]); 0→3, 1→0, 2→1, 3→2: 1,500 B each (derived).",
        "In all: barrier; 0→1, 0→2, 1→2, 1→3, 2→0, 2→3, 3→0, 3→1: 0 B each (derived).",
        "In the whole trace every rank sends 1,500 B of payload, 6,000 B in all.",
        # 6,000 B, and 56 messages of 96 B framing and 48 B in answer
        "The whole recording: payload 6,000 B, predicted on the wire 14,064 B, not measured"
        " (the trace holds no socket counters).",
    ]


def test_the_last_step_and_what_came_before_training(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("broadcast", size=8, root=0, phase="setup")
    for step in range(3):
        spans = [job.span(rank, f"step {step}") for rank in range(2)]
        for rank, span in enumerate(spans):
            job.collective("all_reduce", size=4, ranks=[rank], phase="backward", parent=span)
    explanation = explain(job.load())
    assert explanation.part == "step 2"
    assert explanation.sentences == (
        "2 ranks (gloo): 4 of 4 operations explained by 25 messages (25 derived from the backend's algorithm).",
        "Before training: broadcast of 8 B (uint8[8]) in setup; 0→1: 8 B (derived).",
        "In step 2: all_reduce of 4 B (uint8[4]) in the backward pass; 0→1, 1→0: 4 B each (derived).",
        "In step 2 every rank sends 4 B of payload, 8 B in all.",
        # 3 x 8 B and 8 B, in 25 messages
        "The whole recording: payload 32 B, predicted on the wire 3,632 B, not measured"
        " (the trace holds no socket counters).",
    )
    assert str(explanation).endswith(str(explanation.traffic))


def test_equal_sends_are_counted_and_the_missing_one_is_told(tmp_path):
    job = Job(tmp_path, ranks=2)
    for _ in range(3):
        job.send(0, 1, size=8)
    for _ in range(2):
        job.recv(1, 0, size=8)
    assert sentences(job.load()) == [
        "2 ranks (gloo): 3 of 3 operations explained by 3 messages (2 observed, 1 missing: expected, never came).",
        "In all: rank 0 sends rank 1 8 B (uint8[8]), 2 times.",
        "In all: rank 0 sends rank 1 8 B (uint8[8]); rank 1 never received it.",
        "In the whole trace rank 0 sends 16 B and rank 1 sends 0 B of payload, 16 B in all;"
        " 8 B were expected and never came.",
        "The whole recording: payload 16 B, predicted on the wire 304 B, not measured"
        " (the trace holds no socket counters).",
    ]


def test_only_what_is_told_by_the_same_words_is_counted_together(tmp_path):
    """Roots, splits and phases: who sends what to whom differs, or when."""
    job = Job(tmp_path, ranks=3)
    for root in (0, 2, 2):
        job.collective("broadcast", size=4, root=root)
    for splits in ((1, 2, 3), (3, 2, 1)):
        job.collective("all_to_all_single", size=6, splits=splits)
    for phase in ("forward", "backward", "backward"):
        job.collective("all_gather_single", size=4, phase=phase)
    assert sentences(job.load())[1:-2] == [
        "In all: broadcast of 4 B (uint8[4]); 0→1, 0→2: 4 B each (derived).",
        "In all: broadcast of 4 B (uint8[4]), 2 times; 2→0, 2→1: 4 B each (derived).",
        "In all: all_to_all_single of 6 B (uint8[6]);"
        " 0→1, 2→1: 2 B each; 0→2, 1→2: 3 B each; 1→0, 2→0: 1 B each (derived).",
        "In all: all_to_all_single of 6 B (uint8[6]);"
        " 0→1, 2→1: 2 B each; 0→2, 1→2: 1 B each; 1→0, 2→0: 3 B each (derived).",
        "In all: all_gather_single of 4 B (uint8[4]) in the forward pass; 0→1, 1→2, 2→0: 8 B each (derived).",
        "In all: all_gather_single of 4 B (uint8[4]) in the backward pass, 2 times; 0→1, 1→2, 2→0: 8 B each (derived).",
    ]


def test_a_backend_without_a_schedule_is_told_by_its_roots(tmp_path):
    job = Job(tmp_path, ranks=2, backend="nccl")
    for root in (0, 1, 1):
        job.collective("broadcast", size=4, root=root)
    unknown = "who sends to whom inside it is not known (its root is rank {}): no schedule of nccl's broadcast"
    first, second = sentences(job.load())[1:3]
    assert first.startswith(f"In all: broadcast of 4 B (uint8[4]); {unknown.format(0)}")
    assert second.startswith(f"In all: broadcast of 4 B (uint8[4]), 2 times; {unknown.format(1)}")


def test_what_a_collective_is_given_may_differ_from_rank_to_rank(tmp_path):
    """The objects of an all_gather_object; and the root of a scatter has what all get."""
    job = Job(tmp_path, ranks=2)
    for rank in (0, 1):
        job.collective("gather", size=4 + rank, root=0, ranks=[rank])
        own = {"inputs": (tensor(3), tensor(3))} if rank == 1 else {}
        job.collective("scatter", root=1, ranks=[rank], **own, outputs=(tensor(3),))
    told = sentences(job.load())
    assert told[1].startswith("In all: gather of 4 to 5 B (uint8[4]); ")
    assert told[2].startswith("In all: scatter of 6 B (uint8[3], uint8[3]); ")


def test_refused_and_failed_calls_stand_beside_those_that_went_through(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=4, by=REFUSED, error="RuntimeError")
    job.collective("all_reduce", size=4)
    job.collective("all_reduce", size=4, by="wait", error="RuntimeError")
    job.collective("all_reduce", size=4)
    job.send(0, 1, size=8, by=REFUSED, error="ValueError", start_ns=15)
    job.send(0, 1, size=8, start_ns=15)
    job.recv(1, 0, size=8, start_ns=15)
    told = sentences(job.load())
    assert told[:7] == [
        "2 ranks (gloo): 5 of 6 operations explained by 17 messages"
        " (16 derived from the backend's algorithm, 1 observed).",
        "In all: all_reduce of 4 B (uint8[4]); refused at once on every rank (RuntimeError): nothing was sent.",
        "In all: all_reduce of 4 B (uint8[4]), 2 times; 0→1, 1→0: 4 B each (derived).",
        "In all: all_reduce of 4 B (uint8[4]); it failed on every rank (RuntimeError):"
        " which of its messages have travelled is not known.",
        "In all: rank 0 was to send rank 1 8 B (uint8[8]); refused at once on rank 0 (ValueError): nothing was sent.",
        "In all: rank 0 sends rank 1 8 B (uint8[8]).",
        "In the whole trace rank 0 sends 16 B and rank 1 sends 8 B of payload, 24 B in all; 1 operation not counted.",
    ]


def test_a_selection_is_not_called_the_whole(tmp_path):
    job = Job(tmp_path, ranks=2)
    span = job.span(0, "warm-up")
    job.collective("barrier", ranks=[0], parent=span)
    job.collective("barrier", ranks=[1])
    assert explain(job.load().within("warm-up")).part == "this part of the trace"


def test_problems_are_part_of_the_answer(tmp_path):
    job = Job(tmp_path, ranks=2)
    problem = sentences(job.load(without=[1]))[-1]
    assert problem.startswith("Problem: 1 of 2 processes left a file in ")
    assert problem.endswith("that of rank 1 is missing (if it ran on another host, copy its file here).")


def test_a_trace_without_any_operation(tmp_path):
    assert sentences(Job(tmp_path, ranks=1).load()) == [
        "1 rank (no process group used): 0 of 0 operations explained by 0 messages (none).",
        "In the whole trace no rank was seen sending anything.",
    ]


def test_names_of_strangers_stay_on_one_line_and_are_no_markup(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.headers[0] = header(0, world_size=2, name="<b>\nbold")
    span = "step <script>\n</script>"
    for rank in range(2):
        parent = job.span(rank, span)
        evil = tensor(4, dtype="<i>\x1b[31m\u202e")
        job.collective("all_reduce", ranks=[rank], inputs=(evil,), parent=parent, phase="<u>\r", site="<a>\n:1")
    explanation = explain(job.load())
    assert all(sentence.isprintable() for sentence in explanation.sentences)
    shown = explanation._repr_html_()
    assert not any(tag in shown for tag in ("<script>", "<b>", "<i>", "<u>", "<a>"))
    assert "step &lt;script&gt;\\n" in shown


def test_any_number_of_kinds_is_a_readable_answer(tmp_path):
    job = Job(tmp_path, ranks=2)
    for size in range(1, 101):
        job.collective("all_reduce", size=size)
    told = sentences(job.load())
    assert len(told) == 1 + 40 + 1 + 1 + 1
    assert told[-3] == "In all: 60 more operations of 60 more kinds; operations(trace) lists them."


def test_any_number_of_ranks_is_a_readable_answer(tmp_path):
    job = Job(tmp_path, ranks=60)
    job.collective("all_reduce", size=61)
    assert all(len(sentence) < 500 for sentence in sentences(job.load()))


def test_long_lists_of_parameters_are_shortened():
    def told(*names):
        bucket = Bucket(number=1, start_ns=0, model=0, index=0, count=1, bytes=4, built="first", parameters=names)
        return bucket_text(bucket, NAMES_SHOWN)

    assert told(*"abcdef") == "gradient of bucket 0: a, b, c, d and 2 more"
    assert told(*"ab") == "gradient of bucket 0: a, b"


def test_counts_agree_with_their_nouns():
    assert (count_text(1, "rank"), count_text(2000, "message")) == ("1 rank", "2,000 messages")
