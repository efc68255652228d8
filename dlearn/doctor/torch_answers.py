"""The probe's answers (probe.py) as findings, each within its time."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import dlearn
from dlearn.doctor.finding import Finding
from dlearn.doctor.probe import STEPS

PROBE = (sys.executable, "-P", "-m", "dlearn.doctor.probe")
"""With -P a torch.py, or a json.py, in the folder where somebody asks is not taken for the real one."""
QUIET_SECONDS = 2.0
STEP_SECONDS = 30.0
"""For one step. The first loads torch, which takes seconds, and many on a slow disk."""

Answer = dict[str, Any]
"""Of one step: what it found, or an "error"."""


class Probe:
    """The process that is asked. It runs from now on; `answers` are read when they are wanted."""

    def __init__(self, command: Sequence[str] = PROBE, *, step_seconds: float = STEP_SECONDS) -> None:
        self._step_seconds = step_seconds
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=self._errors,
            text=True,
            errors="replace",
            env=_environment(),
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=_pass_on, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()

    def answers(self, tell: Callable[[str], None]) -> Iterator[tuple[str, Answer]]:
        """(step, answer) of every step; of one that ended the process, or takes too long, that is the error."""
        for step in STEPS:
            try:
                line = self._next_line(step, tell)
            except queue.Empty:
                yield step, {"error": f"no answer within {self._step_seconds:g} s"}
                return
            if line is None:
                yield step, {"error": self._last_words()}
                return
            answer = json.loads(line)
            yield step, answer
            if step == "torch" and "error" in answer:
                return  # all the others need it

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._reader.join(timeout=1.0)
        self._errors.close()

    def _next_line(self, step: str, tell: Callable[[str], None]) -> str | None:
        try:
            return self._lines.get(timeout=min(QUIET_SECONDS, self._step_seconds))
        except queue.Empty:
            tell(f"trying {step} (for up to {self._step_seconds:g} s) ...")
            return self._lines.get(timeout=max(0.0, self._step_seconds - QUIET_SECONDS))

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with {status}" + (f": {lines[-1]}" if lines else "")


def _environment() -> dict[str, str]:
    """In which the probe finds the dlearn that asks, wherever that came from."""
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(dlearn.__file__).parent.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _pass_on(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Its lines of JSON, then None."""
    with stream:
        for line in stream:
            if line.startswith("{"):
                lines.put(line)
    lines.put(None)


def findings(probe: Probe, tell: Callable[[str], None]) -> Iterator[Finding]:
    """One of each step, as it is answered. After a step that gave none, the others were not asked."""
    asked = []
    broken = ""
    for step, answer in probe.answers(tell):
        asked.append(step)
        yield judge(step, answer)
        if "error" in answer:
            broken = step
    for step in STEPS:
        if step not in asked:
            yield Finding(step, "not known", f"not asked, because of {broken}", f"see {broken}, then ask again")


def judge(step: str, answer: Answer) -> Finding:
    """What the answer means."""
    if "error" in answer:
        return Finding(step, "missing", _printable(answer["error"]), REMEDIES[step])
    match step:
        case "torch":
            return judge_build(answer["version"], answer["cuda"])
        case "recorder":
            return Finding(step, "ok", "its self-test saw an all_reduce, start and end: dlearn fits this torch")
        case "gloo":
            return _sum(step, answer, 3, "a group of one rank, summed over")
        case "RPC":
            return _sum(step, answer, 6, "a worker on loopback called itself")
        case "socket counters":
            return judge_counters(answer["counted"], answer.get("reason", ""))
        case _:
            return judge_gpu(answer["names"], answer["nccl"])


WITH_CUDA = "for NCCL install this torch's build for CUDA, see pytorch.org/get-started"

REMEDIES = {
    "torch": "python tools/install_torch.py in dlearn's folder, with this Python",
    "recorder": "install the torch that constraints.txt names: python tools/install_torch.py",
    "gloo": "if loopback is ok: python tools/install_torch.py in dlearn's folder brings a torch with gloo",
    "socket counters": "bytes on the wire are not measured; all else works",
    "RPC": "no rpc=True here; process groups work without it",
    "GPU": "look at nvidia-smi; gloo needs no GPU",
}


def judge_build(version: str, cuda: str | None, driver: Path = Path("/proc/driver/nvidia/version")) -> Finding:
    build = f"CUDA {cuda}" if cuda else "no CUDA"
    if cuda is None and driver.exists():
        return Finding("torch", "warning", f"{version}, {build}, beside an NVIDIA driver", WITH_CUDA)
    return Finding("torch", "ok", f"{version}, {build}")


def judge_counters(counted: int | None, reason: str) -> Finding:
    if counted == 1000:
        return Finding("socket counters", "ok", "the kernel counted 1,000 of 1,000 B written (TCP_INFO)")
    found = reason if counted is None else f"the kernel counted {counted:,} of 1,000 B written"
    return Finding("socket counters", "missing", found, REMEDIES["socket counters"])


def judge_gpu(names: Sequence[str], nccl: str | None) -> Finding:
    built_in = f"NCCL {nccl} built in" if nccl else "NCCL not built in"
    if not names:
        return Finding("GPU", "ok", f"no GPU here, and none is needed; {built_in}")
    found = f"{len(names)} x {', '.join(dict.fromkeys(names))}; {built_in}"
    if nccl is None:
        return Finding("GPU", "warning", found, WITH_CUDA)
    return Finding("GPU", "ok", f"{found}; recording over NCCL was never run")


def _sum(step: str, answer: Answer, expected: int, found: str) -> Finding:
    if answer["sum"] == expected:
        return Finding(step, "ok", found)
    return Finding(step, "missing", f"{found}, and got {answer['sum']} where {expected} is right", REMEDIES[step])


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
