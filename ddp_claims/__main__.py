"""`python -m ddp_claims --out DIR [DD1 DD6 ...]`."""

import argparse
import os
import sys
from pathlib import Path

from dlearn.errors import DlearnError


def main() -> int:
    os.environ.setdefault("MPLBACKEND", "agg")  # pictures go to files, no window
    from ddp_claims.reproduction import reproduce

    parser = argparse.ArgumentParser(
        prog="python -m ddp_claims",
        description="Run the claims of the paper on DDP on real ranks here; each gets a verdict from what was seen.",
    )
    parser.add_argument("ids", metavar="ID", nargs="*", help="DD1 ... DD17 (default: all)")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="figures, report.md, verdicts.json")
    options = parser.parse_args()
    try:
        report = reproduce(*options.ids, out=options.out)
    except (DlearnError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; the figures so far are in {options.out}", file=sys.stderr)
        return 130
    print(report)
    print(f"({report.seconds:.0f} s; figures and report.md: {options.out})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
