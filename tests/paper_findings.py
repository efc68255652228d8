"""What must hold of every finding on the DDP paper, whatever the machine does meanwhile, and of however few samples."""

from ddp_claims import Finding

EXACT = {"DD1": 0, "DD4": 2, "DD8": 0, "DD9": 2, "DD12": 5, "DD13": 0, "DD17": 0}
"""Of a claim about times or losses: so many checks, the first ones, that no other program on this machine can spoil."""
UNTESTED = {"DD7": 1, "DD16": 1}
"""Checks that need more machines, or GPUs. All other claims are confirmed by bytes, counts and orders."""


def check_finding(found: Finding) -> None:
    checks, name = found.result.checks, found.claim.id
    assert found.result.picture is not None
    if name == "DD2":  # ready in the reverse of registration; what is said of their times has its samples
        orders = [check for check in checks if "registration" in check.says]
        assert [check.holds for check in orders] == [True] * 3
        assert "ready: fc2.bias, fc2.weight, fc1.bias, fc1.weight, conv2.weight, conv1.weight" in orders[0].seen
        assert "94.6% of all pairs" in orders[2].seen
    elif name not in EXACT:
        assert found.verdict == ("partly tested" if name in UNTESTED else "confirmed"), found
        assert len(found.untested) == UNTESTED.get(name, 0), found
    else:
        assert all(check.holds for check in checks[: EXACT[name]]), found
        for check in checks[EXACT[name] :] if name not in ("DD12", "DD13") else ():
            sampled = ("n = ", "resamples", "doublings")
            assert check.holds is None or any(word in check.seen for word in sampled), check
