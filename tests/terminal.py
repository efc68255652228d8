"""A terminal for tests: it runs a command, and says what stands on its screen."""

from __future__ import annotations

import codecs
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence

_PIECE = re.compile(r"\0337|\0338|\033\[([0-9;]*)([A-Za-z])|[^\033]", re.DOTALL)


class Screen:
    """Understands what we write: letters, new lines, ways of the cursor, and a region that scrolls."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.width, self.height = width, height
        self.rows = [[" "] * width for _ in range(height)]
        self.row = self.column = 0
        self._saved = (0, 0)
        self._top, self._bottom = 0, height - 1

    def write(self, text: str) -> None:
        for piece in _PIECE.finditer(text):
            whole, numbers, command = piece[0], piece[1], piece[2]
            if command:
                self._obey(command, [int(each) for each in (numbers or "").split(";") if each])
            elif whole == "\0337":
                self._saved = (self.row, self.column)
            elif whole == "\0338":
                self.row, self.column = self._saved
            elif whole == "\r":
                self.column = 0
            elif whole == "\n":
                self._down()
            else:
                if self.column == self.width:
                    self.column = 0
                    self._down()
                self.rows[self.row][self.column] = whole
                self.column += 1

    def _down(self) -> None:
        if self.row == self._bottom:
            self.rows.insert(self._bottom + 1, [" "] * self.width)
            del self.rows[self._top]
        else:
            self.row = min(self.row + 1, self.height - 1)

    def _obey(self, command: str, numbers: list[int]) -> None:
        match command:
            case "H":
                self.row, self.column = (each - 1 for each in (numbers or [1, 1]))
            case "K":
                self.rows[self.row][self.column :] = [" "] * (self.width - self.column)
            case "A":
                self.row = max(0, self.row - (numbers or [1])[0])
            case "r":
                self._top, self._bottom = (each - 1 for each in (numbers or [1, self.height]))
                self.row = self.column = 0

    def __str__(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self.rows).rstrip("\n")


def run_in_terminal(
    command: Sequence[str], look: Callable[[str], object], *, width: int = 80, height: int = 24, **options: object
) -> tuple[int, Screen]:
    """Run it, and show `look` the screen after all that is written on it; its exit status, and the last screen."""
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    process = subprocess.Popen(
        [sys.executable, *command], stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True, **options
    )
    os.close(terminal)
    screen, decode = Screen(width, height), codecs.getincrementaldecoder("utf-8")().decode
    while True:
        try:
            came = os.read(master, 65536)
        except OSError:  # The last process of this terminal has ended.
            break
        screen.write(decode(came))
        look(str(screen))
    os.close(master)
    return process.wait(timeout=60), screen
