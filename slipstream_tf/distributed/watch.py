"""Says which rank was lost when a job ends because of it.

Horovod ends every rank of a job that has lost one, but its error does not say which, or names a
rank that ended only because another had. So every two ranks hold a TCP connection, on which nothing
is sent while all is well. A process that dies closes it; a host or link that is down leaves the
kernel's keepalive probes unanswered; a program that fails says why before it ends.

In: this rank's place in the job, and a way to gather texts. Out: a `PeerLostError` with the peer's
rank and address in the place of Horovod's error.
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

# Of errors that may come from the loss of a rank. TensorFlow has no class for them.
_TELLTALES = ("Horovod", "gloo", "MPI_")
_ADVICE = "The job cannot go on without it: start it again from its last checkpoint."
_LONGEST_REASON = 500
# In bytes; a reason in JSON has up to twelve a character.
_LONGEST_MESSAGE = 1 << 14


def is_of_collective(error: BaseException) -> bool:
    """Whether an error may come from a collective that broke off."""
    text = f"{type(error).__name__}: {error}"
    return any(word in text for word in _TELLTALES)


class PeerLostError(RuntimeError):
    """Another rank of the job is gone, so that this one cannot go on.

    Attributes:
        rank: of the peer that was lost first, as far as this rank knows.
        address: of the peer's host.
    """

    def __init__(self, message: str, rank: int, address: str):
        """Takes the whole message, and the peer that it is about."""
        super().__init__(message)
        self.rank, self.address = rank, address


@dataclasses.dataclass
class _Peer:
    """What is known of another rank."""

    rank: int
    address: str
    connection: socket.socket
    unread: bytes = b""
    has_left: bool = False
    has_answered: bool = False
    # Of a message to it; reading does not raise it again.
    error: OSError | None = None


class Watch:
    """Watches the other ranks of a job from a thread of its own."""

    def __init__(
        self, rank: int, address: str, peers: Mapping[int, mesh.Connection], timeout_seconds: float
    ):
        """Starts to watch.

        Args:
            rank: of this process.
            address: of this process's host, as peers are told.
            peers: rank -> connection and address.
            timeout_seconds: how long a host may leave probes unanswered.
        """
        self._rank, self._address, self._timeout = rank, address, timeout_seconds
        self._peers = {number: _Peer(number, *peer) for number, peer in peers.items()}
        # Rank -> why it is lost; what came first stands first.
        self._lost: dict[int, str] = {}
        self._changed = threading.Condition()
        self._is_over = False  # Peers know that this rank ends.
        self._is_explained = False  # The main thread reports the loss.
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            mesh.probe_by_keepalive(peer.connection, timeout_seconds)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        # A child must not hold the connections open when this process has died.
        os.register_at_fork(after_in_child=self.close)
        threading.Thread(target=self._run, name="slipstream_watch", daemon=True).start()

    def explain(self, error: BaseException) -> PeerLostError | None:
        """Says whether an error comes from the loss of a rank.

        Blocks until every peer is lost, has left or has answered, at most for half of the timeout
        and five seconds. If none is lost by then, those that have not answered count as lost.

        Args:
            error: what a collective, or the function it is in, raised.

        Returns:
            The error to report in its place; None: it has another cause.
        """
        if self._is_over or not is_of_collective(error):
            return None
        waited = self._timeout / 2 + 5.0
        self._tell_urgently({"event": "ask"})
        with self._changed:
            self._changed.wait_for(self._is_settled, waited)
            if not self._lost:
                reason = f"its program did not answer within {waited:g} seconds of this error"
                for peer in self._peers.values():
                    if not self._is_heard(peer):
                        self._lose(peer.rank, reason)
            self._is_explained = True
            return self._verdict()

    def fail(self, error: BaseException) -> None:
        """Tells all peers that this rank ends by an error."""
        text = f"{type(error).__name__}: {error}"
        self._end({"event": "failed", "reason": text[:_LONGEST_REASON]})

    def leave(self) -> None:
        """Tells all peers that this rank's program has come to its end."""
        self._end({"event": "left"})

    def close(self) -> None:
        """Stops to watch, without a word to peers."""
        self._is_over = self._is_closed = True
        for peer in self._peers.values():
            peer.connection.close()

    def _end(self, message: dict[str, Any]) -> None:
        if not self._is_over:
            self._is_over = True
            self._tell(message)

    def _tell(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for peer in self._peers.values():
            _send(peer, line)

    def _tell_urgently(self, message: dict[str, Any]) -> None:
        # Collectives have waited for the timeout already, or a peer is lost: others may be, too.
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # Closed; reading says so.
                mesh.expect_answer(peer.connection, self._timeout)
        self._tell(message)

    def _is_heard(self, peer: _Peer) -> bool:
        return peer.has_answered or peer.has_left

    def _is_settled(self) -> bool:
        return all(rank in self._lost or self._is_heard(peer) for rank, peer in self._peers.items())

    def _verdict(self) -> PeerLostError | None:
        lost = self._lost or {
            peer.rank: "its program has come to its end, while this rank's has not"
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
            # A connection that is broken, by its peer or by keepalive, can be read.
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
                    f"slipstream_tf: Rank {self._rank} ({self._address}) has not ended by itself "
                    f"{self._timeout:g} seconds after that, and is ended.",
                    file=sys.stderr,
                    flush=True,
                )
                self.leave()
                os._exit(1)
            if not self._selector.get_map() and end == math.inf:
                return

    def _report(self) -> None:
        # Now, not only when this rank ends: a launcher may be quicker in killing it.
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
                    self._lose(peer.rank, self._reason(peer))
            *lines, rest = (peer.unread + data).split(b"\n")
            # Of a longer one, which nobody sends, what is cut off makes it no message.
            peer.unread = rest[:_LONGEST_MESSAGE]
            for line in lines:
                self._hear(peer, mesh.message_of(line))
            self._changed.notify_all()

    def _reason(self, peer: _Peer) -> str:
        if peer.error is None or isinstance(peer.error, ConnectionError):
            return "its process has ended without a word: killed, or crashed"
        return (
            f"its host has not answered for {self._timeout:g} seconds: the host or a link is down "
            f"({peer.error.strerror})"
        )

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        event, rank, reason = message.get("event"), message.get("rank"), message.get("reason")
        if event == "ask":
            _send(peer, b'{"event": "answer"}\n')
        elif event == "answer":
            peer.has_answered = True
        elif event == "left":
            peer.has_left = True
        elif event == "failed":
            peer.has_left = True
            self._lose(peer.rank, f"its program has failed: {reason}")
        elif event == "lost" and isinstance(rank, int) and rank in self._peers:
            self._lost.setdefault(rank, f"{reason} (seen by rank {peer.rank})")

    def _lose(self, rank: int, reason: str) -> None:
        # Told at once, so that peers know of it before they hear that this rank ends.
        if rank not in self._lost:
            self._lost[rank] = reason
            self._tell_urgently({"event": "lost", "rank": rank, "reason": reason})


def _send(peer: _Peer, line: bytes) -> None:
    try:
        peer.connection.send(line, socket.MSG_DONTWAIT)
    except BlockingIOError:
        pass  # It does not read what it is sent: nobody waits for that.
    except OSError as error:
        # A peer that cannot be told is gone, which the thread notices by itself.
        peer.error = error


def start(
    rank: int, size: int, gather: Callable[[str], Sequence[str]], timeout_seconds: float
) -> Watch:
    """Connects all ranks and watches from now to the end of the process; a collective.

    An exception that ends this process is told to the peers; one that comes from the loss of a
    peer is reported as the `PeerLostError` that it caused.

    Args:
        rank: of this process.
        size: number of ranks, at least 2.
        gather: see `mesh.connect`.
        timeout_seconds: how long a host may be silent.

    Raises:
        ConnectionError: see `mesh.connect`.
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
    # Before Horovod's own, which was registered earlier: who ends is told before Horovod notices.
    atexit.register(watch.leave)
    return watch
