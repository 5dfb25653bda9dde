"""A cluster of network namespaces whose hosts fail, leave and join.

The cluster runs a command and records its output lines with their times. Meanwhile a test can kill
ranks and can cut off, remove and add hosts. Host 0 runs Horovod's launcher, which starts ranks with
remote_shell.py in place of ssh.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_REMOTE = Path(__file__).with_name("remote_shell.py")
_SSH = f'#!/bin/sh\nexec {sys.executable} -S {_REMOTE} "$@"\n'
# Flags of slipstream-train: a small model, and the placement of the tables.
SMALL = ("--batch_size=512", "--dim=8", "--bottom=32", "--mlp=32", "--checkpoint_every=75")
WAYS = {
    "replicated": ("--placement=replicated",),
    "sharded": (
        "--placement=sharded", "--policies=skip_examples,defer_gradients", "--warmup=0.05",
    ),
}  # fmt: skip
_GOES_ON = "Training continues from step"
# Maximum number of seconds until training continues after each event, for busy machines.
WITHIN = {"kill": 60.0, "kill agent": 60.0, "silence": 120.0, "join": 90.0, "leave": 90.0}
_DISCOVER = "#!/bin/sh\ncat FOLDER/hosts\n"


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the job's output.

    Attributes:
        at: The time of the line, from `time.monotonic`.
        text: The line.
    """

    at: float
    text: str


class ElasticCluster:
    """Hosts with one rank each, and a host with the launcher.

    Host 0 runs the launcher. Hosts 1 to `count` run ranks. Only hosts that are up have a rank.

    Args:
        network: `hosts.Hosts(count + 1)`, entered as a context manager.
        folder: Folder for the files of the cluster.
        up: Hosts that are up at the start.
    """

    def __init__(self, network: Any, folder: Path, up: Sequence[int]) -> None:
        self._network, self._folder = network, folder
        self.lines: list[Line] = []
        self._process: subprocess.Popen[str] | None = None
        self._servers: list[subprocess.Popen[bytes]] = []
        self.up: set[int] = set()
        self.set_up(up)
        for name, text in (("ssh", _SSH), ("discover", _DISCOVER)):
            path = folder / name
            path.write_text(text.replace("FOLDER", str(folder)), encoding="utf-8")
            path.chmod(0o755)

    def set_up(self, up: Sequence[int]) -> None:
        """Sets the hosts that the launcher uses from now on."""
        self.up = set(up)
        text = "".join(f"{self._network.addresses[host]}:1\n" for host in sorted(up))
        # Replace the file atomically, because the launcher must not read half of the new text.
        unfinished = self._folder / "hosts.part"
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, self._folder / "hosts")

    def start(self, command: Sequence[str], maximum: int) -> None:
        """Starts a job of 1 to `maximum` ranks.

        The command starts in the cluster's folder. In another folder, `python -m` could find
        sources that are not built.
        """
        for name in self._network.names[1:]:
            serve = [sys.executable, "-S", str(_REMOTE), "serve"]
            self._servers.append(
                subprocess.Popen(["ip", "netns", "exec", name, *serve], cwd=self._folder)
            )
        # The launcher connects to hosts that may be silent. See docs/clusters.md.
        inside = ["ip", "netns", "exec", self._network.names[0]]
        retries = "echo 2 > /proc/sys/net/ipv4/tcp_syn_retries"
        subprocess.run([*inside, "sh", "-c", retries], check=False)
        launcher = [
            *inside,
            str(Path(sys.executable).parent / "horovodrun"), "--gloo",
            "-np", str(len(self.up)), "--min-np", "1", "--max-np", str(maximum),
            "--host-discovery-script", str(self._folder / "discover"),
            "--network-interface", "eth0", "--blacklist-cooldown-range", "1", "2",
        ]  # fmt: skip
        environment = {
            **{n: v for n, v in os.environ.items() if not n.startswith("HOROVOD_")},
            "PATH": f"{self._folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        self._process = subprocess.Popen(
            [*launcher, *command],
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self.lines += [Line(time.monotonic(), part) for part in line.rstrip().split("\r")]

    def wait_for(self, text: str, timeout: float, since: float = 0.0) -> float:
        """Waits for a line with `text` that is later than `since`.

        Returns:
            The seconds from `since` to the line.

        Raises:
            TimeoutError: No such line appeared in time, or the job has ended.
        """
        assert self._process is not None
        begin = time.monotonic()
        while time.monotonic() < begin + timeout:
            for line in list(self.lines):
                if line.at > since and text in line.text:
                    return line.at - since
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise TimeoutError(f"The job did not print {text!r} within {timeout:g} s:\n{self.output()}")

    def wait(self, timeout: float) -> int:
        """Waits for the end of the job and returns its exit code."""
        assert self._process is not None
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"The job did not end within {timeout:g} s:\n{self.output()}"
            ) from None

    @property
    def is_running(self) -> bool:
        """Whether the job is still running."""
        return self._process is not None and self._process.poll() is None

    def output(self) -> str:
        """Returns the last lines of the output."""
        shown = [line.text for line in self.lines if "examples/s" not in line.text]
        return "\n".join(shown[-80:])

    def processes_of(self, host: int) -> list[int]:
        """Returns the Python processes on a host, oldest first."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._network.names[host]],
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        found = []
        for process in map(int, listed):
            try:
                name = Path(f"/proc/{process}/comm").read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if name.startswith(("python", "slipstream")):
                found.append(process)
        return sorted(found)

    def has_rank(self, host: int) -> bool:
        """Whether a host runs a process other than the remote shell server.

        The server is the oldest process.
        """
        return len(self.processes_of(host)) > 1

    def kill(self, host: int, agent: bool = False) -> None:
        """Kills the rank on a host, or the agent that started it."""
        own = self.processes_of(host)[1:]
        os.kill(own[0] if agent else own[-1], signal.SIGKILL)

    def silence(self, host: int) -> None:
        """Cuts a host's link without changing the launcher's list of hosts."""
        self._network.cut(host)

    def mend(self, host: int) -> None:
        """Restores the link of a host after `silence`."""
        self._network.mend(host)

    def close(self) -> None:
        """Ends the job and all of its processes."""
        if self._process is not None:
            for host in range(len(self._network.names)):
                for process in self.processes_of(host):
                    try:
                        os.kill(process, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            self._process.wait()
        for server in self._servers:
            server.wait()


@dataclasses.dataclass(frozen=True)
class Event:
    """An event that happened to a cluster.

    Attributes:
        what: "kill", "kill agent", "silence", "join" or "leave".
        hosts: Number of hosts in the launcher's list after the event.
        seconds: Time until training continued.
    """

    what: str
    hosts: int
    seconds: float


class RandomEvents:
    """Random events on a cluster of 4 hosts, one after another.

    Args:
        cluster: A cluster of hosts 1 to 4.
        seed: Seed of the random choices.
        commits: Folder of the job's checkpoints.
    """

    def __init__(self, cluster: ElasticCluster, seed: int, commits: Path) -> None:
        self._cluster, self._random, self._commits = cluster, random.Random(seed), commits
        self.took: list[Event] = []

    def event(self) -> None:
        """Triggers one event and waits until training has continued."""
        cluster, up = self._cluster, sorted(self._cluster.up)
        possible = ["kill", *(["join"] * 2 if len(up) < 4 else [])]
        # A job ends with its last agent.
        if len(up) > 1:
            possible += ["kill agent", "silence", "leave"]
        what, host = self._random.choice(possible), self._random.choice(up)
        since = time.monotonic()
        if what in ("kill", "kill agent"):
            cluster.kill(host, agent=what == "kill agent")
        elif what == "join":
            host = min({1, 2, 3, 4} - set(up))
            cluster.mend(host)
            cluster.set_up([*up, host])
        else:
            if what == "silence":
                cluster.silence(host)
                # The launcher polls its hosts and needs some seconds to notice the change.
                time.sleep(5.0)
            cluster.set_up([other for other in up if other != host])
        seconds = cluster.wait_for(_GOES_ON, WITHIN[what], since)
        self.took.append(Event(what, len(cluster.up), round(seconds, 1)))

    def wait_for_commit(self) -> int:
        """Waits until all hosts have ranks, and then for a new checkpoint.

        Returns:
            The number of the checkpoint.
        """
        # After the death of a rank the launcher does not use its host for a while.
        deadline = time.monotonic() + 60.0
        while not all(map(self._cluster.has_rank, self._cluster.up)):
            if time.monotonic() > deadline or not self._cluster.is_running:
                raise TimeoutError(f"A host has no rank yet:\n{self._cluster.output()}")
            time.sleep(0.05)
        newest = self._newest()
        while self._newest() == newest:
            if time.monotonic() > deadline or not self._cluster.is_running:
                raise TimeoutError(f"No new checkpoint was saved:\n{self._cluster.output()}")
            time.sleep(0.05)
        return self._newest()

    def _newest(self) -> int:
        found = self._commits.glob("checkpoint-*")
        return max((int(path.name.partition("-")[2]) for path in found), default=0)


def disturb(
    hosts: Any, folder: Path, train: Sequence[str], seed: int, events: int, last: int | None = None
) -> tuple[list[Event], dict[str, Any]]:
    """Runs an elastic job with random events, first on two hosts.

    Args:
        hosts: The module hosts.py.
        folder: Folder for all files.
        train: Command of slipstream-train with its flags, except --elastic and --output.
        seed: Seed of the choice of events.
        events: Maximum number of events.
        last: Number of the last checkpoint after which an event happens. A job fails if a rank
            fails while others complete it.

    Returns:
        The events after which training continued, and the job's metrics.json.

    Raises:
        TimeoutError: Training did not continue in time, or the job ended before any event.
        RuntimeError: The job failed.
    """
    output = folder / "run"
    with hosts.Hosts(5) as network:
        cluster = ElasticCluster(network, folder, up=[1, 2])
        try:
            cluster.start([*train, "--elastic", f"--output={output}"], maximum=4)
            happened = RandomEvents(cluster, seed, output / "checkpoints")
            try:
                for _ in range(events):
                    if happened.wait_for_commit() > (last or math.inf):
                        break
                    happened.event()
            except TimeoutError:
                # On a fast machine, the job can end before the last event.
                if cluster.is_running or not happened.took:
                    raise
            if cluster.wait(600.0):
                raise RuntimeError(f"The job failed:\n{cluster.output()}")
        finally:
            cluster.close()
    record = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    return happened.took, record
