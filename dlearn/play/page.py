"""What the pages of `play` share: scripts and style in one piece, and a file that needs nothing else."""

from __future__ import annotations

import html
import os
from importlib.resources import files
from pathlib import Path

from dlearn.draw.palette import DARK, LIGHT
from dlearn.errors import SetupError


class Page:
    """What a notebook shows, also without a kernel, and what can be a page of its own."""

    title: str
    snippet: str
    """Self-contained HTML, to be put into a page."""

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The same as a page that needs nothing else; written to `path` too, if there is one."""
        return page(self.title, self.snippet, path)


def page(title: str, snippet: str, path: str | os.PathLike[str] | None = None) -> str:
    """A page of its own around a snippet, whose title becomes its heading; written to `path` too, if there is one."""
    headed = snippet.replace('<p class="title">', '<p class="title" role="heading" aria-level="1">', 1)
    made = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title></head>\n<body><main>{headed}</main></body></html>\n"
    )
    if path is not None:
        try:
            Path(path).write_text(made, encoding="utf-8")
        except OSError as error:
            raise SetupError(f"cannot write {path}: {error.strerror}. Choose another place for it.") from None
    return made


def script(*names: str) -> str:
    """These files as one function: nothing in it is seen by the page around it."""
    text = "\n".join(map(_read, names))
    return f"<script>(() => {{\n{text}\n}})();</script>"


def style() -> str:
    """The colours of the other pictures. JupyterLab says whether it is dark; elsewhere the browser does."""
    light, dark = (";".join(f"--{name}:{color}" for name, color in each.items()) for each in (LIGHT, DARK))
    own = f".dlearn-player{{{light}}}\nbody[data-jp-theme-light=false] .dlearn-player{{{dark}}}"
    system = f"@media(prefers-color-scheme:dark){{body:not([data-jp-theme-light]) .dlearn-player{{{dark}}}}}"
    return "\n".join([own, system, _read("player.css")])


def _read(name: str) -> str:
    """A file beside this one, without its indentation and comments: a page may hold it many times."""
    lines = (line.strip() for line in (files("dlearn.play") / name).read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))
