"""Detects lost ranks and reports which rank ended a job.

Horovod ends all ranks of a job when one is lost, but its error does not name that rank, or names a
rank that ended as a consequence. Therefore each pair of ranks holds a TCP connection without
traffic. A process that dies closes the connection. If a host or the network fails, the kernel's
keepalive probes time out. A program that fails sends the reason first. The error of Horovod is then
replaced by a `PeerLostError` with the lost rank and its address.
"""

import atexit
import contextlib
import dataclasses
import json
import math
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from slipstream_tf.distributed import mesh

# Words in errors that the loss of a rank can cause. TensorFlow has no class for them.
_TELLTALES = ("Horovod", "gloo", "MPI_")
_ADVICE = "The job cannot continue. Start it again from its last checkpoint."
_LONGEST_REASON = 500
# In bytes. JSON needs up to twelve bytes per character of a reason.
_LONGEST_MESSAGE = 1 << 14


def is_of_collective(error: BaseException) -> bool:
    """Returns whether an interrupted collective can have caused the error."""
    text = f"{type(error).__name__}: {error}"
    return any(word in text for word in _TELLTALES)


class PeerLostError(RuntimeError):
    """Raised when another rank of the job is lost.

    Example:

    >>> error = slip.distributed.PeerLostError("Lost rank 1.", rank=1, address="10.0.0.2")
    >>> error.rank
    1

    Attributes:
        rank: The peer that was lost first, as far as this rank can see.
        address: The address of the peer's host.
    """

    def __init__(self, message: str, rank: int, address: str):
        """Creates the error.

        Args:
            message: The complete message.
            rank: The lost peer.
            address: The address of the peer's host.
        """
        super().__init__(message)
        self.rank, self.address = rank, address


@dataclasses.dataclass
class _Peer:
    """The state of another rank, as seen by this rank.

    Attributes:
        rank: The rank of the peer.
        address: The address of the peer's host.
        connection: The connection to the peer.
        unread: Received bytes of a message that is not complete yet.
        has_left: Whether the peer has reported that its program has finished or failed.
        has_answered: Whether the peer has answered a question whether it is alive.
        error: The error of sending a message, if any. Reading does not raise it again.
    """

    rank: int
    address: str
    connection: socket.socket
    unread: bytes = b""
    has_left: bool = False
    has_answered: bool = False
    error: OSError | None = None


class Watch:
    """Watches the other ranks of a job in a background thread."""

    def __init__(
        self, rank: int, address: str, peers: Mapping[int, mesh.Connection], timeout_seconds: float
    ):
        """Starts the thread.

        Args:
            rank: The rank of this process.
            address: The address of this host.
            peers: A dictionary from rank to the peer's address and connection.
            timeout_seconds: The maximum time without a response to keepalive probes.
        """
        self._rank, self._address, self._timeout = rank, address, timeout_seconds
        self._peers = {number: _Peer(number, *peer) for number, peer in peers.items()}
        # Lost rank -> reason, in the order of detection.
        self._lost: dict[int, str] = {}
        self._changed = threading.Condition()
        self._is_over = False  # Peers were notified that this rank ends.
        self._is_explained = False  # The main thread reports the loss.
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            mesh.probe_by_keepalive(peer.connection, timeout_seconds)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        # A forked child must not keep the connections open after this process dies.
        os.register_at_fork(after_in_child=self.close)
        threading.Thread(target=self._run, name="slipstream_watch", daemon=True).start()

    def explain(self, error: BaseException) -> PeerLostError | None:
        """Returns the `PeerLostError` behind an error, or None.

        It blocks until every peer is lost, has left or has answered, for at most half of the
        timeout plus five seconds. If no peer is lost by then, peers without an answer count as
        lost.

        Args:
            error: The exception that a collective raised.

        Returns:
            The error to report instead, or None if the exception has another cause.
        """
        if self._is_over or not is_of_collective(error):
            return None
        waited = self._timeout / 2 + 5.0
        self._notify_at_once({"event": "ask"})
        with self._changed:
            self._changed.wait_for(self._is_settled, waited)
            if not self._lost:
                reason = f"its program did not answer within {waited:g} seconds after this error"
                for peer in self._peers.values():
                    if not self._is_heard(peer):
                        self._declare_lost(peer.rank, reason)
            self._is_explained = True
            return self._verdict()

    def fail(self, error: BaseException) -> None:
        """Notifies all peers that this rank ends with an error."""
        text = f"{type(error).__name__}: {error}"
        self._end({"event": "failed", "reason": text[:_LONGEST_REASON]})

    def leave(self) -> None:
        """Notifies all peers that this rank's program has finished."""
        self._end({"event": "left"})

    def close(self) -> None:
        """Stops watching without notifying peers."""
        self._is_over = self._is_closed = True
        for peer in self._peers.values():
            peer.connection.close()

    def _end(self, message: dict[str, Any]) -> None:
        if not self._is_over:
            self._is_over = True
            self._notify(message)

    def _notify(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for peer in self._peers.values():
            _send(peer, line)

    def _notify_at_once(self, message: dict[str, Any]) -> None:
        # Collectives have already waited for the timeout, or a peer is lost and others can be lost,
        # too.
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # Closed; reading reports it.
                mesh.expect_answer(peer.connection, self._timeout)
        self._notify(message)

    def _is_heard(self, peer: _Peer) -> bool:
        return peer.has_answered or peer.has_left

    def _is_settled(self) -> bool:
        return all(rank in self._lost or self._is_heard(peer) for rank, peer in self._peers.items())

    def _verdict(self) -> PeerLostError | None:
        lost = self._lost or {
            peer.rank: "its program has finished, but the program of this rank has not"
            for peer in self._peers.values()
            if peer.has_left
        }
        if not lost:
            return None
        named = "; ".join(
            f"rank {rank} ({self._peers[rank].address}): {reason}" for rank, reason in lost.items()
        )
        message = f"Rank {self._rank} ({self._address}) has lost {named}. {_ADVICE}"
        first = next(iter(lost))
        return PeerLostError(message, first, self._peers[first].address)

    def _run(self) -> None:
        end = math.inf
        while True:
            # A broken connection becomes readable.
            wait = None if end == math.inf else max(0.0, end - time.monotonic())
            ready = self._selector.select(wait)
            if self._is_closed:
                return
            for key, _ in ready:
                self._read(key.data)
            if self._lost and end == math.inf and not self._is_over:
                end = time.monotonic() + self._timeout
                self._report()
            if time.monotonic() >= end:
                print(
                    f"slipstream_tf: Rank {self._rank} ({self._address}) is still running "
                    f"{self._timeout:g} seconds after it lost a rank, therefore it is terminated.",
                    file=sys.stderr,
                    flush=True,
                )
                self.leave()
                os._exit(1)
            if not self._selector.get_map() and end == math.inf:
                return

    def _report(self) -> None:
        # Report immediately, because a launcher can kill this rank before it ends by itself.
        with self._changed:
            if not self._is_explained:
                print(f"slipstream_tf: {self._verdict()}", file=sys.stderr, flush=True)

    def _read(self, peer: _Peer) -> None:
        data = b""
        try:
            data = peer.connection.recv(4096)
        except OSError as error:
            peer.error = error
        with self._changed:
            if not data:
                self._selector.unregister(peer.connection)
                if not peer.has_left:
                    self._declare_lost(peer.rank, self._reason(peer))
            *lines, rest = (peer.unread + data).split(b"\n")
            # No rank sends a longer message. A truncated one is not valid JSON and is ignored.
            peer.unread = rest[:_LONGEST_MESSAGE]
            for line in lines:
                self._handle(peer, mesh.message_of(line))
            self._changed.notify_all()

    def _reason(self, peer: _Peer) -> str:
        if peer.error is None or isinstance(peer.error, ConnectionError):
            return "its process has ended without an error message: it was killed or has crashed"
        return (
            f"its host has not answered for {self._timeout:g} seconds: the host or a link is down "
            f"({peer.error.strerror})"
        )

    def _handle(self, peer: _Peer, message: dict[str, Any]) -> None:
        event, rank, reason = message.get("event"), message.get("rank"), message.get("reason")
        if event == "ask":
            _send(peer, b'{"event": "answer"}\n')
        elif event == "answer":
            peer.has_answered = True
        elif event == "left":
            peer.has_left = True
        elif event == "failed":
            peer.has_left = True
            self._declare_lost(peer.rank, f"its program has failed: {reason}")
        elif event == "lost" and isinstance(rank, int) and rank in self._peers:
            self._lost.setdefault(rank, f"{reason} (reported by rank {peer.rank})")

    def _declare_lost(self, rank: int, reason: str) -> None:
        # Notify peers immediately, before they learn that this rank ends.
        if rank not in self._lost:
            self._lost[rank] = reason
            self._notify_at_once({"event": "lost", "rank": rank, "reason": reason})


def _send(peer: _Peer, line: bytes) -> None:
    try:
        peer.connection.send(line, socket.MSG_DONTWAIT)
    except BlockingIOError:
        pass  # The peer does not read its messages; do not wait for it.
    except OSError as error:
        # The peer is gone. The thread detects that when it reads.
        peer.error = error


def start(
    rank: int, size: int, gather: Callable[[str], Sequence[str]], timeout_seconds: float
) -> Watch:
    """Connects all ranks and watches them until the process ends; a collective.

    It installs an exception hook. An exception that ends this process is sent to the peers. An
    exception that the loss of a peer caused is reported as a `PeerLostError`.

    Args:
        rank: The rank of this process.
        size: The number of ranks, at least 2.
        gather: A collective that takes this rank's text and returns the texts of all ranks, rank 0
            first.
        timeout_seconds: The maximum time without a response from a host.

    Returns:
        The running watch.

    Raises:
        ConnectionError: If a rank cannot be reached or does not connect in time.
    """
    watch = Watch(rank, *mesh.connect(rank, size, gather, timeout_seconds), timeout_seconds)
    report = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lost = watch.explain(error)
        if lost is None:
            watch.fail(error)
            report(kind, error, trace)
        else:
            lost.__cause__ = error.with_traceback(trace)
            report(PeerLostError, lost, None)

    sys.excepthook = hook
    # atexit runs in reverse order: peers are notified before Horovod's handler, registered earlier,
    # ends the job.
    atexit.register(watch.leave)
    return watch
