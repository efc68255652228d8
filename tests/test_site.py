"""The site: every link of it leads somewhere without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_is_built_and_every_link_of_it_leads_somewhere(tmp_path):
    pytest.importorskip("myst_nb", reason="this needs the dependency group `site`")
    out = tmp_path / "out"
    subprocess.run([sys.executable, ROOT / "course" / "make_site.py", "--out", out], check=True)
    pages = {page: page.read_text() for page in (out / "html").rglob("*.html")}
    assert len(pages) > 45
    for page, text in pages.items():
        assert "tag_answer" not in text, "an answer is in sight"
        assert not re.findall(r'<(?:script|img|iframe)[^>]*src="https?:', text), page
        assert not re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="https?:', text), page
        for target in re.findall(r'<a [^>]*href="([^"]+)"', text):
            if "://" in target or target.startswith(("mailto:", "data:")):
                continue
            file, _, heading = unquote(target).partition("#")
            led_to = (page.parent / file).resolve() if file else page
            assert led_to.exists(), (page.name, target)
            if heading and led_to in pages:
                assert f'id="{heading}"' in pages[led_to], (page.name, target)
