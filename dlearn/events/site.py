"""How a line of code is called: "quickstart.py:14", "In[3]:2"."""

import os
from collections.abc import Mapping


def file_label(file: str, cells: Mapping[str, str], directory: str) -> str:
    """Return a file's name: a cell's, by its file in `cells`, or the path below `directory`."""
    if file in cells:
        return cells[file]
    if file.startswith("<"):  # Made by a program, which may tell of files of its own.
        return file.partition(">")[0] + ">"
    below = os.path.relpath(file, directory) if os.path.isabs(file) else file
    return below if not below.startswith(os.pardir) else os.path.join(*file.split(os.sep)[-2:])
