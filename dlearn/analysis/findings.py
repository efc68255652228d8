"""The titles of pictures: what a picture shows, in one sentence."""

from collections.abc import Sequence
from fractions import Fraction

from dlearn.analysis.volume.traffic import Traffic, WireTraffic, traffic
from dlearn.diagnosis.hang_detection import hangs
from dlearn.diagnosis.hang_report import missing_text, never, report, why_missing, why_stuck
from dlearn.diagnosis.roots import roots
from dlearn.join.ends import End
from dlearn.join.operation_messages import PairSum
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import capital, count_text, listed, size_text
from dlearn.trace import Trace

_PAIRS_SHOWN = 30
_RANKS_NAMED, _LONGEST_FINDING = 4, 70
"""Of so many ranks each is named with what it sends, in so many characters."""


def sequence_finding(trace: Trace) -> str:
    """Describe a hang, else which rank sends how much in how many messages."""
    stuck = hang_title(trace)
    if stuck:
        return stuck
    sent = traffic(trace)
    counts = {pair: count for pair, count in sent.message_count.items() if count}
    total = count_text(sum(counts.values()), "message")
    if counts and not sent.total_bytes:
        return f"{total} without data"
    pattern, of_pairs = _pattern(sent), set(counts.values())
    if pattern and len(of_pairs) == 1 and all(map(sent.payload_bytes.get, counts)):
        return f"{pattern}, in {count_text(of_pairs.pop(), 'message')}"
    # The bytes are a rank's or a pair's; a number of all messages must not look as if it were, too.
    finding = traffic_finding(sent)
    return f"{finding}; {total} in all" if counts else finding


def hang_title(trace: Trace) -> str:
    """Say in a line who waits for whom; `hang_finding` has the whole sentence."""
    first = [] if roots(trace) else report(hangs(trace), trace)[:1]
    brief = "".join(capital(each.brief, each.speaker, trace.labels) for each in first if each.brief)
    return brief or hang_finding(trace)


def hang_finding(trace: Trace) -> str:
    """Name the ranks that hold the others up, else the first hang; nothing where nothing hangs."""
    if found := roots(trace):
        ranks = [*dict.fromkeys(root.rank for root in found)]
        names, hold = trace.labels.listed(ranks), "holds" if len(ranks) == 1 else "hold"
        return capital(f"{names} {hold} the others up", ranks[0], trace.labels)
    first = report(hangs(trace), trace)[:1]
    return "".join(capital(each.sentence, each.speaker, trace.labels) for each in first)


def stuck_reasons(operation: Operation, end: End, trace: Trace) -> tuple[str, ...]:
    """Say why this rank did not come out of its call, the longest text first; nothing if it did."""
    if not (end.pending or end.failed):
        return ()
    if operation.missing:
        brief = why_missing(operation, trace, brief=True)
        return why_missing(operation, trace), brief, missing_text(operation, trace)
    if operation.refused:
        return (f"refused at once: {end.error}", "refused")
    if end.failed and operation.mismatch is None:
        return (f"failed: {end.error}",)
    return (why_stuck(operation, trace),)


def absent_texts(operation: Operation, rank: int, op: str, trace: Trace) -> tuple[str, ...]:
    """Say what a rank never did that was expected of it, the longest text first."""
    but, did, brief = never(operation, rank, trace)
    call = f"called {op} #{operation.seq}"
    did, brief = did or call, brief or call
    texts = [f"{did}, {but}" if but else did, did, brief, call, "called"]
    return tuple(dict.fromkeys(f"never {text}" for text in texts))


def traffic_finding(sent: Traffic) -> str:
    """Name the pattern of the bytes: "Each rank sends 28.9 kB to the rank before it"."""
    if not any(sent.payload_bytes.values()):
        nothing = "No rank sends data" if sent.message_count else "No rank was seen sending anything"
        return "No message is known" if sent.unexplained else nothing
    return _pattern(sent) or _who_sends_most(sent)


def _pattern(sent: Traffic) -> str:
    """Say what each pair of ranks sends, if the pairs form a pattern that has a name."""
    pairs = {pair: size for pair, size in sent.payload_bytes.items() if size}
    names, ranks, size = sent.labels, sent.ranks, _common_size(list(pairs.values()))
    if not size:
        return ""
    senders, receivers = map(sorted, map(set, zip(*pairs, strict=True)))
    first = senders[0]
    if len(pairs) == 1:
        text = f"{names[first]} sends {size} to {names[receivers[0]]}, nothing comes back"
        return capital(text, first, names)
    if len(pairs) == len(ranks) * (len(ranks) - 1):
        others = "the other" if len(ranks) == 2 else "every other rank"
        return f"Each rank sends {size} to {others}"
    around = {"before": (*ranks[-1:], *ranks[:-1]), "after": (*ranks[1:], *ranks[:1])}
    for neighbour, neighbours in around.items():
        if set(pairs) == set(zip(ranks, neighbours, strict=True)):
            times = _times(set(pairs.values()), sent.reduced_bytes, len(ranks))
            return f"Each rank sends {size}{times} to the rank {neighbour} it"
    if len(senders) == 1:
        others = "every other rank" if len(pairs) == len(ranks) - 1 else f"{len(pairs)} ranks"
        return capital(f"{names[first]} sends {size} to {others}", first, names)
    if len(receivers) == 1:
        return f"{len(pairs)} ranks send {size} each to {names[receivers[0]]}"
    return ""


def _who_sends_most(sent: Traffic) -> str:
    names, ranks, total = sent.labels, sent.ranks, size_text(sent.total_bytes)
    from_each = {rank: sent.bytes_from(rank=rank) for rank in ranks}
    of_all = _common_size(list(from_each.values()))
    if of_all:
        return f"Each rank sends {of_all}, {total} in all"
    most = max(from_each.values())
    who = [rank for rank, size in from_each.items() if size == most]
    to_each = {rank: sent.bytes_to(rank=rank) for rank in ranks}
    receiver, largest = max(to_each.items(), key=lambda item: item[1])
    alone = list(to_each.values()).count(largest) == 1
    received = f"{names[receiver]} receives the most: {size_text(largest)} of {total}"
    if alone and largest >= 1.5 * most:  # Several send to one.
        return capital(received, receiver, names)
    if len(who) == 1:
        return capital(f"{names[who[0]]} sends the most: {size_text(most)} of {total}", who[0], names)
    if len(ranks) <= _RANKS_NAMED:
        others = [f"{names[rank]} {size_text(size)}" for rank, size in from_each.items() if size < most]
        text = f"{names.listed(who)} send {size_text(most)} each, {listed(others)}"
        if len(text) <= _LONGEST_FINDING:
            return capital(text, who[0], names)
    if alone:
        return capital(received, receiver, names)
    return f"{len(who)} of {len(ranks)} ranks send the most: {size_text(most)} each"


def pair_sentences(sent: Traffic | WireTraffic) -> list[str]:
    """Write "rank 0 sends rank 1 28.9 kB (derived).", for the pairs that send most first."""
    pairs = sorted(sent.sizes.items(), key=lambda pair: (-pair[1], pair[0]))
    name, sentences = sent.labels, []
    for (src, dst), size in pairs[:_PAIRS_SHOWN]:
        if isinstance(sent, Traffic):
            how = ", partly ".join(sent.known[src, dst])
        else:
            how = f"on the wire, {sent.counted}"
        sentences.append(f"{name[src]} sends {name[dst]} {size_text(size)} ({how}).")
    rest = [size for _, size in pairs[_PAIRS_SHOWN:]]
    if rest:
        sentences.append(f"{count_text(len(rest), 'more pair')}: {size_text(sum(rest))}.")
    never_came = sent.never_came if isinstance(sent, Traffic) else {}
    for (src, dst), size in list(never_came.items())[:_PAIRS_SHOWN]:
        sentences.append(f"{size_text(size)} from {name[src]} to {name[dst]} never came.")
    return sentences


def wire_finding(sent: WireTraffic) -> str:
    """Write "Predicted on the wire: 1.6 kB, framing included"; "measured" of the kernel's count."""
    how = "framing included" if sent.counted == "predicted" else "as the kernel counted it"
    return f"{sent.counted.capitalize()} on the wire: {size_text(sent.total_bytes)}, {how}"


def sizes_text(pairs: Sequence[PairSum]) -> str:
    """Return "135 kB in 8 parts"; "about 135 kB" within 5 %, else "1.20 kB to 4.00 kB"."""
    known = [pair.payload_bytes for pair in pairs if pair.payload_bytes is not None]
    if len(known) < len(pairs):
        return size_text(None)
    least, most = min(known), max(known)
    if least < 0.95 * most:
        return f"{size_text(least)} to {size_text(most)}"
    about = "" if least == most else "about "
    counts = {pair.message_count for pair in pairs}
    parts = f" in {counts.pop()} parts" if len(counts) == 1 and counts != {1} else ""
    return f"{about}{size_text(most)}{parts}"


def pairs_text(pairs: Sequence[PairSum]) -> str:
    """Return "each of 16 to each other, 1.20 kB (derived)"; nothing of no pair."""
    if not pairs:
        return ""
    sources, targets = {pair.src for pair in pairs}, {pair.dst for pair in pairs}
    if not any(pair.payload_bytes for pair in pairs):
        return "no data"
    ranks = len(sources | targets)
    who = f"{len(pairs):,} pairs of {ranks} ranks"
    if len(pairs) == ranks * (ranks - 1):
        who = f"each of {ranks} to each other"
    elif len(sources) == 1:
        who = f"one to each of {len(targets)} others"
    elif len(targets) == 1:
        who = f"each of {len(sources)} to one"
    return f"{who}, {sizes_text(pairs)} ({pairs[0].how})"


def _common_size(sizes: Sequence[int]) -> str:
    """Return the one size of all, within 5 % (a ring's last chunk is smaller); else nothing."""
    least, most = min(sizes, default=0), max(sizes, default=0)
    if least < 0.95 * most or not sizes:
        return ""
    return size_text(most) if least == most else f"about {size_text(round(sum(sizes) / len(sizes)))}"


def _times(sizes: set[int], whole: int, ranks: int) -> str:
    """Return " = 1.5 × 1.00 MB" where all are exactly what a ring sends: once or twice (n-1)/n."""
    ratio = Fraction(min(sizes), whole) if len(sizes) == 1 and whole else Fraction(1)
    if ratio == 1 or ratio * ranks / (ranks - 1) not in (1, 2):
        return ""
    exact = f"{float(ratio):g}" if 1000 % ratio.denominator == 0 else str(ratio)
    return f" = {exact} × {size_text(whole)}"
