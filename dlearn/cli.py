"""The command `dlearn`. Each command is a function that takes the parsed arguments; errors become one sentence."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dlearn import __version__, doctor
from dlearn.commands import draw, explain, export, messages
from dlearn.errors import DlearnError, SetupError, WrongArguments
from dlearn.scripts.command import run

FAILED = 1
WRONG = 2  # argparse's, too
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argparse itself exits with 2 where the arguments are wrong."""
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        if arguments[:1] == ["run"]:
            return run(arguments[1:])  # Its arguments are torchrun's, and the script's.
        options = parser().parse_args(arguments)
        options.command(options)
        sys.stdout.flush()
    except WrongArguments as error:
        print(f"dlearn: {error}", file=sys.stderr)
        return WRONG
    except DlearnError as error:
        print(f"dlearn: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who reads us (`| head`) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return 0


def parser() -> argparse.ArgumentParser:
    """A new command is a subparser with `set_defaults(command=function)`."""
    top = argparse.ArgumentParser(
        prog="dlearn", description="See who sent what to whom, and how many bytes it was, in torch.distributed."
    )
    top.add_argument("--version", action="version", version=f"dlearn {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    text = "train on handwritten digits on three ranks; tell and draw who sent what to whom"
    demo_parser = commands.add_parser("demo", help=text, description=f"{text[0].upper()}{text[1:]}.")
    demo_parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("demo-out"),
        help="folder for the files; those of the same name in it are replaced (default: %(default)s)",
    )
    demo_parser.set_defaults(command=demo)

    # Only for the list of commands: `main` hands it on before.
    commands.add_parser("run", help="run a script that knows nothing of dlearn, by torchrun or alone, and record it")

    for name, module, text in (
        ("doctor", doctor, "say what works on this machine, and what to do about the rest"),
        (
            "explain",
            explain,
            "say in words what a trace holds: who sent what to whom, who died where, who waits for whom",
        ),
        ("messages", messages, "print every message of a trace: from, to, bytes, when, what"),
        ("draw", draw, "draw a trace and save the picture"),
        ("export", export, "write a trace for Perfetto or Mermaid, as a page to step through, or as a GIF"),
    ):
        made = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        module.arguments(made)
        made.set_defaults(command=module.run)
    return top


def demo(options: argparse.Namespace) -> None:
    make_folder(options.out)
    os.environ.setdefault("MPLBACKEND", "agg")  # pictures go to files, no window
    from dlearn.lessons import demo

    demo.run(options.out, tell=lambda line: print(line, flush=True))


def make_folder(folder: Path) -> None:
    """SetupError in words, before any work is done, if this is no place for files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"the folder {folder} cannot be made: {error.strerror}. Give another --out.") from None


if __name__ == "__main__":
    sys.exit(main())
