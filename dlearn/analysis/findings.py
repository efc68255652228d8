"""What a picture shows, in words: its title. Bytes and times are rounded to three digits here, and only here."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from dlearn.analysis.hanging.hang_words import (
    listed,
    missing_text,
    never,
    tell,
    why_missing,
    why_stuck,
)
from dlearn.analysis.hanging.roots import roots, roots_title
from dlearn.analysis.hanging.stuck import hangs
from dlearn.analysis.volume.traffic import Traffic, WireTraffic, traffic
from dlearn.join.ends import End
from dlearn.join.operation_messages import PairSum
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import RankNames, count_text
from dlearn.trace import Trace

_PAIRS_TOLD = 30
_RANKS_NAMED, _LONGEST_FINDING = 4, 70
"""Of so many each is told what it sends, in so many characters."""
_MOST_PARTS = 64
"""A fraction with a larger denominator says less than the two numbers."""


def sequence_finding(trace: Trace) -> str:
    """A hang, else who sends how much in how many messages."""
    stuck = hang_finding(trace)
    if stuck:
        return stuck
    sent = traffic(trace)
    counts = {pair: count for pair, count in sent.message_count.items() if count}
    if counts and not sent.total_bytes:
        return f"{count_text(sum(counts.values()), 'message')} without data"
    told, each = _pattern(sent), set(counts.values())
    if told and len(each) == 1 and all(map(sent.payload_bytes.get, counts)):
        return f"{told}, in {count_text(each.pop(), 'message')}"
    # The bytes are a rank's or a pair's; a number of all messages must not look as if it were, too.
    return traffic_finding(sent) + (f"; {count_text(sum(counts.values()), 'message')} in all" if counts else "")


def hang_finding(trace: Trace) -> str:
    """Who holds the others up, else the first hang; nothing where nothing hangs."""
    if title := roots_title(trace):
        return capital(title, roots(trace)[0].rank, trace.labels)
    told = tell(hangs(trace), trace)[:1]
    return "".join(capital(sentence, speaker, trace.labels) for speaker, sentence, _ in told)


def stuck_reasons(operation: Operation, end: End, trace: Trace) -> tuple[str, ...]:
    """Why this rank did not come out of its call, in the words of the hang, the longest first; nothing if it did."""
    if not (end.pending or end.failed):
        return ()
    if operation.missing:
        return (
            why_missing(operation, trace),
            why_missing(operation, trace, brief=True),
            missing_text(operation, trace),
        )
    if operation.refused:
        return (f"refused at once: {end.error}", "refused")
    return (f"failed: {end.error}" if end.failed and operation.misfit is None else why_stuck(operation, trace),)


def absent_texts(operation: Operation, rank: int, op: str, trace: Trace) -> tuple[str, ...]:
    """What a rank never did that was expected of it, in the same words, the longest first."""
    but, did, brief = never(operation, rank, trace)
    call = f"called {op} #{operation.seq}"
    did, brief = did or call, brief or call
    told = [did + f", {but}" if but else did, did, brief, call, "called"]
    return tuple(dict.fromkeys(f"never {each}" for each in told))


def traffic_finding(sent: Traffic) -> str:
    """The pattern of the bytes: "Each rank sends 28.9 kB to the rank before it"."""
    if not any(sent.payload_bytes.values()):
        nothing = "No rank sends data" if sent.message_count else "No rank was seen sending anything"
        return "No message is known" if sent.unexplained else nothing
    return _pattern(sent) or _who_sends_most(sent)


def _pattern(sent: Traffic) -> str:
    """What each pair of ranks that sends sends, if these form a pattern that has a name."""
    pairs = {pair: size for pair, size in sent.payload_bytes.items() if size}
    names, ranks, alike = sent.labels, sent.ranks, _alike(list(pairs.values()))
    senders, receivers = sorted({src for src, _ in pairs}), sorted({dst for _, dst in pairs})
    if not alike:
        return ""
    if len(pairs) == 1:
        told = f"{names[senders[0]]} sends {alike} to {names[receivers[0]]}, nothing comes back"
        return capital(told, senders[0], names)
    if len(pairs) == len(ranks) * (len(ranks) - 1):
        return f"Each rank sends {alike} to {'the other' if len(ranks) == 2 else 'every other rank'}"
    for step, neighbour in ((-1, "before"), (1, "after")):
        if set(pairs) == {(rank, ranks[(place + step) % len(ranks)]) for place, rank in enumerate(ranks)}:
            times = _times(set(pairs.values()), sent.reduced_bytes)
            return f"Each rank sends {alike}{times} to the rank {neighbour} it"
    if len(senders) == 1:
        others = "every other rank" if len(pairs) == len(ranks) - 1 else f"{len(pairs)} ranks"
        return capital(f"{names[senders[0]]} sends {alike} to {others}", senders[0], names)
    return f"{len(pairs)} ranks send {alike} each to {names[receivers[0]]}" if len(receivers) == 1 else ""


def _who_sends_most(sent: Traffic) -> str:
    names, ranks = sent.labels, sent.ranks
    from_each = {rank: sent.bytes_from(rank=rank) for rank in ranks}
    all_alike = _alike(list(from_each.values()))
    if all_alike:
        return f"Each rank sends {all_alike}, {size_text(sent.total_bytes)} in all"
    most = max(from_each.values())
    who = [rank for rank, size in from_each.items() if size == most]
    if len(who) > 1 and len(ranks) <= _RANKS_NAMED:
        each = [f"{names[rank]} {size_text(size)}" for rank, size in from_each.items() if size < most]
        told = f"{listed([names[rank] for rank in who])} send {size_text(most)} each, {listed(each)}"
        if len(told) <= _LONGEST_FINDING:
            return capital(told, who[0], names)
    to_each = {rank: sent.bytes_to(rank=rank) for rank in ranks}
    receiver = max(to_each, key=lambda rank: to_each[rank])
    if len(who) > 1 and list(to_each.values()).count(to_each[receiver]) == 1:
        told = f"{names[receiver]} receives the most: {size_text(to_each[receiver])} of {size_text(sent.total_bytes)}"
        return capital(told, receiver, names)
    if len(who) > 1:
        return f"{len(who)} of {len(ranks)} ranks send the most: {size_text(most)} each"
    told = f"{names[who[0]]} sends the most: {size_text(most)} of {size_text(sent.total_bytes)}"
    return capital(told, who[0], names)


def pair_sentences(sent: Traffic | WireTraffic) -> list[str]:
    """ "rank 0 sends rank 1 28.9 kB (derived).", those that send most first."""
    pairs = sorted(sent.sizes.items(), key=lambda pair: (-pair[1], pair[0]))
    told = []
    for (src, dst), size in pairs[:_PAIRS_TOLD]:
        known = sent.known[src, dst] if isinstance(sent, Traffic) else (f"on the wire, {sent.counted}",)
        told.append(f"{sent.labels[src]} sends {sent.labels[dst]} {size_text(size)} ({', partly '.join(known)}).")
    rest = pairs[_PAIRS_TOLD:]
    if rest:
        told.append(f"{count_text(len(rest), 'more pair')}: {size_text(sum(size for _, size in rest))}.")
    missing = list(sent.never_came.items())[:_PAIRS_TOLD] if isinstance(sent, Traffic) else []
    return told + [
        f"{size_text(size)} from {sent.labels[src]} to {sent.labels[dst]} never came." for (src, dst), size in missing
    ]


def sizes_text(pairs: Sequence[PairSum]) -> str:
    """ "135 kB in 8 parts"; "about 135 kB" within 5 %, else "1.20 kB to 4.00 kB"."""
    known = [pair.payload_bytes for pair in pairs if pair.payload_bytes is not None]
    if len(known) < len(pairs):
        return size_text(None)
    least, most = min(known), max(known)
    if least < 0.95 * most:
        return f"{size_text(least)} to {size_text(most)}"
    counts = {pair.message_count for pair in pairs}
    parts = f" in {counts.pop()} parts" if len(counts) == 1 and counts != {1} else ""
    return (size_text(most) if least == most else f"about {size_text(most)}") + parts


def in_words(pairs: Sequence[PairSum]) -> str:
    """ "each of 16 to each other, 1.20 kB (derived)"; nothing of none."""
    sources, targets = {pair.src for pair in pairs}, {pair.dst for pair in pairs}
    if not pairs:
        return ""
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


def _alike(sizes: Sequence[int]) -> str:
    """The one size that all these are, within 5 % (a ring's last chunk is smaller); nothing if they differ more."""
    least, most = min(sizes, default=0), max(sizes, default=0)
    if least < 0.95 * most or not sizes:
        return ""
    return size_text(most) if least == most else f"about {size_text(round(sum(sizes) / len(sizes)))}"


def _times(sizes: set[int], whole: int) -> str:
    """ " = 1.5 × 1.00 MB", where that is exact; nothing else."""
    ratio = Fraction(min(sizes), whole) if len(sizes) == 1 and whole else Fraction(1)
    if ratio == 1 or ratio.denominator > _MOST_PARTS:
        return ""
    exact = f"{float(ratio):g}" if 1000 % ratio.denominator == 0 else str(ratio)
    return f" = {exact} × {size_text(whole)}"


def size_text(size: int | None) -> str:
    """ "144 B", "28.9 kB", "4.00 MB": three digits, decimal units; "? B" where it is not known."""
    if size is None:
        return "? B"
    return f"{size} B" if size < 1000 else _in_unit(size, unit_of(size))


def time_text(duration_ns: int) -> str:
    """ "310 µs", "3.10 ms", "1.50 s": three digits."""
    return _in_unit(duration_ns, unit_of(duration_ns, (("µs", 10**3), ("ms", 10**6), ("s", 10**9))))


def three_digits(number: float) -> str:
    """ "1.50", "15.0", "150"."""
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:,.{decimals}f}"


Scale = tuple[str, int]
"""Its name, and how many of the smallest it is."""
_SIZES: tuple[Scale, ...] = (("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))


def unit_of(value: int, units: Sequence[Scale] = _SIZES) -> Scale:
    """The unit in which three digits tell this value; of sizes, if no others are given."""
    # 999.5 would be rounded to four digits, so it goes to the next unit.
    return next((unit for unit in units if value < 999.5 * unit[1]), units[-1])


def _in_unit(value: int, unit: Scale) -> str:
    return f"{three_digits(value / unit[1])} {unit[0]}"


def wire_finding(sent: WireTraffic) -> str:
    """ "Predicted on the wire: 1.6 kB, framing included"; "measured" where the kernel counted it."""
    size = size_text(sent.total_bytes)
    if sent.counted == "predicted":
        return f"Predicted on the wire: {size}, framing included"
    return f"Measured on the wire: {size}, as the kernel counted it"


def capital(sentence: str, rank: int | None, labels: RankNames) -> str:
    """With a capital, as it begins with this rank; but where that has a name of its own, as it is."""
    numbered = rank is not None and labels.short(rank) == str(rank)
    return capitalized(sentence) if numbered else sentence


def capitalized(title: str) -> str:
    """ "Step 1", as a sentence begins."""
    return title[:1].upper() + title[1:]
