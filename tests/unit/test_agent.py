"""Tests that an agent restarts its command with new ranks."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream_tf._utils import agent

pytest.importorskip("horovod")
# Appends the rank, the world size and HOROVOD_ELASTIC to the file `started`. Exits with the code of
# this start in the file `codes`.
PROGRAM = """
import os, sys, signal, time
folder = sys.argv[1]
with open(folder + "/started", "a+") as file:
    file.seek(0)
    number = len(file.readlines())
    elastic = os.environ.get("HOROVOD_ELASTIC")
    file.write(f"{os.environ['HOROVOD_RANK']} {os.environ['HOROVOD_SIZE']} {elastic}\\n")
code = int(open(folder + "/codes").read().split()[number])
if code == 1000:
    sys.path.insert(0, sys.argv[2])
    from slipstream_tf._utils import agent
    while not agent.is_noticed():
        time.sleep(0.01)
    code = agent.AGAIN
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Launcher(http.server.ThreadingHTTPServer):
    """Elastic launcher that assigns the given places in order."""

    def __init__(self, places: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.places, self.got, self.put = places, [], []  # type: ignore[var-annotated]
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Launcher

    def do_GET(self) -> None:
        self.server.got.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.places.pop(0).encode())

    def do_PUT(self) -> None:
        self.server.put.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Suppresses the log."""


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    server = Launcher([])
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    reported = {
        "HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": "here", "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(launcher.server_port),
    }  # fmt: skip
    for name, value in reported.items():
        monkeypatch.setenv(name, value)
    return {**os.environ}


def command(folder: Path, codes: list[int]) -> list[str]:
    (folder / "codes").write_text(" ".join(map(str, codes)), encoding="utf-8")
    root = str(Path(agent.__file__).parents[1])
    return [sys.executable, "-S", "-c", PROGRAM, str(folder), root]


def started(folder: Path) -> list[str]:
    return (folder / "started").read_text(encoding="utf-8").splitlines()


def test_agent_stops_after_success_or_error(
    tmp_path: Path, environment: dict[str, str], launcher: Launcher
) -> None:
    for code in (0, 3):
        folder = tmp_path / str(code)
        folder.mkdir()
        assert agent.Agent(command(folder, [code]), environment).run() == code
        # The command runs as in a static job, without HOROVOD_ELASTIC.
        assert started(folder) == ["2 4 None"]
    assert not launcher.got
    assert launcher.put == ["/worker_addresses/here:0"] * 2


def test_agent_restarts_at_new_slot_after_lost_rank_or_signal(
    tmp_path: Path, environment: dict[str, str], launcher: Launcher
) -> None:
    launcher.places = ["0,2,0,1,0,2", "1,3,0,1,1,3", "0,1,0,1,0,1"]
    codes = [agent.AGAIN, agent.AGAIN_WITHOUT_COMMIT, -int(signal.SIGKILL), 0]
    assert agent.Agent(command(tmp_path, codes), environment).run() == 0
    assert started(tmp_path) == ["2 4 None", "0 2 None", "1 3 None", "0 1 None"]
    assert launcher.got == ["/rank_and_size/here:0"] * 3


def test_joining_hosts_are_reported_to_process(
    tmp_path: Path, environment: dict[str, str], launcher: Launcher
) -> None:
    launcher.places = ["0,1,0,1,0,1"]
    own = agent.Agent(command(tmp_path, [1000, 0]), environment)

    def notify() -> None:
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        own.on_hosts_updated(1, None)

    threading.Thread(target=notify).start()
    assert own.run() == 0
    assert started(tmp_path) == ["2 4 None", "0 1 None"]


def test_agent_ends_without_slot_or_launcher(
    tmp_path: Path,
    environment: dict[str, str],
    launcher: Launcher,
    capfd: pytest.CaptureFixture[str],
) -> None:
    launcher.places = ["-1,-1,-1,-1,-1,-1"]
    assert agent.Agent(command(tmp_path, [agent.AGAIN]), environment).run() == 1
    assert "has no rank for this process" in capfd.readouterr().err
    (tmp_path / "started").unlink()
    launcher.server_close()
    launcher.shutdown()
    gone = {**environment, "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}
    assert agent.Agent(command(tmp_path, [agent.AGAIN]), gone)._next_place() is None


def test_restarts_without_commit_are_limited(
    tmp_path: Path,
    environment: dict[str, str],
    launcher: Launcher,
    capfd: pytest.CaptureFixture[str],
) -> None:
    launcher.places = ["0,1,0,1,0,1"] * 20
    codes = [agent.AGAIN_WITHOUT_COMMIT] * 5 + [agent.AGAIN] + [agent.AGAIN_WITHOUT_COMMIT] * 11
    assert agent.Agent(command(tmp_path, codes), environment).run() == 1
    assert len(started(tmp_path)) == 17
    assert "The command ended 11 times in a row without a commit" in capfd.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux ends children so")
def test_process_ends_with_agent(tmp_path: Path, environment: dict[str, str]) -> None:
    wait = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    child_command = [sys.executable, "-S", "-c", wait]
    program = f"from slipstream_tf._utils import agent; agent.run_under_launcher({child_command!r})"
    environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    own = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert own.stdout is not None
    child = int(own.stdout.readline())
    own.kill()
    own.wait()
    own.stdout.close()
    for _ in range(200):
        try:
            state = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").split()[2]
        except OSError:
            return
        if state == "Z":  # The process has ended, but its exit status was not read.
            return
        time.sleep(0.05)
    raise AssertionError("It goes on.")


def test_command_replaces_agent_without_elastic_launcher() -> None:
    program = [sys.executable, "-m", "slipstream_tf._utils.agent", sys.executable, "-c", "print(7)"]
    environment = {n: v for n, v in os.environ.items() if not n.startswith("HOROVOD_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_unknown_command_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream-elastic", "no-such-program", "train.py"])
    with pytest.raises(SystemExit, match="2"):
        agent.entry_point()
    assert "Invalid command: 'no-such-program'. Expected a program on" in capsys.readouterr().err
