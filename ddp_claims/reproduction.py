"""All claims, one after the other: the report, its files, and the lines that say which one is at work."""

import html
import json
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ddp_claims import verdicts
from ddp_claims.verdicts import Claim, Finding
from dlearn import draw
from dlearn.errors import SetupError
from dlearn.events.this_host import cores

MODULES = "latency message_size round_robin rules skipping"
for module in MODULES.split():
    import_module(f"ddp_claims.{module}")
CLAIMS = tuple(sorted(verdicts.CLAIMS.values(), key=lambda claim: int(claim.id.removeprefix("DD"))))


def claim(id: str) -> Claim:
    """Return the claim of this id; KeyError if there is none."""
    return verdicts.CLAIMS[id]


@dataclass(frozen=True)
class Report:
    """The findings, in the order of the claims, and how long they took; shows itself in a notebook."""

    findings: tuple[Finding, ...]
    seconds: float = 0.0

    def __str__(self) -> str:
        return "\n".join(finding.headline for finding in self.findings)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr style="vertical-align:top"><th scope="row">{each.claim.id}</th>'
            f'<td style="text-align:left">{html.escape(each.claim.says)}</td>'
            f'<td style="text-align:left">{"<br>".join(html.escape(check.seen) for check in each.result.checks)}</td>'
            f'<td style="text-align:left">{each.mark} {html.escape(each.headline.split(": ", 1)[1])}</td></tr>'
            for each in self.findings
        )
        heads = "".join(f'<th scope="col">{each}</th>' for each in ("", "the paper says", "seen here", "verdict"))
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"

    def write(self, folder: Path) -> None:
        """Write `report.md` and `verdicts.json`; the pictures are there already."""
        (folder / "report.md").write_text(self._markdown(), encoding="utf-8")
        found: dict[str, object] = {}
        for each in self.findings:
            checks = [[check.says, check.seen, check.holds] for check in each.result.checks]
            facts = {"verdict": each.verdict, "checks": checks}
            found[each.claim.id] = facts | {"conditions": each.result.conditions}
        (folder / "verdicts.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def _markdown(self) -> str:
        rows = ["| {} | {} |".format(*each.headline.split(": ", 1)) for each in self.findings]
        table = "\n".join(["| claim | verdict |", "|---|---|", *rows])
        parts = ["# The DDP paper, run again", f"({cores()} cores, {self.seconds:.0f} s for all)", table]
        for each in self.findings:
            headline, *told = map(str.strip, str(each).splitlines())
            parts += [f"## {headline}", *told, f"![{each.claim.title}]({picture_name(each.claim)})"]
        return "\n\n".join(parts) + "\n"


def picture_name(claim: Claim) -> str:
    return f"{claim.id.lower()}.svg"


def reproduce(*ids: str, out: Path | str | None = None) -> Report:
    """Run the claims of these ids (default: all), say on stderr which one is at work, and write all into `out`.

    SetupError if an id is unknown.
    """
    known = [claim.id for claim in CLAIMS]
    for each in ids:
        if each not in known:
            raise SetupError(f"there is no claim {each!r}; there are: {', '.join(known)}.")
    claims = [claim for claim in CLAIMS if not ids or claim.id in ids]
    folder = Path(out) if out is not None else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    findings: list[Finding] = []
    for place, claim in enumerate(claims, 1):
        print(f"{place} of {len(claims)}: {claim.id} {claim.title}", file=sys.stderr, flush=True)
        finding = claim.find()
        findings.append(finding)
        if folder is not None and finding.result.picture is not None:
            draw.save(finding.result.picture, folder / picture_name(claim))
    report = Report(tuple(findings), time.monotonic() - start)
    if folder is not None:
        report.write(folder)
    return report
