"""The RPC agent's own log: taken out of a rank's stderr, where nothing else is lost, and read though it is damaged."""

import os
import zipfile

import frozen_answers
import torch

from dlearn import Cluster, Trace, explain, messages

INFO = b"[I1121 15:47:36.741144657 socket.cpp:1] torch does not show this by itself\n"
WARNING = b"[W1121 15:47:36.741144657 tensorpipe_agent.cpp:723] encountered error when reading\n"
OWN = [b"mine\n", b"half a line ", b"and its end\n", WARNING, b"[", b"[V1121 15:47", b"\n", b"[1/3] done\n", b"[rank"]
OWN += [b"0]: x\n", b"\xff\x00\n", b"y" * 5000 + b"\n", b"no end"]


def speak_between_calls() -> int:
    """Torch writes each line of the log with one call, wherever the program's own line is."""
    import torch.distributed.rpc as rpc

    calls = 0
    for each in OWN:
        os.write(2, each)
        if not each.startswith(b"[") or each.endswith(b"\n"):
            os.write(2, INFO)
            rpc.rpc_sync("callee", torch.add, args=(torch.ones(1), 1))
            calls += 1
    return calls


def test_the_agents_lines_are_taken_out_and_all_else_passes(own_folder):
    run = Cluster(["caller", "callee"], rpc=True).run({"caller": speak_between_calls}, timeout=100)
    assert b"".join(OWN).decode(errors="replace") in run.output["caller"]
    assert "torch does not show this" not in run.output["caller"]
    sent = [each for each in messages(run.trace) if each.op.startswith("SCRIPT_")]
    assert [(each.src, each.dst) for each in sent] == [(0, 1), (1, 0)] * run.results["caller"]
    assert all(each.sent_ns < each.received_ns for each in sent)


def test_damaged_bytes_in_a_log_end_nothing(tmp_path):
    with zipfile.ZipFile(frozen_answers.HERE / "rpc.zip") as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith("00/")])
    whole = Trace.load(tmp_path / "00")
    for path in tmp_path.glob("00/*.agent.log"):
        data = bytearray(path.read_bytes())
        for place in range(0, len(data), 131):  # About a line's length: each byte of a line is met somewhere.
            data[place] = b"\xff\x00 \n"[place % 4]
        path.write_bytes(data[: len(data) * 2 // 3])
    damaged = Trace.load(tmp_path / "00")
    assert (damaged.ranks, damaged.labels) == (whole.ranks, whole.labels)
    assert 0 < len([each for each in messages(damaged) if each.received_ns]) <= len(messages(whole))
    assert "residue" in str(explain(damaged)), "of what it still knows"
