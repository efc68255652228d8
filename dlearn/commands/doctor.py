"""`dlearn doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from dlearn.doctor.examination import examine, lacking
from dlearn.doctor.machine import Finding
from dlearn.errors import SetupError

NAME_WIDTH, VERDICT_WIDTH = len("socket counters"), len("not known")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one object: can_record, and all findings")


def run(options: argparse.Namespace) -> None:
    """Raises SetupError where no job can be recorded here."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not options.json:
            print(line_of(finding), flush=True)
    missing = lacking(findings)
    if options.json:
        print(json.dumps({"can_record": not missing, "findings": [asdict(each) for each in findings]}, indent=2))
    if missing:
        raise SetupError(f"no job can be recorded on this machine; what it lacks, above: {', '.join(missing)}.")
    if not options.json:
        print("\nJobs can be recorded on this machine.")


def line_of(finding: Finding) -> str:
    """The remedy stands where one is needed, below."""
    line = f"{finding.name:<{NAME_WIDTH}}  {finding.verdict:<{VERDICT_WIDTH}}  {finding.found}"
    indent = " " * (NAME_WIDTH + VERDICT_WIDTH + 4)
    return f"{line}\n{indent}try: {finding.remedy}" if finding.remedy else line
