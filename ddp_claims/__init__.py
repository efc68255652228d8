"""The paper on DDP (Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704) on this machine, with a verdict each.

    python -m ddp_claims --out DIR

runs five claims on real ranks and writes the figures, the report and the verdicts. The lessons on DDP test the others.
"""

from ddp_claims.reproduction import CLAIMS, Report, claim, reproduce
from ddp_claims.verdicts import Check, Claim, Finding, Result

__all__ = ["CLAIMS", "Check", "Claim", "Finding", "Report", "Result", "claim", "reproduce"]
