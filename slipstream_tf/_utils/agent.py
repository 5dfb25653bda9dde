"""Restarts a program when the ranks of an elastic job change.

Usage:

    horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh \\
        slipstream-elastic python train.py

The agent runs the command as a rank of the job. If a rank is lost, the collectives of the command
fail and the command exits. If hosts join or leave, the agent notifies the command, which exits
after its next commit. Then the agent requests a new rank from the launcher and starts the command
again. Otherwise the agent exits with the command's exit code.

Horovod's elastic mode rejoins within the process instead. If another rank is lost meanwhile, an
exception in a background thread terminates that process.

The agent needs Horovod's launcher in Python, but neither TensorFlow nor Horovod's compiled library.
"""

from __future__ import annotations

import ctypes
import functools
import http.client
import importlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

# `rank`, `is_elastic` and `is_on_one_host` read the environment variables that a launcher sets.
# Set by horovodrun (Gloo) and by Open MPI, MPICH or Slurm launchers.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
# "1" if ranks may join and leave a Horovod job.
ELASTIC = "HOROVOD_ELASTIC"


def rank_variable() -> str | None:
    """Returns the name of the environment variable with this process's rank.

    None if the process was not started by a launcher.
    """
    return next((name for name in RANK_VARIABLES if name in os.environ), None)


def rank() -> int | None:
    """Returns this process's rank, from 0, or None without a launcher."""
    variable = rank_variable()
    return None if variable is None else int(os.environ[variable])


def size() -> int:
    """Returns the number of ranks of the job when it started; 1 without a launcher."""
    variable = rank_variable()
    return 1 if variable is None else int(os.environ.get(variable.replace("_RANK", "_SIZE"), 1))


def is_elastic() -> bool:
    """Whether ranks may join and leave (`horovodrun --host-discovery-script`)."""
    return os.environ.get(ELASTIC) == "1"


def is_on_one_host() -> bool:
    """Whether all ranks of the job run on this host."""
    variable = rank_variable()
    if variable is None:
        return True
    local, every = (
        os.environ.get(variable.replace("_RANK", name)) for name in ("_LOCAL_SIZE", "_SIZE")
    )
    return local is not None and local == every


# Exit codes that request a restart: after a commit, and without a commit.
AGAIN, AGAIN_WITHOUT_COMMIT = 75, 76
# Environment variable with the read end of a pipe, which gets a byte when hosts join or leave.
_NOTICE = "SLIPSTREAM_ELASTIC_NOTICE"
# The fields of the launcher's response, in this order.
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
# Maximum number of consecutive starts without a commit.
_MAX_FAILED_STARTS = 10
# Timeout for the launcher.
_PATIENCE_SECONDS = 15
_PR_SET_PDEATHSIG = 1


def is_started_by_agent() -> bool:
    """Whether this process was started by an `Agent`."""
    return _NOTICE in os.environ


def is_noticed() -> bool:
    """Whether hosts have joined or left since this process was started."""
    return bool(select.select([int(os.environ[_NOTICE])], [], [], 0)[0])


class Agent:
    """Starts a command repeatedly, each time with its current rank.

    Args:
        command: The program and its arguments.
        environment: The environment variables set by the launcher.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = {**environment}
        # The agent restarts the command; it must not rejoin by itself.
        del self._environment[ELASTIC]
        self._process: subprocess.Popen[bytes] | None = None
        # Horovod's notification thread writes to this pipe.
        self._notice, self._lock = os.pipe(), threading.Lock()

    def run(self) -> int:
        """Runs the command until it needs no restart; returns its exit code."""
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
            # A negative code is a signal: the command was killed, or could not join because other
            # ranks were lost. Both need a restart.
            if code >= 0 and code not in (AGAIN, AGAIN_WITHOUT_COMMIT):
                return code
            in_vain = 0 if code == AGAIN else in_vain + 1
            if in_vain > _MAX_FAILED_STARTS:
                self._say(
                    f"The command ended {in_vain} times in a row without a commit. Fix the error "
                    "that its last start printed, then start the job again."
                )
                return 1
            place = self._next_place()
            if place is None:
                self._say(
                    "The launcher has ended or has no rank for this process any more. Therefore "
                    "this process ends."
                )
                return 1
            self._environment.update(place)

    def on_hosts_updated(self, timestamp: int, update: Any) -> None:
        """Notifies the command; Horovod's thread calls it when hosts change."""
        with self._lock:
            os.write(self._notice[1], b"!")

    def _start(self) -> int:
        read_end = self._notice[0]
        environment, begin = {**self._environment, _NOTICE: str(read_end)}, _ends_with_parent()
        self._process = subprocess.Popen(
            self._command, env=environment, pass_fds=[read_end], preexec_fn=begin
        )
        return self._process.wait()

    def _next_place(self) -> dict[str, str] | None:
        """Returns the environment variables of the new rank, or None.

        Waits until all remaining processes have requested a rank. None means that the launcher has
        ended or has no rank for this process.
        """
        # Discard earlier notices, because the new rank takes them into account. A later notice may
        # not be included, so the next start must receive it.
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
            # The response may take long. Keep-alive detects a dead launcher.
            launcher.sock.settimeout(None)
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
        # Terminate in the same way as a process without a handler.
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def _say(self, text: str) -> None:
        print(f"slipstream-elastic: {text}", file=sys.stderr, flush=True)


def _keep_alive(connection: socket.socket) -> None:
    """Makes the kernel close a connection to an unresponsive host."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, _PATIENCE_SECONDS // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _ends_with_parent() -> Any:
    """Returns a function that ties a child's life to its parent.

    The kernel kills the child when the parent ends. Pass the function as `preexec_fn`. None on
    systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return functools.partial(prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)


def run_under_launcher(command: Sequence[str]) -> int:
    """Runs a command under an elastic launcher; returns its exit code.

    Args:
        command: The program and its arguments. Without an elastic launcher, it replaces this
            process.
    """
    if not is_elastic():
        os.execvp(command[0], list(command))
    return Agent(command, os.environ).run()


def is_stdout_closed() -> bool:
    """Returns whether the reader of stdout has closed the pipe.

    Later output is dropped then, including the output that the interpreter flushes at exit.
    """
    stdout = sys.stdout.fileno()
    poll = select.poll()
    poll.register(stdout, 0)
    is_closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return is_closed


def entry_point() -> None:
    """Runs the command in this program's arguments."""
    if len(sys.argv) < 2 or sys.argv[1] in ("--help", "-h"):
        try:
            print(__doc__, flush=True)
        except BrokenPipeError:
            is_stdout_closed()
        sys.exit(0 if len(sys.argv) > 1 else 2)
    if shutil.which(sys.argv[1]) is None:
        print(
            f"slipstream-elastic: Invalid command: {sys.argv[1]!r}. Expected a program on PATH, or "
            "the path of an executable file; see --help.",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(run_under_launcher(sys.argv[1:]))


if __name__ == "__main__":
    entry_point()
