"""Hosts in a private network of Linux network namespaces on this machine.

`Hosts` receives the number of hosts and the speed of their links. It runs a Horovod job with one
rank per host, reads the kernel's byte counters, and can cut links. It needs root, `ip` and `tc`.

Every host is a namespace with one interface, `INTERFACE`. Its link leads to a bridge in a separate
namespace, the switch, which also runs Horovod's rendezvous server. Therefore a cut link isolates
only its host. The network is invisible outside the namespaces.

    with Hosts(2, rate="1gbit") as hosts:
        job = hosts.start(["program.py"])
        for rank in job.wait(timeout=60.0): ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

INTERFACE = "eth0"
COUNTERS = f"/sys/class/net/{INTERFACE}/statistics"
_SWITCH_ADDRESS = "10.77.0.254"
_NETNS = Path("/etc/netns")
_NUMBERS = itertools.count()
# Prints its port, then serves until it is killed.
_RENDEZVOUS = """
import sys, time
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
addresses = sys.argv[1:]
server = RendezvousServer()
port = server.start()
plan = parse_hosts(",".join(address + ":1" for address in addresses))
server.init(get_host_assignments(plan, len(addresses)))
print(port, flush=True)
time.sleep(1e6)
"""
# Moves a process from a host back to its caller's namespaces. Forks of warm.py's servers enter a
# host with the same system call.
_ENTER = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name in ("net", "mnt"):
    if libc.setns(os.open(f"/proc/{os.getppid()}/ns/{name}", os.O_RDONLY), 0) != 0:
        raise SystemExit(f"setns {name}: {os.strerror(ctypes.get_errno())}")
"""


def unavailable() -> str | None:
    """Returns why hosts cannot be created here, or None.

    Root in a container may lack a capability that a host needs. Therefore this function creates one
    host.
    """
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"no {' and no '.join(missing)}: install iproute2"
    try:
        with Hosts(1, rate="1gbit") as probe:
            _run("ip", "netns", "exec", probe.names[0], sys.executable, "-S", "-c", _ENTER)
    except (OSError, RuntimeError) as error:
        return f"no hosts of network namespaces here: {str(error).splitlines()[-1].strip()}"
    return None


@dataclasses.dataclass(frozen=True)
class EndedRank:
    """The end of one rank.

    Attributes:
        code: Exit code. A negative number is the signal that ended the rank.
        output: Standard output and standard error.
        seconds: Time since the start of the job or the last `Job.reset_clock`.
        killed: The rank did not end by itself in time.
    """

    code: int
    output: str
    seconds: float
    killed: bool


class Job:
    """Running ranks, one on each host."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]):
        """Receives the processes and the output files, by rank."""
        self.processes, self._outputs = list(processes), list(outputs)
        self._start = time.monotonic()

    def reset_clock(self) -> None:
        """Makes `EndedRank.seconds` count from now."""
        self._start = time.monotonic()

    def output(self, rank: int) -> str:
        """Returns the output of a rank so far."""
        return self._outputs[rank].read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout: float = 120.0) -> None:
        """Waits until every rank has written a text.

        Args:
            text: Text that must appear in the output of every rank.
            timeout: Time limit in seconds.

        Raises:
            TimeoutError: A rank has not written the text in time, or has ended without it.
        """
        deadline = time.monotonic() + timeout
        waiting = set(range(len(self.processes)))
        while waiting:
            waiting = {rank for rank in waiting if text not in self.output(rank)}
            over = [rank for rank in waiting if self.processes[rank].poll() is not None]
            if over or (waiting and time.monotonic() > deadline):
                outputs = "\n".join(self.output(rank) for rank in sorted(waiting))
                raise TimeoutError(f"Ranks {sorted(waiting)} did not write {text!r}:\n{outputs}")
            time.sleep(0.05)

    def wait(self, timeout: float, ranks: Sequence[int] | None = None) -> list[EndedRank]:
        """Waits for the end of ranks, then kills the others.

        Args:
            timeout: Time limit in seconds.
            ranks: Ranks to wait for. None waits for all ranks.

        Returns:
            The end of every rank, in order.
        """
        deadline = time.monotonic() + timeout
        awaited = set(range(len(self.processes)) if ranks is None else ranks)
        seconds: dict[int, float] = {}
        while not awaited <= set(seconds) and time.monotonic() < deadline:
            for rank, process in enumerate(self.processes):
                if rank not in seconds and process.poll() is not None:
                    seconds[rank] = time.monotonic() - self._start
            time.sleep(0.05)
        now = time.monotonic() - self._start
        killed = set(range(len(self.processes))) - set(seconds)
        self.kill()
        return [
            EndedRank(process.returncode, self.output(rank), seconds.get(rank, now), rank in killed)
            for rank, process in enumerate(self.processes)
        ]

    def kill(self) -> None:
        """Kills all ranks at once, with their child processes."""
        for process in self.processes:
            _kill(process)


class Hosts:
    """Hosts linked by a switch. A context manager."""

    def __init__(self, count: int, rate: str | None = None):
        """Configures the hosts. `__enter__` creates them.

        Args:
            count: Number of hosts, 1 to 200.
            rate: Speed of each link in each direction in the syntax of `tc`, for example "1gbit".
                None does not limit the speed.
        """
        if not 1 <= count <= 200:
            raise ValueError(f"Invalid `count`: {count!r}. Expected an integer from 1 to 200.")
        prefix = f"slip{os.getpid()}x{next(_NUMBERS)}"
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self.names = [f"{prefix}h{number}" for number in range(count)]
        self._switch = f"{prefix}switch"
        self._rate = rate
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as cleanup:
            self._folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
            self._make_switch(cleanup)
            for number in range(len(self.names)):
                self._make_host(number, cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> Job:
        """Starts a Python program as a Horovod job, one rank per host.

        The job uses Gloo.

        Args:
            arguments: Arguments of the Python interpreter: the program's file and its arguments.
            environment: Variables in addition to the variables of this process and of Horovod.
            wrapper: Command that starts the interpreter, for example taskset.
        """
        port = self._start_rendezvous()
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        processes, outputs = [], []
        for rank, name in enumerate(self.names):
            outputs.append(folder / f"rank{rank}.txt")
            command = ["ip", "netns", "exec", name, *wrapper, sys.executable, *arguments]
            with outputs[-1].open("wb") as output:
                process = subprocess.Popen(
                    command,
                    env=self._environment(rank, port, environment or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._cleanup.callback(_kill, process)
            processes.append(process)
        return Job(processes, outputs)

    def sent_bytes(self, number: int) -> int:
        """Returns the bytes that a host has sent, from its kernel counter."""
        return int(_run("ip", "netns", "exec", self.names[number], "cat", f"{COUNTERS}/tx_bytes"))

    def cut(self, number: int) -> None:
        """Cuts the link of a host.

        Packets are lost without an error.
        """
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "down")

    def mend(self, number: int) -> None:
        """Restores the link of a host after `cut`."""
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "up")

    def _make_switch(self, cleanup: contextlib.ExitStack) -> None:
        _add_namespace(self._switch, cleanup)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "addr", "add", f"{_SWITCH_ADDRESS}/24", "dev", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")

    def _make_host(self, number: int, cleanup: contextlib.ExitStack) -> None:
        name, address, port = self.names[number], self.addresses[number], f"port{number}"
        _add_namespace(name, cleanup)
        _run(
            "ip", "-n", self._switch, "link", "add", port, "type", "veth",
            "peer", "name", INTERFACE, "netns", name,
        )  # fmt: skip
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        if self._rate is not None:
            shape = ["tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shape)
            _run("tc", "-n", self._switch, "qdisc", "add", "dev", port, "root", *shape)
        # `ip netns exec` mounts these files over the files in /etc. Horovod resolves the machine's
        # name and must find the address of the link instead of a loopback address.
        folder = _NETNS / name
        folder.mkdir(parents=True)
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
        (folder / "hosts").write_text(hosts, encoding="utf-8")

    def _start_rendezvous(self) -> int:
        command = ["ip", "netns", "exec", self._switch, sys.executable, "-c", _RENDEZVOUS]
        server = subprocess.Popen(
            [*command, *self.addresses], stdout=subprocess.PIPE, start_new_session=True
        )
        self._cleanup.callback(_kill, server)
        assert server.stdout is not None
        return int(server.stdout.readline())

    def _environment(self, rank: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
        size = str(len(self.names))
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")
        }
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "HOROVOD_HOSTNAME": self.addresses[rank],
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": size,
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_CROSS_RANK": str(rank),
            "HOROVOD_CROSS_SIZE": size,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": INTERFACE,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": _SWITCH_ADDRESS,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            **extra,
        }


def _add_namespace(name: str, cleanup: contextlib.ExitStack) -> None:
    _run("ip", "netns", "add", name)
    cleanup.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
