"""The paper on DDP (Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704) on this machine, with a verdict each.

    python -m dlearn.lessons.ddp_paper --out DIR

runs all eighteen claims on real ranks and writes the figures, the report and the verdicts.
"""

from dlearn.lessons.ddp_paper.catalogue import CLAIMS, claim
from dlearn.lessons.ddp_paper.reproduction import Report, reproduce
from dlearn.lessons.ddp_paper.verdicts import Check, Claim, Finding, Result

__all__ = ["CLAIMS", "Check", "Claim", "Finding", "Report", "Result", "claim", "reproduce"]
