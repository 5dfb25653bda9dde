"""A TCP connection between every two ranks, for `watch`.

In: a rank, and a way to gather texts of all ranks. Out: a connection to each other rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# How long one address of several is tried, in seconds.
_ATTEMPT = 5.0
# Request number of "what is the address of this interface?", from linux/sockios.h.
_SIOCGIFADDR = 0x8915
_LONGEST_GREETING = 4096


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection to a peer.

    Attributes:
        address: of the peer's host.
        connection: a socket that both may send on.
    """

    address: str
    connection: socket.socket


def own_addresses() -> list[str]:
    """Returns the IPv4 addresses at which other ranks may reach this host, the likeliest first.

    Where a launcher has chosen an interface (HOROVOD_GLOO_IFACE), it is the address of that one.
    """
    chosen = os.environ.get("HOROVOD_GLOO_IFACE")
    names = [name for _, name in socket.if_nameindex()]
    found = _addresses_of([name for name in names if name == chosen]) or _addresses_of(names)
    found.sort(key=lambda address: address.startswith("127."))
    return found or [socket.gethostname()]


def connect(
    rank: int, size: int, gather: Callable[[str], Sequence[str]], timeout_seconds: float
) -> tuple[str, dict[int, Link]]:
    """Connects this rank with all others; a collective.

    Args:
        rank: of this process.
        size: number of ranks.
        gather: a collective; takes this rank's text, returns those of all ranks, rank 0 first.
        timeout_seconds: how long to try.

    Returns:
        This rank's address, as peers know it, and rank -> link, for all other ranks.

    Raises:
        ConnectionError: a rank cannot be reached, or did not call in time.
    """
    deadline = time.monotonic() + timeout_seconds
    with socket.create_server(("", 0), backlog=size) as server:
        addresses = own_addresses()
        card = {"addresses": addresses, "port": server.getsockname()[1]}
        cards = [
            json.loads(text) for text in gather(json.dumps({**card, "job": secrets.token_hex()}))
        ]
        # Told from any other job, and from strangers, by what rank 0 drew.
        job = cards[0]["job"]
        links = {}
        for peer in range(rank):
            greeting = {"job": job, "rank": rank}
            links[peer] = _call(rank, peer, cards[peer], greeting, deadline)
        while len(links) < size - 1:
            peer, connection = _accept(server, job, rank, set(links), size, deadline)
            links[peer] = Link(cards[peer]["addresses"][0], connection)
    return addresses[0], links


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
    whole timeout anew from when it was sent. Broken after a tenth of it; at least a second.

    Args:
        connection: of `probe_by_keepalive`.
        timeout_seconds: as given there.
    """
    if sys.platform.startswith("linux"):
        milliseconds = int(max(1.0, timeout_seconds / 10) * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _addresses_of(interfaces: Sequence[str]) -> list[str]:
    if not sys.platform.startswith("linux"):
        return []
    import fcntl  # Not on every platform that this module is imported on.

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name in interfaces:
            # An interface without an IPv4 address is an error.
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def _call(
    rank: int, peer: int, card: dict[str, Any], greeting: dict[str, Any], deadline: float
) -> Link:
    errors = []
    for address in card["addresses"]:
        left = max(0.1, deadline - time.monotonic())
        try:
            connection = socket.create_connection((address, card["port"]), min(left, _ATTEMPT))
            connection.sendall(json.dumps(greeting).encode() + b"\n")
            # A stranger who listens at this address and port would not know what to answer.
            if _line(connection) != greeting["job"]:
                raise ConnectionError("another program answered")
        except OSError as error:
            errors.append(f"{address}:{card['port']}: {error}")
        else:
            connection.settimeout(None)
            return Link(address, connection)
    raise ConnectionError(
        f"Rank {rank} cannot connect to rank {peer}, to watch it ({'; '.join(errors)}). Open the "
        "ports between the hosts, name an interface that all of them reach in HOROVOD_GLOO_IFACE, "
        "or have nobody watch: init(timeout_seconds=None)."
    )


def _accept(
    server: socket.socket, job: str, rank: int, known: set[int], size: int, deadline: float
) -> tuple[int, socket.socket]:
    while True:
        server.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            missing = sorted(set(range(rank + 1, size)) - known)
            raise ConnectionError(
                f"Rank {rank} waited in vain for ranks {missing} to connect to it. Their own "
                "errors say why they could not."
            ) from error
        connection.settimeout(_ATTEMPT)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            greeting = json.loads(_line(connection))
            peer = greeting["rank"]
            if greeting["job"] == job and peer in range(rank + 1, size) and peer not in known:
                connection.sendall(job.encode() + b"\n")
                connection.settimeout(None)
                return peer, connection
        connection.close()


def _line(connection: socket.socket) -> str:
    received = b""
    while not received.endswith(b"\n") and len(received) < _LONGEST_GREETING:
        data = connection.recv(1)
        if not data:
            raise ConnectionError("closed before it said who it is")
        received += data
    return received.decode().strip()
