"""Make a checkout fit for the package index: README's links become absolute, the metadata names the project's home.

    python tools/for_the_index.py HOME TAG

HOME is the address of the repository, TAG the release that is built, as in v0.1.0. Run by the release workflow in its
own checkout, which knows both; the repository itself holds no address, and so none that could be wrong.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!\w+:)([^)\s]+)\)")  # ![text](target) or [text](target), without https:


def main(root: Path, home: str, tag: str) -> None:
    """Rewrite README.md and pyproject.toml of the checkout."""
    readme, pyproject = root / "README.md", root / "pyproject.toml"
    version = tomllib.loads(pyproject.read_text())["project"]["version"]
    if tag != f"v{version}":
        sys.exit(f"the tag {tag} does not name the version {version} of pyproject.toml")
    readme.write_text(with_absolute_links(readme.read_text(), home, tag))
    with pyproject.open("a") as file:
        file.write(f'\n[project.urls]\nHomepage = "{home}"\nChangelog = "{home}/blob/{tag}/CHANGELOG.md"\n')


def with_absolute_links(text: str, home: str, tag: str) -> str:
    """Pictures by their bytes (raw), files by their page (blob), headings by the project's first page."""

    def absolute(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if target.startswith("#"):
            return f"{words}({home}{target})"
        return f"{picture}{words}({home}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(ROOT, *sys.argv[1:])
