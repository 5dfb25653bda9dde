"""Tests of `distributed.watch` and `distributed.mesh` with threads as ranks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from slipstream_tf.distributed import mesh
from slipstream_tf.distributed.watch import PeerLostError, Watch

HOROVOD_ERROR = RuntimeError("Horovod has been shut down.")
# No test waits this long. After this timeout the watch would end the process.
TIMEOUT = 60.0


# First messages of unrelated clients. The nesting of the fourth exceeds Python's limit.
GREETINGS = (
    b"GET / HTTP/1.0\n",
    b'{"job": "other", "rank": 1}\n',
    b"3\n",
    b"[" * 4000 + b"\n",
    b"\xff\n",
    b'{"job": [], "rank": []}\n',
    b"x" * 10_000,
)


def place_of(card: str) -> tuple[str, int]:
    """Returns the host and port on which a rank listens."""
    host, port = json.loads(card)["places"][0]
    return host, port


class Texts:
    """Gathers texts across threads."""

    def __init__(self, size: int, before: Callable[[str], None] = lambda text: None):
        self._texts, self._before = [""] * size, before
        self._barrier = threading.Barrier(size, timeout=TIMEOUT)

    def gather_of(self, rank: int) -> Callable[[str], list[str]]:
        def gather(text: str) -> list[str]:
            self._texts[rank] = text
            self._before(text)
            self._barrier.wait()
            return list(self._texts)

        return gather


def connected(
    size: int, timeout: float = TIMEOUT, before: Callable[[str], None] = lambda text: None
) -> list[tuple[str, dict[int, mesh.Connection]]]:
    texts = Texts(size, before)
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
    for watch in made:  # An open watch would end this process.
        watch.leave()
    for watch in made:
        watch.close()


def test_every_pair_of_ranks_is_connected():
    links = connected(4)
    for rank, (_, peers) in enumerate(links):
        assert set(peers) == set(range(4)) - {rank}
    for rank in range(4):
        for peer in range(rank):
            links[rank][1][peer][1].sendall(b"x")
            assert links[peer][1][rank][1].recv(10) == b"x"
    for _, peers in links:
        for link in peers.values():
            link[1].close()


def test_unknown_connections_are_rejected():
    """A client with an invalid greeting connects before the expected rank."""

    def gather(text: str) -> list[str]:
        for greeting in GREETINGS:
            with socket.create_connection(place_of(text)) as stranger:
                stranger.sendall(greeting)
        return [text, text]

    with pytest.raises(ConnectionError, match=r"received no connection from ranks \[1\]"):
        mesh.connect(0, 2, gather, 0.5)


@pytest.mark.parametrize("greeting", [b"", b"half a line", *GREETINGS])
def test_unknown_connections_do_not_block_ranks(greeting):
    """Unrelated clients connect to each rank first and stay connected."""
    strangers = []

    def meet(text):
        for _ in range(mesh._MAX_UNKNOWN_CALLERS // 2):
            strangers.append(socket.create_connection(place_of(text)))
            with contextlib.suppress(OSError):  # The server has already closed the connection.
                strangers[-1].sendall(greeting)

    start = time.monotonic()
    links = connected(3, timeout=20.0, before=meet)
    assert time.monotonic() - start < 4.0  # Waiting for a single client would take five seconds.
    for rank, (_, peers) in enumerate(links):
        assert set(peers) == {0, 1, 2} - {rank}
        for link in peers.values():
            link[1].close()
    for stranger in strangers:
        stranger.close()


def test_thousands_of_unknown_connections_change_nothing():
    """Clients connect while the ranks do and send random bytes."""
    ends, reported = threading.Event(), []

    def flood(place: tuple[str, int], seed: int) -> int:
        draw, staying, came = random.Random(seed), [], 0
        with contextlib.ExitStack() as stack:
            for _ in range(1000):
                # The server closed the connection or no longer listens.
                with contextlib.suppress(OSError):
                    stranger = socket.create_connection(place, 1.0)
                    came += 1
                    stranger.sendall(draw.randbytes(draw.randrange(64)))
                    staying.append(stack.enter_context(stranger))
                if len(staying) > 50:
                    staying.pop(draw.randrange(50)).close()
            ends.wait(TIMEOUT)
        return came

    with concurrent.futures.ThreadPoolExecutor(6) as pool:

        def meet(text: str) -> None:
            reported.extend(pool.submit(flood, place_of(text), seed) for seed in range(2))
            time.sleep(0.05)

        links = connected(3, timeout=20.0, before=meet)
        watches = [Watch(rank, own, peers, TIMEOUT) for rank, (own, peers) in enumerate(links)]
        ends.set()
        assert sum(task.result(TIMEOUT) for task in reported) > 100
    assert [set(peers) for _, peers in links] == [{1, 2}, {0, 2}, {0, 1}]
    assert watches[0].explain(HOROVOD_ERROR) is None  # No rank is lost.
    for watch in watches:
        watch.leave()
    for watch in watches:
        watch.close()


def test_rejected_connection_is_not_read():
    """The oldest client sends data while another client replaces it."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))

        def come() -> socket.socket:
            return opened.enter_context(socket.create_connection(server.getsockname()))

        door = mesh._Listener([server], "job", 0, 2, time.monotonic() + 0.3)
        oldest = come()
        for _ in range(mesh._MAX_UNKNOWN_CALLERS):
            come()
        for _ in range(mesh._MAX_UNKNOWN_CALLERS + 1):
            door._accept(server)
        # Connect before the oldest client sends, because the selector reports the events in this
        # order.
        come()
        oldest.sendall(b"x")
        with pytest.raises(ConnectionError, match="received no connection"):
            door.wait()


def test_watch_listens_on_job_interface_only(monkeypatch):
    """All of 127.0.0.0/8 is this host, but the job uses only 127.0.0.1."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")

    def gather(text):
        host, port = place_of(text)
        assert host == "127.0.0.1"
        socket.create_connection((host, port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
        return [text, text]

    with pytest.raises(ConnectionError, match="received no connection"):
        mesh.connect(0, 2, gather, 0.1)


def test_unreachable_rank_is_named():
    def gather(text: str) -> list[str]:
        return [json.dumps({"job": "x", "places": [["127.0.0.1", 1]]}), text]

    with pytest.raises(ConnectionError, match=r"Rank 1 cannot connect to rank 0.*127\.0\.0\.1:1"):
        mesh.connect(1, 2, gather, 5.0)


def test_addresses_belong_to_chosen_interface(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    assert mesh.own_addresses() == ["127.0.0.1"]
    monkeypatch.delenv("HOROVOD_GLOO_IFACE")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    assert mesh.own_addresses() == ["127.0.0.1"]
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    addresses = mesh.own_addresses()
    assert addresses == ["127.0.0.1"] or not any(a.startswith("127.") for a in addresses)


def test_unrelated_error_is_not_explained(watches):
    assert watches[0].explain(ValueError("no such column")) is None
    # All peers respond.
    assert watches[0].explain(HOROVOD_ERROR) is None


def test_failure_is_reported_with_reason(watches, capsys):
    watches[2].fail(ValueError("no such\ncolumn " + 10_000 * "x"))
    for watch in watches[:2]:
        lost = watch.explain(HOROVOD_ERROR)
        assert isinstance(lost, PeerLostError) and lost.rank == 2 and lost.address
        assert "its program has failed: ValueError: no such\ncolumn xxx" in str(lost)
        assert len(str(lost)) < 1000
    # Rank 2 reports only its error, not an error of another rank.
    assert watches[2].explain(HOROVOD_ERROR) is None


def test_rank_ended_by_other_rank_is_not_blamed(watches):
    watches[2].fail(ValueError("no such column"))
    assert watches[1].explain(HOROVOD_ERROR).rank == 2
    watches[1].leave()
    lost = watches[0].explain(HOROVOD_ERROR)
    assert lost.rank == 2 and "rank 1 " not in str(lost).replace("(reported by rank 1)", "")


def test_rank_that_exits_early_is_reported(watches):
    watches[1].leave()
    lost = watches[0].explain(HOROVOD_ERROR)
    assert lost.rank == 1 and "has finished, but the program of this rank has not" in str(lost)


@pytest.fixture
def watched() -> Iterator[tuple[Watch, list[socket.socket]]]:
    """Returns rank 0's watch and the sockets of ranks 1 and 2."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [socket.create_connection(server.getsockname(), 10.0) for _ in range(2)]
        links = {rank: ("there", server.accept()[0]) for rank in (1, 2)}
    watch = Watch(0, "here", links, TIMEOUT)
    yield watch, ends
    watch.leave()
    watch.close()
    for end in ends:
        end.close()


ASK = b'{"event": "ask"}\n'


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff\xfe\n",
        b"3\n[]\nnull\n{}\n",
        b'{"event": []}\n',
        b'{"event": "lost", "rank": []}\n{"event": "lost", "rank": 0}\n{"event": "lost"}\n',
        b"[" * 100_000 + b"\n",
        b"x" * 1_000_000 + b"\n",
    ],
)
def test_invalid_messages_change_nothing(watched, said):
    watch, (first, second) = watched
    first.sendall(said)
    for end in (first, second):
        end.sendall(ASK)
        assert end.recv(100) == b'{"event": "answer"}\n'
    assert not watch._lost


def test_unterminated_line_uses_bounded_memory(watched):
    watch, (first, second) = watched
    first.sendall(b'{"event": "' + 1_000_000 * b"x")
    second.sendall(ASK)
    assert second.recv(100) == b'{"event": "answer"}\n'
    assert len(watch._peers[1].unread) < 1 << 15


def test_peer_that_does_not_read_does_not_block_others(watched):
    _, (first, second) = watched
    first.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    first.settimeout(1.0)
    with contextlib.suppress(TimeoutError):
        first.sendall(ASK * 2_000_000)
    second.sendall(ASK)
    assert second.recv(100) == b'{"event": "answer"}\n'
