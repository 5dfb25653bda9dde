"""distributed.watch and distributed.mesh with ranks that are threads of this process."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from slipstream_tf.distributed import mesh
from slipstream_tf.distributed.watch import PeerLostError, Watch

HOROVOD_ERROR = RuntimeError("Horovod has been shut down.")
# Long enough never to be waited for in vain, and for the watch to end this process.
TIMEOUT = 60.0


class Texts:
    """A `gather` for threads."""

    def __init__(self, size: int):
        self._texts = [""] * size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT)

    def gather_of(self, rank: int) -> Callable[[str], list[str]]:
        def gather(text: str) -> list[str]:
            self._texts[rank] = text
            self._barrier.wait()
            return list(self._texts)

        return gather


def connected(size: int, timeout: float = TIMEOUT) -> list[tuple[str, dict[int, mesh.Link]]]:
    texts = Texts(size)
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        tasks = [
            pool.submit(mesh.connect, rank, size, texts.gather_of(rank), timeout)
            for rank in range(size)
        ]
        return [task.result(TIMEOUT) for task in tasks]


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    links = connected(3)
    made = [Watch(rank, address, peers, TIMEOUT) for rank, (address, peers) in enumerate(links)]
    yield made
    for watch in made:  # One that is left open would end this process, as it must.
        watch.leave()
    for watch in made:
        watch.close()


def test_every_two_ranks_are_connected():
    links = connected(4)
    for rank, (_, peers) in enumerate(links):
        assert set(peers) == set(range(4)) - {rank}
    for rank in range(4):
        for peer in range(rank):
            links[rank][1][peer].connection.sendall(b"x")
            assert links[peer][1][rank].connection.recv(10) == b"x"
    for _, peers in links:
        for link in peers.values():
            link.connection.close()


def test_strangers_are_turned_away():
    """One that says nothing right comes before the rank that is waited for."""

    def gather(text: str) -> list[str]:
        port = json.loads(text)["port"]
        for greeting in (b"GET / HTTP/1.0\n", b'{"job": "other", "rank": 1}\n', b"3\n"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(greeting)
        return [text, text]

    with pytest.raises(ConnectionError, match=r"waited in vain for ranks \[1\]"):
        mesh.connect(0, 2, gather, 0.5)


def test_a_rank_that_cannot_be_reached_is_named():
    def gather(text: str) -> list[str]:
        return [json.dumps({"job": "x", "addresses": ["127.0.0.1"], "port": 1}), text]

    with pytest.raises(ConnectionError, match=r"Rank 1 cannot connect to rank 0.*127\.0\.0\.1:1"):
        mesh.connect(1, 2, gather, 5.0)


def test_own_addresses_are_those_of_the_chosen_interface(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    assert mesh.own_addresses() == ["127.0.0.1"]
    monkeypatch.delenv("HOROVOD_GLOO_IFACE")
    addresses = mesh.own_addresses()
    assert "127.0.0.1" in addresses
    assert addresses == sorted(addresses, key=lambda address: address.startswith("127."))


def test_an_error_of_another_cause_is_left_alone(watches):
    assert watches[0].explain(ValueError("no such column")) is None
    # All peers are there and answer.
    assert watches[0].explain(HOROVOD_ERROR) is None


def test_a_failure_is_told_with_its_reason(watches, capsys):
    watches[2].fail(ValueError("no such\ncolumn " + 10_000 * "x"))
    for watch in watches[:2]:
        lost = watch.explain(HOROVOD_ERROR)
        assert isinstance(lost, PeerLostError) and lost.rank == 2 and lost.address
        assert "its program has failed: ValueError: no such\ncolumn xxx" in str(lost)
        assert len(str(lost)) < 1000
    # It has reported its own error, and that of nobody else.
    assert watches[2].explain(HOROVOD_ERROR) is None


def test_a_rank_that_ended_because_of_another_is_not_blamed(watches):
    watches[2].fail(ValueError("no such column"))
    assert watches[1].explain(HOROVOD_ERROR).rank == 2
    watches[1].leave()
    lost = watches[0].explain(HOROVOD_ERROR)
    assert lost.rank == 2 and "rank 1 " not in str(lost).replace("(seen by rank 1)", "")


def test_a_rank_that_left_too_early(watches):
    watches[1].leave()
    lost = watches[0].explain(HOROVOD_ERROR)
    assert lost.rank == 1 and "has come to its end, while this rank's has not" in str(lost)
