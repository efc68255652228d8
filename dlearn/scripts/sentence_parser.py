"""An argument parser whose errors are one sentence, with the nearest word that would be right."""

import argparse
import re
from difflib import get_close_matches
from typing import NoReturn

from dlearn.errors import WrongArguments


class SentenceParser(argparse.ArgumentParser):
    """Raises WrongArguments where argparse prints its usage."""

    def error(self, message: str) -> NoReturn:
        wrong, *known = re.findall(r"[\w-]+", message.partition("invalid choice:")[2]) or [""]
        if unknown := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            wrong, known = unknown[1], re.findall(r"--[\w-]+", self.format_help())
        nearest = get_close_matches(wrong, known, 1)
        meant = f"Did you mean {nearest[0]}? " if nearest else ""
        raise WrongArguments(f"{message}. {meant}See {self.prog} --help.")
