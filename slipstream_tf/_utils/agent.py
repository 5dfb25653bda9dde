"""Keeps a rank's place in a job whose ranks come and go: starts its program anew when they change.

In: a command, and what Horovod's elastic launcher has put into the environment. Out: the command's
exit code.

    horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh \\
        slipstream-elastic python train.py

Each start of the command is a rank like that of any other job. When ranks are lost, its collectives
fail and it ends; when hosts join or leave, it is told, and ends after its next commit. Then the
agent, which outlives it, asks the launcher for its new place. Horovod's own way is to join anew
within the process: that ends the process if another rank is lost meanwhile, by an exception in a
thread of its own.

Needs neither TensorFlow nor Horovod's library, but its launcher's files.

`rank`, `is_elastic` and `is_on_one_host` read the environment that a launcher (horovodrun, mpirun)
has set for this process.
"""

from __future__ import annotations

import ctypes
import functools
import http.client
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

# Set by horovodrun (Gloo) and by Open MPI, MPICH or Slurm launchers.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
# "1": Horovod lets ranks come and go.
ELASTIC = "HOROVOD_ELASTIC"


def rank_variable() -> str | None:
    """Returns the name of the variable that makes this process a rank; None: it is alone."""
    return next((name for name in RANK_VARIABLES if name in os.environ), None)


def rank() -> int | None:
    """Returns the rank of this process in its job, from 0; None: it is in no job."""
    variable = rank_variable()
    return None if variable is None else int(os.environ[variable])


def is_elastic() -> bool:
    """Whether Horovod's launcher lets ranks come and go (`horovodrun --host-discovery-script`)."""
    return os.environ.get(ELASTIC) == "1"


def is_on_one_host() -> bool:
    """Whether the launcher says that all ranks of the job run on this host."""
    variable = rank_variable()
    if variable is None:
        return True
    local, every = (
        os.environ.get(variable.replace("_RANK", name)) for name in ("_LOCAL_SIZE", "_SIZE")
    )
    return local is not None and local == every


# Exit codes of a start after which another one is to come: it has saved something, or has not.
AGAIN, AGAIN_WITHOUT_COMMIT = 75, 76
# In the environment of a start: the end of a pipe that has a byte when hosts join or leave.
_NOTICE = "SLIPSTREAM_ELASTIC_NOTICE"
# What the launcher tells of a place, in this order.
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
# Starts one after the other that have saved nothing.
_MOST_IN_VAIN = 10
# How long the launcher may be silent.
_PATIENCE_SECONDS = 15
_PR_SET_PDEATHSIG = 1


def is_started_by_agent() -> bool:
    """Whether this process is a start of an agent's command."""
    return _NOTICE in os.environ


def is_noticed() -> bool:
    """Whether this start's agent has heard of hosts that join or leave."""
    return bool(select.select([int(os.environ[_NOTICE])], [], [], 0)[0])


class Agent:
    """Starts a command again and again, each time with its place among the ranks.

    Args:
        command: the program and its arguments.
        environment: that the launcher has made.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = {**environment}
        del self._environment[ELASTIC]  # A start stays in the job that it joins.
        self._process: subprocess.Popen[bytes] | None = None
        # To be told of hosts, on another thread.
        self._notice, self._lock = os.pipe(), threading.Lock()

    def run(self) -> int:
        """Starts the command until it ends for good; returns its exit code."""
        manager = importlib.import_module("horovod.runner.elastic.worker")
        listener: Any = manager.WorkerNotificationManager()
        listener.init()
        listener.register_listener(self)
        before = signal.signal(signal.SIGTERM, self._pass_on)
        try:
            return self._run()
        finally:
            signal.signal(signal.SIGTERM, before)

    def _run(self) -> int:
        in_vain = 0
        while True:
            code = self._start()
            # What a signal has ended was killed, or could not join since others were lost.
            if code >= 0 and code not in (AGAIN, AGAIN_WITHOUT_COMMIT):
                return code
            in_vain = 0 if code == AGAIN else in_vain + 1
            if in_vain > _MOST_IN_VAIN:
                self._say(f"{in_vain} starts in a row have saved nothing. The last one says why.")
                return 1
            place = self._next_place()
            if place is None:
                self._say("The launcher has ended, or has no place for this process any more.")
                return 1
            self._environment.update(place)

    def on_hosts_updated(self, timestamp: int, update: Any) -> None:
        """Is called on another thread when the launcher says that hosts have joined or left."""
        with self._lock:
            os.write(self._notice[1], b"!")

    def _start(self) -> int:
        told = self._notice[0]
        environment, begin = {**self._environment, _NOTICE: str(told)}, _ends_with_parent()
        self._process = subprocess.Popen(
            self._command, env=environment, pass_fds=[told], preexec_fn=begin
        )
        return self._process.wait()

    def _next_place(self) -> dict[str, str] | None:
        """Waits until all that are left have asked for their places; None: there is none."""
        # What is told from now on may have come too late for the new place.
        with self._lock:
            for end in self._notice:
                os.close(end)
            self._notice = os.pipe()
        own = self._environment
        address, port = (own[f"HOROVOD_GLOO_RENDEZVOUS_{name}"] for name in ("ADDR", "PORT"))
        who = f"{own['HOROVOD_HOSTNAME']}:{own['HOROVOD_LOCAL_RANK']}"
        launcher = http.client.HTTPConnection(address, int(port), timeout=_PATIENCE_SECONDS)
        try:
            launcher.connect()
            launcher.sock.settimeout(None)  # Until all have asked, or the launcher is silent.
            _keep_alive(launcher.sock)
            launcher.request("GET", f"/rank_and_size/{who}")
            values = launcher.getresponse().read().decode().split(",")
        except (OSError, http.client.HTTPException):
            return None
        finally:
            launcher.close()
        found = {f"HOROVOD_{n}": value for n, value in zip(_PLACE, values, strict=True)}
        return None if found["HOROVOD_RANK"] == "-1" else found

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._process is not None:
            self._process.send_signal(number)
        # As a process that has no handler ends.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def _say(self, text: str) -> None:
        print(f"slipstream-elastic: {text}", file=sys.stderr, flush=True)


def _keep_alive(connection: socket.socket) -> None:
    """Has the kernel break a connection whose other host is silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, _PATIENCE_SECONDS // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _ends_with_parent() -> Any:
    """What a child does first, so that the kernel ends it with its parent; None: not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return functools.partial(prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)


def run_under_launcher(command: Sequence[str]) -> int:
    """Runs a command under an elastic launcher; returns its exit code.

    Args:
        command: the program and its arguments; under another launcher, or none, it takes this
            process's place.
    """
    if not is_elastic():
        os.execvp(command[0], list(command))
    return Agent(command, os.environ).run()


def entry_point() -> None:
    """Runs the command that this program's arguments are."""
    if len(sys.argv) < 2 or sys.argv[1] in ("--help", "-h"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    sys.exit(run_under_launcher(sys.argv[1:]))


if __name__ == "__main__":
    entry_point()
