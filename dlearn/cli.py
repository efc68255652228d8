"""The command `dlearn`. Each command is a function that takes the parsed arguments; errors become one sentence."""

import argparse
import io
import os
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlearn import doctor
from dlearn.analysis.telling.explanations import explain as explanation
from dlearn.analysis.telling.sums import late_text
from dlearn.analysis.volume.comparing import compare as comparison
from dlearn.analysis.volume.message_lines import csv_lines, json_lines, text_lines
from dlearn.errors import DlearnError, SetupError, TraceError, WrongArguments
from dlearn.events import readers
from dlearn.events.event import AutogradNode
from dlearn.join.message_evidence import messages as messages_of
from dlearn.notices import notice
from dlearn.scripts.command import run
from dlearn.scripts.sentence_parser import SentenceParser
from dlearn.scripts.trace_choice import HoldsTraces, load, selection_options
from dlearn.trace import Trace
from dlearn.version import __version__

FAILED = 1
WRONG = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count

PICTURES = (
    *("autograd", "breakdown", "buckets", "film", "memory", "pipeline"),
    *("sequence", "steps", "timeline", "topology", "traffic", "traffic_graph"),
)
"""The drawings that need a trace and nothing else."""

FORMATS = {
    "gif": "a picture for slides",
    "html": "a page to step through; open it in a browser",
    "mermaid": "a diagram for Markdown",
    "perfetto": "open it at ui.perfetto.dev",
}
"""The functions of `dlearn.export` that need a trace and nothing else, and what to do with a file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    try:
        arguments = _without_help(sys.argv[1:] if arguments is None else arguments)
        if arguments[:1] == ["run"]:
            return run(arguments[1:])  # Its arguments are torchrun's, and the script's.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: Latin-1 lacks our arrows
        if not arguments:
            parser().print_help()
            return WRONG
        options, more = parser().parse_known_args(arguments)
        if getattr(options, "trace", None) == [] and not any(word.startswith("-") for word in more):
            options.trace = more  # Behind an option argparse does not look for it.
        elif more:
            options.parser.error(f"unrecognized arguments: {' '.join(more)}")
        os.environ.setdefault("MPLBACKEND", "agg")  # pictures go to files, no window
        options.command(options)
        sys.stdout.flush()
    except DlearnError as error:
        print(f"dlearn: {error}", file=sys.stderr)
        return WRONG if isinstance(error, WrongArguments) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who reads us (`| head`) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return 0


def _without_help(arguments: Sequence[str]) -> Sequence[str]:
    """Return "draw --help" for "help draw"."""
    return [*arguments[1:2], "--help"] if arguments[:1] == ["help"] else arguments


READING = ("explain", "messages", "draw", "export", "compare")
"""The commands that read a trace, or a part of it; the last one reads two."""

EXAMPLES = {
    "demo": "--out demo-out",
    "doctor": "--json",
    "explain": "traces/train --step 8",
    "messages": "traces/train --op all_reduce --csv",
    "compare": "traces/before traces/after --step 8",
    "import": "dumps/ -o trace",
    "scrub": "traces/train -o to-send",
    "draw": "timeline traces/train --step 8 -o timeline.svg",
    "export": "html traces/train --between 100:200 -o messages.html",
    "grade": "ring handed-in/ --csv marks.csv",
    "predictions": "handed-in/",
}

_TRACE = "its folder, with one .jsonl file per process (of several hosts, the folder from each), or what import takes"
_NEWEST = f"{_TRACE}; without one the newest in traces/, where dlearn run writes"


# What each takes ------------------------------------------------------------------------------------------------------


def parser() -> SentenceParser:
    """Make the parser; a new command is a subparser with `set_defaults(command=function)`."""
    top = SentenceParser(
        prog="dlearn", description="See who sent what to whom, and how many bytes it was, in torch.distributed."
    )
    top.add_argument("--version", action="version", version=f"dlearn {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    made: dict[str, SentenceParser] = {}
    chosen = selection_options()
    for command, text in (
        (demo, "train on handwritten digits on three ranks; tell and draw who sent what to whom"),
        # Only for the list of commands: `main` hands it on before.
        (run, "run a script that knows nothing of dlearn, by torchrun or alone, and record it"),
        (doctor.doctor, "say what works on this machine, and what to do about the rest"),
        (explain, "say in words what a trace holds: who sent what to whom, who died where, who waits for whom"),
        (messages, "print every message of a trace: from, to, bytes, when, what"),
        (compare, "say how the traffic of two traces differs, in messages and in bytes"),
        (import_, "make a trace of other tools' files: of torch's Flight Recorder or profiler, NCCL's log, OTF2"),
        (scrub, "write a trace again without hosts, paths and names, so that it can be sent"),
        (draw, "draw a trace and save the picture"),
        (export, "write a trace for Perfetto or Mermaid, as a page to step through, or as a GIF"),
        (grade, "for a teacher: grade a folder of submissions, .py and .ipynb, by an exercise"),
        (predictions, "for a teacher: count what a class predicted, without names"),
    ):
        name = command.__name__.rstrip("_")
        parents = [chosen] if name in READING else []
        made[name] = commands.add_parser(name, help=text, parents=parents)
        made[name].description = f"{text[0].upper()}{text[1:]}."
        made[name].epilog = f"example: dlearn {name} {EXAMPLES.get(name, '')}"
        made[name].set_defaults(command=command, parser=made[name])
    where = "folder for the files; those of the same name in it are replaced (default: %(default)s)"
    made["demo"].add_argument("--out", metavar="DIR", type=Path, default="demo-out", help=where)
    made["doctor"].add_argument("--json", action="store_true", help="one object: can_record, and all findings")
    made["draw"].add_argument("kind", metavar="KIND", choices=PICTURES, help=", ".join(PICTURES))
    made["export"].add_argument("format", metavar="FORMAT", choices=FORMATS, help=", ".join(FORMATS))
    for name in READING[:-1]:
        made[name].add_argument("trace", metavar="TRACE", nargs="*", default=[], help=_NEWEST)
    for name in ("a", "b"):
        made["compare"].add_argument(name, metavar=name.upper(), type=Path, help=_TRACE)
    for name in ("import", "scrub"):
        add = made[name].add_argument
        add("files", metavar="PATH", nargs="+", type=Path, help="a file, or a folder or .tar.gz of them")
        add("-o", "--out", metavar="DIR", type=Path, required=True, help="the new folder of the trace")
    form = made["messages"].add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one array; times in ns, sizes in bytes")
    form.add_argument("--csv", action="store_true", help="the same fields")
    _add_out(made["draw"], "a .svg, .pdf or .png; a file of that name is replaced")
    made["draw"].add_argument("--context", metavar="ID", type=int, help="of distributed autograd (default: the last)")
    arrows = "of a timeline: an arrow for each derived message, too"
    made["draw"].add_argument("--arrows", action="store_true", help=arrows)
    _add_out(made["export"], "replaced if there; .md holds all mermaid diagrams, .mmd one each")
    collected = "with all students' dlearn-predictions.json below it"
    made["predictions"].add_argument("folder", metavar="FOLDER", help=collected)
    add = made["grade"].add_argument
    add("exercise", metavar="EXERCISE", help='as in `lessons.check`: "ring"; another name lists all')
    of_students = "with STUDENT.py, STUDENT.ipynb, or a folder of each student"
    add("folder", metavar="FOLDER", type=Path, help=of_students)
    add("--function", metavar="NAME", help="what to grade (default: what their check() is given)")
    add("--seconds", metavar="N", type=float, default=120.0, help="for each (default: %(default)g)")
    marks = made["grade"].add_mutually_exclusive_group()
    marks.add_argument("--csv", metavar="FILE", type=Path, help="write a CSV instead of the table")
    marks.add_argument("--json", metavar="FILE", type=Path, help="write Gradescope's results.json")
    return top


def _add_out(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help=text)


# What each does -------------------------------------------------------------------------------------------------------


def demo(options: argparse.Namespace) -> None:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"the folder {options.out} cannot be made: {error.strerror}. Give another --out."
        raise SetupError(text) from None
    from dlearn.lessons import demo

    demo.run(options.out, tell=lambda line: print(line, flush=True))
    if sys.stdout.isatty() and (sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))):
        webbrowser.open((options.out / demo.PAGE).resolve().as_uri())


def explain(options: argparse.Namespace) -> None:
    try:
        trace = load(options, quietly=True)
        print(explanation(trace))
        if late := late_text(trace):
            print(f"\n{late[0].upper()}{late[1:]}.")
    except HoldsTraces as found:
        print(found.table)


def compare(options: argparse.Namespace) -> None:
    names = (options.a.name, options.b.name)
    if names[0] == names[1]:
        names = (str(options.a), str(options.b))
    print(comparison(load(options, options.a), load(options, options.b), names=names))


def grade(options: argparse.Namespace) -> None:
    """Grade one student after the other, each told on stderr; a file is written anew after each."""
    from dlearn import lessons

    file = options.csv or options.json
    if file:
        _check_place(file)

    def tell(so_far: Any) -> None:
        if not so_far.marks:
            print(f"dlearn: {_AS_YOU}", file=sys.stderr)
            return
        done, last = f"{len(so_far.marks)} of {so_far.students}", so_far.marks[-1]
        took = f"{last.points} of 1 point, {last.seconds:.0f} s"
        print(f"{done}: {last.student}: {took}", file=sys.stderr, flush=True)
        if file:
            with _writing(file):
                text = so_far.to_csv() if options.csv else so_far.to_json()
                file.write_text(text, encoding="utf-8")

    limits = {"function": options.function, "seconds": options.seconds}
    marks = lessons.grade(options.exercise, options.folder, tell=tell, **limits)
    print(f"{file}: {next(marks.paragraphs())}" if file else marks)


_AS_YOU = (
    "each submission is a program and runs as you: it can read your files and the other"
    " submissions, and write its own grade. Grade in a container, or as a user without rights."
)


def predictions(options: argparse.Namespace) -> None:
    from dlearn import lessons

    print(lessons.stats(options.folder))


def messages(options: argparse.Namespace) -> None:
    found = messages_of(load(options))
    lines = json_lines if options.json else csv_lines if options.csv else text_lines
    for line in lines(found):
        print(line)
    if found.unexplained and lines is not text_lines:  # the text ends with it
        notice(str(found), alone=True)


def import_(options: argparse.Namespace) -> None:
    """Write other tools' files as a trace, and say what it is."""
    _new_folder(options.out)
    for left_out in readers.translate(options.files, options.out):
        notice(left_out, alone=True)
    print(Trace.load(options.out))


def scrub(options: argparse.Namespace) -> None:
    """Write a trace, or what `import` takes, without names, and say what was replaced."""
    from dlearn.export.scrubbing import scrub as written

    _new_folder(options.out)
    print(f"{written(options.files, options.out)}. Look at {options.out} before you send it.")


def _new_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise WrongArguments(f"{folder} is not empty. Give a new folder as -o.")
    except OSError as error:
        raise SetupError(f"cannot write {folder}: {error.strerror}. Give another -o.") from None


def draw(options: argparse.Namespace) -> None:
    from dlearn import draw  # matplotlib takes a moment
    from dlearn.draw.save import ENDINGS

    if options.out.suffix.lower() not in ENDINGS:
        known = ", ".join(ENDINGS)
        raise WrongArguments(f"{options.out}: a picture is saved as {known}. Give the file such an ending.")
    _check_place(options.out)
    if options.context is not None and options.kind != "autograd":
        raise WrongArguments("--context chooses one of distributed autograd's: it goes with `draw autograd` only.")
    if options.arrows and options.kind != "timeline":
        raise WrongArguments("--arrows goes with `draw timeline` only.")
    trace = load(options)
    if options.kind == "autograd":
        contexts = sorted({event.context for event in trace.of(AutogradNode)})
        if options.context is not None and options.context not in contexts:
            known = ", ".join(map(str, contexts)) or "none (dlearn run --graph records it)"
            missing = f"there is no graph of context {options.context} in this trace"
            raise WrongArguments(f"{missing}; there is {known}.")
        axes = draw.autograd(trace, context=options.context)
    else:
        chosen = {"arrows": True} if options.arrows else {}
        axes = getattr(draw, options.kind)(trace, **chosen)
    if not axes.has_data():
        raise TraceError(f"nothing to draw: {axes.get_label()}")
    with _writing(options.out):
        draw.save(axes, options.out)
    finding = " ".join(axes.get_title("left").split())
    print(f"{options.out}: {finding}")


def export(options: argparse.Namespace) -> None:
    """Export a trace. Raise WrongArguments or SetupError without a folder for the file, TraceError without events."""
    _check_place(options.out)
    trace = load(options)
    if not trace.events:
        raise TraceError(f"nothing was recorded in {trace.path}: there is nothing to export.")
    from dlearn import export  # matplotlib takes a moment
    from dlearn.export.mermaid import files_of

    made = getattr(export, options.format)(trace, options.out)
    files = [*files_of(made, options.out)] if options.format == "mermaid" else [options.out]
    if len(files) > 1:
        print(f"{len(files):,} diagrams: {files[0]} to {files[-1]}")
    else:
        print(f"{files[0]}: {FORMATS[options.format]}")


def _check_place(path: Path) -> None:
    """Raise WrongArguments where no file can be written, before any work is done."""
    try:
        taken = path.exists() and not path.is_file()
    except OSError as error:
        raise WrongArguments(f"{str(path)[:60]}...: {error.strerror}. Give another -o.") from None
    if taken:
        raise WrongArguments(f"{path} is no file that could be replaced. Give another -o.")
    if not path.parent.is_dir():
        raise WrongArguments(f"{path}: there is no folder {path.parent}. Make it, or give another -o.")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}. Give another -o.") from None


if __name__ == "__main__":
    sys.exit(main())
