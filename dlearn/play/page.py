"""The format of every page of `play`: HTML that needs nothing else, with one packed block of data."""

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dlearn.draw.palette import DARK, LIGHT, LINES
from dlearn.draw.save import closed_after, svg_of
from dlearn.errors import optional
from dlearn.events.event_table import Column
from dlearn.play.writing import Place, write
from dlearn.trace import Trace

_SCRIPTS = {
    "player": ("elements.js", "pictures.js", "stage.js", "player.js"),
    "strip": ("elements.js", "strip_calls.js", "strip_run.js", "strip.js"),
    "paused": ("elements.js", "pictures.js", "stage.js", "paused.js"),
}


class Page:
    """What a notebook shows, also without a kernel, and what can be a page of its own."""

    title: str
    snippet: str  # Self-contained HTML, to be put into a page.

    def to_html(self, path: Place = None) -> str:
        """Return a page that needs nothing else; write it to `path` too, if there is one."""
        return page(self.title, self.snippet, path)


def page(title: str, snippet: str, path: Place = None) -> str:
    """Return a page around a snippet, whose title is its heading; SetupError as of `write`."""
    heading = '<p class="title" role="heading" aria-level="1">'
    headed = snippet.replace('<p class="title">', heading, 1)
    made = render("page.html", title=title, content=Markup(headed))
    if path is not None:
        write({Path(path): [made]})
    return made


def still(picture: Callable[[Trace], Any], trace: Trace) -> str:
    """Return a drawing as an `<img>`, which notebooks that are not trusted keep."""
    with closed_after():
        axes = picture(trace)
        data = "data:image/svg+xml;base64," + base64.b64encode(svg_of(axes).encode()).decode()
    made = Markup('<img class="still" data-view="{}" alt="{}" src="{}">')
    return made.format(picture.__name__, axes.get_label(), data)


def pack(facts: Mapping[str, Any], columns: Mapping[str, Column]) -> str:
    """Return facts and columns of numbers as text that any page can hold.

    It is the JSON's length, the JSON, and each number of the columns in four bytes, compressed by
    zlib, in base64; the JSON's `columns` has their lengths. elements.js unpacks it.
    """
    lengths = {name: len(column) for name, column in columns.items()}
    text = json.dumps({**facts, "columns": lengths}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    numbers = [column.astype("<i4").tobytes() for column in columns.values()]
    block = b"".join([np.array([len(text)], "<i4").tobytes(), text, *numbers])
    return base64.b64encode(zlib.compress(block, level=6)).decode()


def name_for(title: str, data: str) -> str:
    """Return a name that two pages share only if they show the same."""
    return hashlib.sha256(f"{title}{data}".encode()).hexdigest()[:8]


def frame(kind: str, name: str, title: str, data: str, **facts: Any) -> str:
    """Return the HTML of a page's snippet: the template `kind` of these facts, `data` and scripts."""
    script = "\n".join(map(_read, _SCRIPTS[kind]))
    trusted: dict[str, Any] = {"style": Markup(_style()), "script": Markup(script), "data": data}
    return render(f"{kind}.html", kind=kind, name=name, title=title, **trusted, **facts)


def render(template: str, *, package: str = "dlearn.play", **facts: object) -> str:
    """Return a template of this package with these facts; what is no Markup is escaped."""
    return _templates(package).get_template(template).render(facts)


@cache
def _templates(package: str) -> Environment:
    loader = ChoiceLoader([PackageLoader(package), PackageLoader("dlearn.play")])
    return Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)


def _style() -> str:
    """Return the colours and dashes of the other pictures, and player.css."""
    # JupyterLab says whether it is dark; elsewhere the browser does.
    light, dark = _variables(LIGHT), _variables(DARK)
    night = "@media(prefers-color-scheme:dark)"
    lines = [
        f".dlearn-player{{{light}}}",
        f"body[data-jp-theme-light=false] .dlearn-player{{{dark}}}",
        f"{night}{{body:not([data-jp-theme-light]) .dlearn-player{{{dark}}}}}",
        _read("player.css"),
    ]
    for how, line in LINES.items():
        if not isinstance(line, str):
            dashes = " ".join(str(1.5 * length) for length in line[1])
            lines.append(f".dlearn-player .{how}{{stroke-dasharray:{dashes}}}")
    return "\n".join(lines)


def _variables(colors: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{color}" for name, color in colors.items())


def _read(name: str) -> str:
    """Return a file beside this one without its indentation and comments."""
    text = (files("dlearn.play") / name).read_text(encoding="utf-8")
    lines = map(str.strip, text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def widget(name: str, state: Any, *, needed_by: str) -> Any:
    """Return Python's end of bridge.js, which shares `state`. SetupError without anywidget."""
    anywidget = optional("anywidget", needed_by=needed_by)
    import traitlets

    class BridgeWidget(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        _esm = (files("dlearn.play") / "bridge.js").read_text(encoding="utf-8")
        name = traitlets.Unicode().tag(sync=True)
        state = traitlets.Any().tag(sync=True)

    return BridgeWidget(name=name, state=state)
