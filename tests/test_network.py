"""A chosen network: its words, its ports, and real ranks that feel it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlearn import Cluster
from dlearn.errors import SetupError
from dlearn.network import Link, Network
from dlearn.network.link import RANGES, parse
from dlearn.network.namespace import refusal

not_here = refusal()
needs_network = pytest.mark.skipif(bool(not_here), reason=not_here or "permitted")


@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("1 Gbit/s, 100 us", Link(1e9, 100e-6)),
        ("100us,1Gbit/s", Link(1e9, 100e-6)),
        ("rate 12.5 MB/s", Link(100e6)),
        ("jitter 1 ms, loss 1 %, queue 64 kB", Link(jitter=0.001, loss=0.01, queue=64_000)),
        ("1e2 Mbit/s, latency 0.5 ms", Link(rate="100 Mbit/s", latency="500 us")),
    ],
)
def test_words_tell_a_link(words, link):
    assert Link.of(words) == link


def test_a_link_tells_itself_in_words_that_make_it_again():
    link = Link(rate=2.5e6, latency=0.02, jitter=0.001, loss=0.05, queue=64_000)
    assert str(link) == "2.5 Mbit/s, 20 ms, jitter 1 ms, loss 5 %, queue 64 kB"
    assert Link.of(str(link)) == link


numbers = {name: st.floats(low, high) for name, (low, high) in RANGES.items()}


@given(st.builds(Link, **numbers))
def test_any_link_survives_its_words(link):
    again = Link.of(str(link))
    for name in RANGES:
        assert getattr(again, name) == pytest.approx(getattr(link, name), rel=1e-9)


@given(st.text(max_size=40) | st.lists(st.sampled_from(["1", "Mbit/s", ",", " ", "ms", "loss", "%", "-"])).map("".join))
def test_any_other_words_are_refused_in_one_sentence(words):
    told = {}
    sentence = "told."
    try:
        told = parse(words)
    except SetupError as error:
        sentence = str(error)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert all(RANGES[name][0] <= value <= RANGES[name][1] for name, value in told.items())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Link.of("fast"), "'fast' tells nothing of a network"),
        (lambda: Link.of("1 Gbit/s, 10 Mbit/s"), "tells the rate twice"),
        (lambda: Link.of("64 kB"), "what of the network is '64 kB'?"),
        (lambda: Link.of("1 parsec/s"), "what of the network"),
        (lambda: Link(rate=0), "the rate of a link is 1 kbit/s to 100 Gbit/s, not 0 bit/s."),
        (lambda: Link(loss=1), "the loss of a link is 0 % to 90 %, not 100 %."),
        (lambda: Link(latency="1 Mbit/s"), "'1 Mbit/s' is no latency of a link; its units are ns, us, µs, ms, s."),
        (lambda: Network.star("1 Gbit/s"), "a star has a list of cables"),
        (lambda: Network.racks([2, 0], inside="1 ms", between="1 ms"), "racks have a list of sizes"),
        (lambda: Network.of(5), "a network is told in words"),
        (lambda: Cluster(3, network=Network.racks([2, 2], inside="1 ms", between="1 ms")), "is for 4 ranks"),
        (lambda: Cluster(2, network="1 ms", backend="mpi"), "ranks of this machine that speak TCP"),
    ],
)
def test_what_is_no_network_is_refused(make, sentence):
    with pytest.raises(SetupError) as refused:
        make()
    assert sentence in str(refused.value)


def test_a_way_has_the_latency_and_the_loss_of_its_links():
    racks = Network.racks([2, 2], inside="1 Gbit/s, 50 us, loss 10 %", between="10 Mbit/s, 1 ms").fitted(4)
    ports = racks.ports(1500)
    assert racks.way(0, 1) == ["from rank 0", "to rank 1"]
    assert racks.way(1, 2) == ["from rank 1", "from rack 0", "to rack 1", "to rank 2"]
    assert sum(ports[name].latency for name in racks.way(1, 2)) == pytest.approx(0.00105)
    kept = [1 - ports[name].loss for name in racks.way(0, 1)]
    assert kept[0] * kept[1] == pytest.approx(0.9)
    assert ports["from rank 0"].queue is None  # A sender waits for its own port.
    assert ports["from rack 0"].queue == 64 * 1500


# Real ranks -----------------------------------------------------------------------------------------------------------


def all_reduce(numbers: int) -> tuple[float, float, float]:
    """When it began, when it ended, and what it gave."""
    import time

    import torch
    import torch.distributed as dist

    total = torch.full((numbers,), float(dist.get_rank() + 1))
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    began = time.monotonic()
    dist.all_reduce(total)
    return began, time.monotonic(), total[0].item()


def duration(results) -> float:
    """From the last one's begin to the last one's end, in seconds."""
    return max(end for _, end, _ in results.values()) - max(begin for begin, _, _ in results.values())


@needs_network
def test_an_all_reduce_takes_latency_and_bytes_over_rate():
    with Cluster(2, network="20 Mbit/s, 5 ms") as cluster:
        run = cluster.run(all_reduce, 125_000, timeout=60)  # 500 kB: each way 500 kB, 200 ms at 20 Mbit/s.
        assert [value for _, _, value in run.results.values()] == [3, 3]
        # No network of that rate is faster; the upper bound is wide, for busy machines.
        assert 0.200 + 0.010 <= duration(run.results) < 0.4
        assert "20 Mbit/s, 5 ms" in str(run.network)
