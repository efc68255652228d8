"""Files of pages and exports: all of one call are written, or none."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from dlearn.errors import SetupError

Place = str | os.PathLike[str] | None  # Where a file is to be; None: nowhere.
Content = Iterable[str] | Iterable[bytes]  # What stands in a file, in pieces.


def write(files: Mapping[Path, Content]) -> None:
    """Write each file beside its place, then move all there. SetupError where one cannot be."""
    unfinished = {path: path.with_name(f".{path.name[:100]}.{os.getpid()}.part") for path in files}
    try:
        for path, pieces in files.items():
            with unfinished[path].open("wb") as file:
                file.writelines(each if isinstance(each, bytes) else each.encode() for each in pieces)
        for path, part in unfinished.items():
            part.replace(path)
    except OSError as error:
        where = f"cannot write {', '.join(map(str, files))}"
        raise SetupError(f"{where}: {error.strerror}. Choose another place for it.") from None
    finally:
        for part in unfinished.values():
            part.unlink(missing_ok=True)
