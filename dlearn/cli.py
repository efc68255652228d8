"""The command `dlearn`. Each command is a function that takes the parsed arguments; errors become one sentence."""

from __future__ import annotations

import argparse
import io
import os
import sys
import webbrowser
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dlearn import doctor
from dlearn.analysis.telling.explanations import explain as explanation
from dlearn.analysis.volume.message_lines import csv_lines, json_lines, text_lines
from dlearn.errors import DlearnError, SetupError, TraceError, WrongArguments
from dlearn.events import readers
from dlearn.events.event import AutogradNode
from dlearn.join.message_evidence import messages as messages_of
from dlearn.scripts.command import run
from dlearn.trace import Trace
from dlearn.version import __version__

FAILED = 1
WRONG = 2  # argparse's, too
INTERRUPTED = 130  # 128 + SIGINT, as shells count

PICTURES = (
    *("autograd", "breakdown", "buckets", "memory", "sequence"),
    *("steps", "timeline", "topology", "traffic", "traffic_graph"),
)
"""The drawings that need a trace and nothing else."""

FORMATS = ("gif", "html", "mermaid", "perfetto")
"""The functions of `dlearn.export` that need a trace and nothing else."""

MARKDOWN = (".md", ".markdown")

File = tuple[Path, Iterable[str] | Iterable[bytes]]
"""Its place, and what stands in it, in pieces."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code. argparse itself exits with 2 where the arguments are wrong."""
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        if arguments[:1] == ["run"]:
            return run(arguments[1:])  # Its arguments are torchrun's, and the script's.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: Latin-1 lacks our arrows
        if not arguments:
            parser().print_help()
            return WRONG
        options = parser().parse_args(arguments)
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


_TRACE = "its folder, with one .jsonl file per process (of several hosts, the folder from each), or what import takes"


# What each takes ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Make the parser; a new command is a subparser with `set_defaults(command=function)`."""
    top = argparse.ArgumentParser(
        prog="dlearn", description="See who sent what to whom, and how many bytes it was, in torch.distributed."
    )
    top.add_argument("--version", action="version", version=f"dlearn {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    made: dict[str, argparse.ArgumentParser] = {}
    for command, text in (
        (demo, "train on handwritten digits on three ranks; tell and draw who sent what to whom"),
        # Only for the list of commands: `main` hands it on before.
        (run, "run a script that knows nothing of dlearn, by torchrun or alone, and record it"),
        (doctor.doctor, "say what works on this machine, and what to do about the rest"),
        (explain, "say in words what a trace holds: who sent what to whom, who died where, who waits for whom"),
        (messages, "print every message of a trace: from, to, bytes, when, what"),
        (import_, "make a trace of other tools' files: of torch's Flight Recorder or profiler, NCCL's log, OTF2"),
        (scrub, "write a trace again without hosts, paths and names, so that it can be sent"),
        (draw, "draw a trace and save the picture"),
        (export, "write a trace for Perfetto or Mermaid, as a page to step through, or as a GIF"),
        (lessons, "for a teacher: grade a folder of submissions, or count what a class predicted"),
    ):
        name = command.__name__.rstrip("_")
        made[name] = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        made[name].set_defaults(command=command)
    where = "folder for the files; those of the same name in it are replaced (default: %(default)s)"
    made["demo"].add_argument("--out", metavar="DIR", type=Path, default="demo-out", help=where)
    made["doctor"].add_argument("--json", action="store_true", help="one object: can_record, and all findings")
    made["draw"].add_argument("kind", metavar="KIND", choices=PICTURES, help=", ".join(PICTURES))
    made["export"].add_argument("format", metavar="FORMAT", choices=FORMATS, help=", ".join(FORMATS))
    restarted = "of a job that was restarted; from 0 (default: the last)"
    for name in ("explain", "messages", "draw", "export"):
        made[name].add_argument("trace", metavar="TRACE", nargs="+", help=_TRACE)
        made[name].add_argument("--attempt", metavar="N", type=int, help=restarted)
        made[name].add_argument("--within", metavar="SPAN", help='only what belongs to this span, as "step 3"')
    for name in ("import", "scrub"):
        add = made[name].add_argument
        add("files", metavar="PATH", nargs="+", type=Path, help="a file, or a folder or .tar.gz of them")
        add("-o", "--out", metavar="DIR", type=Path, required=True, help="the new folder of the trace")
    form = made["messages"].add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one array; times in ns, sizes in bytes")
    form.add_argument("--csv", action="store_true", help="the same fields")
    _add_out(made["draw"], "a .svg, .pdf or .png; a file of that name is replaced")
    made["draw"].add_argument("--context", metavar="ID", type=int, help="of distributed autograd (default: the last)")
    _add_out(
        made["export"], "a file of that name is replaced; of mermaid a .md holds all diagrams, else each has a file"
    )
    kinds = made["lessons"].add_subparsers(metavar="WHAT", dest="what", required=True)
    stats = kinds.add_parser("stats", help="what a class predicted, without names")
    stats.add_argument("folder", metavar="FOLDER", help="with all students' dlearn-predictions.json below it")
    grade = kinds.add_parser("grade", help="grade each .py of a folder by an exercise; one line of CSV each")
    grade.add_argument("exercise", metavar="EXERCISE", help='as `lessons.check` names it: "ring"')
    grade.add_argument("folder", metavar="FOLDER", type=Path, help="STUDENT.py each, with a function of that name")
    grade.add_argument("--function", metavar="NAME", help="the function's name (default: the exercise's)")
    grade.add_argument("--seconds", metavar="N", type=float, default=120.0, help="for each (default: %(default)g)")
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
    print(explanation(_load(options, tell_problems=False)))


def lessons(options: argparse.Namespace) -> None:
    from dlearn import lessons

    if options.what == "stats":
        print(lessons.stats(options.folder))
        return
    for line in lessons.grade(options.exercise, options.folder, function=options.function, seconds=options.seconds):
        print(line, flush=True)


def messages(options: argparse.Namespace) -> None:
    found = messages_of(_load(options))
    lines = json_lines if options.json else csv_lines if options.csv else text_lines
    for line in lines(found):
        print(line)
    if found.unexplained and lines is not text_lines:  # the text ends with it
        print(f"dlearn: {found}", file=sys.stderr)


def import_(options: argparse.Namespace) -> None:
    """Write other tools' files as a trace, and say what it is."""
    _new_folder(options.out)
    for left_out in readers.translate(options.files, options.out):
        print(f"dlearn: {left_out}", file=sys.stderr)
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
    trace = _load(options)
    if options.kind == "autograd":
        contexts = sorted({event.context for event in trace.of(AutogradNode)})
        if options.context is not None and options.context not in contexts:
            known = ", ".join(map(str, contexts)) or "none (dlearn run --graph records it)"
            missing = f"there is no graph of context {options.context} in this trace"
            raise WrongArguments(f"{missing}; there is {known}.")
        axes = draw.autograd(trace, context=options.context)
    else:
        axes = getattr(draw, options.kind)(trace)
    if not axes.has_data():
        print(f"dlearn: nothing to draw: {axes.get_label()}", file=sys.stderr)
    with _writing(options.out):
        draw.save(axes, options.out)


def export(options: argparse.Namespace) -> None:
    """Export a trace. Raise WrongArguments or SetupError without a folder for the file, TraceError without events."""
    _check_place(options.out)
    trace = _load(options)
    if not trace.events:
        raise TraceError(f"nothing was recorded in {trace.path}: there is nothing to export.")
    wanted = _files_of(options.format, trace, options.out)
    with _writing(options.out):
        write(wanted)
    if [path for path, _ in wanted] != [options.out]:
        print(f"{len(wanted):,} diagrams: {wanted[0][0]} to {wanted[-1][0]}")


def _files_of(form: str, trace: Trace, path: Path) -> Sequence[File]:
    """Return the files to write: of several diagrams of Mermaid one each, or one of Markdown with all."""
    from dlearn import export  # matplotlib takes a moment

    if form == "gif":
        return [(path, [export.gif(trace)])]
    made = getattr(export, form)(trace)
    if form != "mermaid":
        return [(path, [made] if isinstance(made, str) else made)]
    diagrams: Sequence[str] = made
    if path.suffix.lower() in MARKDOWN:
        return [(path, [f"```mermaid\n{diagram}```\n\n" for diagram in diagrams])]
    if len(diagrams) == 1:
        return [(path, diagrams)]
    return [(path.with_stem(f"{path.stem}-{number}"), [text]) for number, text in enumerate(diagrams, 1)]


def write(wanted: Sequence[File]) -> None:
    """Write all of them or none: each beside its place, and moved there when all are done."""
    unfinished = {path: path.with_name(f".{path.name[:100]}.{os.getpid()}.part") for path, _ in wanted}
    try:
        for path, pieces in wanted:
            with unfinished[path].open("wb") as file:
                file.writelines(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)
        for path, part in unfinished.items():
            part.replace(path)
    finally:
        for part in unfinished.values():
            part.unlink(missing_ok=True)


# The trace and the file that were asked for ---------------------------------------------------------------------------


def _load(options: argparse.Namespace, *, tell_problems: bool = True) -> Trace:
    """Load what was asked for; what is damaged or missing in it goes to stderr."""
    trace = Trace.load(*options.trace, attempt=options.attempt)
    for problem in trace.problems if tell_problems else ():
        print(f"dlearn: {problem}", file=sys.stderr)
    if options.within is None:
        return trace
    try:
        return trace.within(options.within)
    except TraceError as error:
        hint = "" if trace.spans else ". dlearn run --steps A:B makes a span of each step"
        raise WrongArguments(f"{error}{hint}") from None


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
