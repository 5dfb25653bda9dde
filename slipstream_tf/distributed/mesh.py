"""TCP connections between all pairs of ranks, for `watch`."""

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

# Timeout in seconds for connecting to one address, and for receiving the greeting of a caller.
_ATTEMPT = 5.0
# Polling interval in seconds.
_PAUSE = 0.1
# ioctl request for the address of an interface, from linux/sockios.h.
_SIOCGIFADDR = 0x8915
_LONGEST_GREETING = 4096
# Maximum number of callers without a valid greeting, in addition to the expected ranks. If there
# are more, the oldest is rejected.
_MAX_UNKNOWN_CALLERS = 64
# The address of a peer's host, and a socket in both directions.
Connection: TypeAlias = tuple[str, socket.socket]


def own_addresses() -> list[str]:
    """Returns the IPv4 addresses at which other ranks can reach this host.

    This is the address of the interface that a launcher has selected (HOROVOD_GLOO_IFACE), else the
    local address of the route to the launcher (HOROVOD_GLOO_RENDEZVOUS_ADDR). If neither variable
    gives an address, as with mpirun, the result has the addresses of all interfaces. The loopback
    is included only if there is no other address. Without any address, the result is the host name.
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

    Other programs can connect to the port while it is open. Each costs a socket and a few kilobytes
    for some seconds, and does not delay the ranks.

    Args:
        rank: The rank of this process.
        size: The number of ranks.
        gather: A collective that takes this rank's text and returns the texts of all ranks, rank 0
            first.
        timeout_seconds: The maximum time to try.

    Returns:
        This rank's address as peers see it, and a dictionary from each other rank to its
        connection.

    Raises:
        ConnectionError: If a rank cannot be reached or does not connect in time.
    """
    deadline = time.monotonic() + timeout_seconds
    with contextlib.ExitStack() as opened:
        servers = [
            opened.enter_context(
                socket.create_server((address, 0), backlog=size + _MAX_UNKNOWN_CALLERS)
            )
            for address in own_addresses()
        ]
        places = [server.getsockname() for server in servers]
        card = json.dumps({"places": places, "job": secrets.token_hex()})
        cards = [json.loads(text) for text in gather(card)]
        # The token of rank 0 identifies the job to its ranks.
        job = cards[0]["job"]
        door = _Listener(servers, job, rank, size, deadline)
        # Accept connections in a separate thread, so that other programs in the queue cannot block
        # the ranks.
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
    """Makes the kernel close a connection if the other host stops responding.

    The kernel of the other host responds even if its programs are busy. The connection is closed
    after 0.9 to 1.1 times the timeout. For timeouts below ten seconds, the deviation is up to one
    second.

    Args:
        connection: A connected socket.
        timeout_seconds: The maximum time without a response.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        interval = max(1, int(timeout_seconds / 10))
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, interval)
        milliseconds = int(timeout_seconds * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def expect_answer(connection: socket.socket, timeout_seconds: float) -> None:
    """Shortens the time until the kernel closes a connection without acknowledgment.

    While sent data is unacknowledged, the kernel does not send probes, and would wait for the full
    timeout from the time of sending. This function reduces the wait to a quarter of the timeout, at
    least two seconds. Two lost probes in a row are tolerated, for example on a host with busy
    processors.

    Args:
        connection: A socket that was passed to `probe_by_keepalive`.
        timeout_seconds: The same timeout.
    """
    if sys.platform.startswith("linux"):
        milliseconds = int(max(2.0, timeout_seconds / 4) * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def message_of(line: bytes) -> dict[str, Any]:
    """Parses a line as a JSON object; returns {} if invalid.

    Another program could have sent the line, so an error must not end the job.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _addresses_of(interfaces: Sequence[str]) -> list[str]:
    if not sys.platform.startswith("linux"):
        return []
    import fcntl  # fcntl does not exist on all platforms.

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in interfaces:
            # The call fails for an interface without an IPv4 address.
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def _address_towards(host: str | None) -> list[str]:
    """Returns this host's address on the route to another host, or []."""
    if host is None:
        return []
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent,
    ):
        unsent.connect((host, 9))  # Selects a route; sends no data.
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
            # Another program at this address cannot know the token.
            if _answer(connection, until) != greeting["job"]:
                raise ConnectionError("another program answered, not a rank of this job")
        except OSError as error:
            errors.append(f"{address}:{port}: {error}")
        else:
            connection.settimeout(None)
            return address, connection
    raise ConnectionError(
        f"Rank {rank} cannot connect to rank {peer} to watch it ({'; '.join(errors)}). Open the "
        "ports between the hosts, set HOROVOD_GLOO_IFACE to an interface that all hosts can reach, "
        "or call init(timeout_seconds=None) to train without a watch."
    )


def _answer(connection: socket.socket, until: float) -> str:
    """Reads exactly one line."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _LONGEST_GREETING:
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(1)
        if not data:
            raise ConnectionError("the connection was closed before a rank of this job answered")
        received += data
    return received.decode(errors="replace").strip()


@dataclasses.dataclass(eq=False)
class _Caller:
    """A connection that has not sent a valid greeting yet."""

    connection: socket.socket
    until: float
    received: bytes = b""


class _Listener:
    """Accepts connections from higher ranks and rejects other programs.

    All connections are handled concurrently.
    """

    def __init__(
        self, servers: Sequence[socket.socket], job: str, rank: int, size: int, deadline: float
    ):
        """Registers listening sockets.

        Args:
            servers: Listening sockets.
            job: The token that only the ranks of this job know.
            rank: The rank of this process.
            size: The number of ranks.
            deadline: The time at which `wait` fails, on the monotonic clock.
        """
        self._job, self._deadline, self._rank = job, deadline, rank
        self._missing = set(range(rank + 1, size))
        self._links: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._callers: list[_Caller] = []  # Oldest first.
        self._is_closed = False
        for server in servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)

    def close(self) -> None:
        """Makes `wait`, in another thread, return within its polling interval."""
        self._is_closed = True

    def wait(self) -> dict[int, socket.socket]:
        """Returns the connections as soon as all higher ranks have connected.

        Raises:
            ConnectionError: If a rank does not connect before the deadline.
        """
        try:
            while self._missing and not self._is_closed:
                now = time.monotonic()
                if now > self._deadline:
                    raise ConnectionError(
                        f"Rank {self._rank} received no connection from ranks "
                        f"{sorted(self._missing)} within the timeout. Read the errors of these "
                        "ranks for the cause, or increase timeout_seconds of init."
                    )
                for key, _ in self._selector.select(_PAUSE):
                    if key.data is None:
                        self._accept(key.fileobj)
                    elif key.data in self._callers:  # May have been rejected in this round.
                        self._receive(key.data)
                for caller in [c for c in self._callers if c.until < now]:
                    self._reject(caller)
        finally:
            for caller in list(self._callers):
                self._reject(caller)
            self._selector.close()
        return self._links

    def _accept(self, server: Any) -> None:
        with contextlib.suppress(OSError):  # The caller can disconnect first.
            connection, _ = server.accept()
            connection.setblocking(False)
            caller = _Caller(connection, time.monotonic() + _ATTEMPT)
            self._callers.append(caller)
            self._selector.register(connection, selectors.EVENT_READ, caller)
        if len(self._callers) > _MAX_UNKNOWN_CALLERS + len(self._missing):
            self._reject(self._callers[0])

    def _receive(self, caller: _Caller) -> None:
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
        self._reject(caller)

    def _rank_in(self, greeting: bytes) -> int | None:
        """Returns the missing rank that sent the greeting, or None."""
        details = message_of(greeting)
        rank = details.get("rank") if details.get("job") == self._job else None
        return rank if isinstance(rank, int) and rank in self._missing else None

    def _reject(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        self._callers.remove(caller)
