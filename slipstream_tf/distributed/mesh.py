"""A TCP connection between every two ranks, for `watch`.

In: a rank, and a way to gather texts of all ranks. Out: a connection to each other rank.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

# How long one address of several is tried, and who connects may take to say who it is, in seconds.
_ATTEMPT = 5.0
# How often it is looked at the time, in seconds.
_PAUSE = 0.1
# Request number of "what is the address of this interface?", from linux/sockios.h.
_SIOCGIFADDR = 0x8915
_LONGEST_GREETING = 4096
# Callers that have not said who they are; of more than these, the oldest are turned away.
_MOST_STRANGERS = 64
# The address of a peer's host, and a socket that both may send on.
Connection: TypeAlias = tuple[str, socket.socket]


def own_addresses() -> list[str]:
    """Returns the IPv4 addresses at which other ranks reach this host, and no others.

    The address of the interface that a launcher has chosen (HOROVOD_GLOO_IFACE); else the one from
    which this host reaches the launcher (HOROVOD_GLOO_RENDEZVOUS_ADDR). Where there is neither, as
    under mpirun, those of all interfaces, without the loopback if there is another.
    """
    chosen = os.environ.get("HOROVOD_GLOO_IFACE")
    names = [name for _, name in socket.if_nameindex()]
    found = _addresses_of([name for name in names if name == chosen])
    found = found or _address_towards(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"))
    if not found:
        found = _addresses_of(names)
        found = [address for address in found if not address.startswith("127.")] or found
    return found or [socket.gethostname()]


def connect(
    rank: int, size: int, gather: Callable[[str], Sequence[str]], timeout_seconds: float
) -> tuple[str, dict[int, Connection]]:
    """Connects this rank with all others; a collective.

    Others than ranks may connect, too, while it lasts: each of them costs a socket and a few
    kilobytes for some seconds, and holds nobody up.

    Args:
        rank: of this process.
        size: number of ranks.
        gather: a collective; takes this rank's text, returns those of all ranks, rank 0 first.
        timeout_seconds: how long to try.

    Returns:
        This rank's address, as peers know it, and rank -> connection, for all other ranks.

    Raises:
        ConnectionError: a rank cannot be reached, or did not call in time.
    """
    deadline = time.monotonic() + timeout_seconds
    with contextlib.ExitStack() as opened:
        servers = [
            opened.enter_context(socket.create_server((address, 0), backlog=size + _MOST_STRANGERS))
            for address in own_addresses()
        ]
        places = [server.getsockname() for server in servers]
        card = json.dumps({"places": places, "job": secrets.token_hex()})
        cards = [json.loads(text) for text in gather(card)]
        # Told from any other job, and from strangers, by what rank 0 drew.
        job = cards[0]["job"]
        door = _Door(servers, job, rank, size, deadline)
        # Beside the calls: a queue of strangers that nobody takes in would keep ranks out.
        pool = opened.enter_context(concurrent.futures.ThreadPoolExecutor(1, "slipstream_mesh"))
        opened.callback(door.close)
        called = pool.submit(door.wait)
        links = {}
        for peer in range(rank):
            greeting = {"job": job, "rank": rank}
            links[peer] = _call(rank, peer, cards[peer]["places"], greeting, deadline)
        for peer, connection in called.result().items():
            links[peer] = (cards[peer]["places"][0][0], connection)
    return places[0][0], links


def probe_by_keepalive(connection: socket.socket, timeout_seconds: float) -> None:
    """Makes the kernel break a connection whose other host does not answer.

    The other host's kernel answers, however busy its programs are. Broken after between 0.9 and 1.1
    of the timeout; of less than ten seconds: up to one second earlier or later.

    Args:
        connection: connected.
        timeout_seconds: how long a host may be silent.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        interval = max(1, int(timeout_seconds / 10))
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, interval)
        milliseconds = int(timeout_seconds * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def expect_answer(connection: socket.socket, timeout_seconds: float) -> None:
    """Makes the kernel break a connection whose other host does not confirm what is sent now.

    While something that was sent is not confirmed, the kernel does not probe, and would count the
    whole timeout anew from when it was sent. Broken after a quarter of it, at least two seconds:
    two probes in a row may remain unanswered, as on a host whose processors are all busy.

    Args:
        connection: of `probe_by_keepalive`.
        timeout_seconds: as given there.
    """
    if sys.platform.startswith("linux"):
        milliseconds = int(max(2.0, timeout_seconds / 4) * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def message_of(line: bytes) -> dict[str, Any]:
    """Returns what a line says; nothing if it is no message: whoever sent it, the job goes on."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _addresses_of(interfaces: Sequence[str]) -> list[str]:
    if not sys.platform.startswith("linux"):
        return []
    import fcntl  # Not on every platform that this module is imported on.

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in interfaces:
            # An interface without an IPv4 address is an error.
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def _address_towards(host: str | None) -> list[str]:
    """Returns the address from which this host reaches another one; none if it does not."""
    if host is None:
        return []
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent,
    ):
        unsent.connect((host, 9))  # Of datagrams: asks the kernel for the way, and sends nothing.
        return [unsent.getsockname()[0]]
    return []


def _call(
    rank: int, peer: int, places: Sequence[Any], greeting: dict[str, Any], deadline: float
) -> Connection:
    errors = []
    for address, port in places:
        until = time.monotonic() + max(0.1, min(deadline - time.monotonic(), _ATTEMPT))
        try:
            connection = socket.create_connection((address, port), until - time.monotonic())
            connection.sendall(json.dumps(greeting).encode() + b"\n")
            # A stranger who listens at this address and port would not know what to answer.
            if _answer(connection, until) != greeting["job"]:
                raise ConnectionError("another program answered")
        except OSError as error:
            errors.append(f"{address}:{port}: {error}")
        else:
            connection.settimeout(None)
            return address, connection
    raise ConnectionError(
        f"Rank {rank} cannot connect to rank {peer}, to watch it ({'; '.join(errors)}). Open the "
        "ports between the hosts, name an interface that all of them reach in HOROVOD_GLOO_IFACE, "
        "or have nobody watch: init(timeout_seconds=None)."
    )


def _answer(connection: socket.socket, until: float) -> str:
    """Reads a line, and nothing behind it."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _LONGEST_GREETING:
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(1)
        if not data:
            raise ConnectionError("closed before it said who it is")
        received += data
    return received.decode(errors="replace").strip()


@dataclasses.dataclass(eq=False)
class _Caller:
    """Who has connected and not said yet who it is."""

    connection: socket.socket
    until: float
    received: bytes = b""


class _Door:
    """Takes in the ranks above this one, and turns strangers away, all at the same time."""

    def __init__(
        self, servers: Sequence[socket.socket], job: str, rank: int, size: int, deadline: float
    ):
        """Takes sockets that listen; `job` is what a rank knows and a stranger does not."""
        self._job, self._deadline, self._rank = job, deadline, rank
        self._missing = set(range(rank + 1, size))
        self._links: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._callers: list[_Caller] = []  # Who came first stands first.
        self._is_closed = False
        for server in servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)

    def close(self) -> None:
        """Has `wait` return soon."""
        self._is_closed = True

    def wait(self) -> dict[int, socket.socket]:
        """Returns the ranks' connections as soon as all have called.

        Raises:
            ConnectionError: some did not in time.
        """
        try:
            while self._missing and not self._is_closed:
                now = time.monotonic()
                if now > self._deadline:
                    raise ConnectionError(
                        f"Rank {self._rank} waited in vain for ranks {sorted(self._missing)} to "
                        "connect to it. Their own errors say why they could not."
                    )
                for key, _ in self._selector.select(_PAUSE):
                    if key.data is None:
                        self._take_in(key.fileobj)
                    elif key.data in self._callers:  # Not turned away for one of this round.
                        self._listen_to(key.data)
                for caller in [c for c in self._callers if c.until < now]:
                    self._turn_away(caller)
        finally:
            for caller in list(self._callers):
                self._turn_away(caller)
            self._selector.close()
        return self._links

    def _take_in(self, server: Any) -> None:
        with contextlib.suppress(OSError):  # Who has gone again meanwhile.
            connection, _ = server.accept()
            connection.setblocking(False)
            caller = _Caller(connection, time.monotonic() + _ATTEMPT)
            self._callers.append(caller)
            self._selector.register(connection, selectors.EVENT_READ, caller)
        if len(self._callers) > _MOST_STRANGERS + len(self._missing):
            self._turn_away(self._callers[0])

    def _listen_to(self, caller: _Caller) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = caller.connection.recv(_LONGEST_GREETING)
        caller.received += data
        is_whole = b"\n" in caller.received
        if data and not is_whole and len(caller.received) < _LONGEST_GREETING:
            return
        peer = self._rank_in(caller.received) if is_whole else None
        if peer is not None:
            with contextlib.suppress(OSError):
                caller.connection.sendall(self._job.encode() + b"\n")
                caller.connection.setblocking(True)
                self._forget(caller)
                self._missing.remove(peer)
                self._links[peer] = caller.connection
                return
        self._turn_away(caller)

    def _rank_in(self, greeting: bytes) -> int | None:
        """Returns which of the missing ranks it is of; None: of a stranger."""
        told = message_of(greeting)
        rank = told.get("rank") if told.get("job") == self._job else None
        return rank if isinstance(rank, int) and rank in self._missing else None

    def _turn_away(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        self._callers.remove(caller)
