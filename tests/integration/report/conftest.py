"""Fixtures of the report's tests: records like slipstream-train's, and a headless browser.

The browser is Chromium. The tests control it with the DevTools protocol over a pair of pipes, so
that they need no driver, port or package.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 120
BYTES = {"keys": 2e6, "rows": 0, "gradients": 8e6, "deferred": 1e6, "dense": 4e6, "control": 1e5}


def _window(index: int) -> dict[str, Any]:
    """Returns window `index`, with ten steps and 1,000 examples, as a dictionary.

    The form is the result of `WindowReport.to_dict`.
    """
    rows = {
        "offered": 500,
        "sent": 400 - 10 * index,
        "masked": 20 * index,
        "deferred_now": 30 * index,
    }
    return {
        "window": index,
        "step": 10 * (index + 1),
        "examples_seen": 1000,
        "skipped_fraction": 0.04 * index,
        "hot_keys": 100 * bool(index),
        "next_hot_keys": 100 + index,
        "saturated_fraction": 0.1 * index,
        "threshold": 0.5 / (index + 1),
        "hot_set_overlap": 0.9 + 0.01 * index,
        "drift_quantiles": {"0.5": 0.02, "0.9": 0.2} if index else {},
        "drift_histogram": [[0.0, 1e-9, 60], [0.01, 0.018, 30], [0.1, 0.18, 10]] if index else [],
        "traffic": {kind: count / 10 for kind, count in BYTES.items()},
        "tables": [{"table": "t", "rows": rows, "bytes_offered": 12000, "bytes_sent": 9000}],
    }


def _record() -> dict[str, Any]:
    points = [
        {
            "step": 10 * i, "seconds": 2.0 * i,
            "examples_seen": 1000 * i, "examples_trained": 900 * i,
            "loss": 0.6 - 0.01 * i, "auc": 0.5 + 0.02 * i,
        }
        for i in range(1, 9)
    ]  # fmt: skip
    evaluations = [
        {
            **{key: point[key] for key in ("step", "seconds", "examples_seen", "examples_trained")},
            "auc": 0.6 + 0.02 * i, "log_loss": 0.5 - 0.01 * i, "calibration": 0.9,
        }
        for i, point in enumerate(points)
    ]  # fmt: skip
    return {
        "schema": 1,
        "data": "generated",
        "test": {"auc": 0.74, "log_loss": 0.43, "calibration": 0.9},
        "examples": {"seen": 8000, "trained": 7200, "skipped": 800},
        "seconds": {"reading": 1.0, "training": 15.0, "window_ends": 1.0, "evaluation": 3.0},
        "progress": points,
        "evaluations": evaluations,
        "gradient_rows": {"t": {"sent": 3000}, "u": {"sent": 200}},
        "ranks": {"size": 2, "bytes": BYTES},
        "windows": [_window(index) for index in range(8)],
        "settings": {"policies": ["skip_examples"], "seed": 0, "engine": {"defer_max_age": 3}},
        "versions": {"tensorflow": "2.21.0"},
        "machine": {"cores": 2},
    }


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, dict):
        return {
            name: v
            if name in ("schema", "size", "step", "settings", "machine")
            else _scaled(v, factor)
            for name, v in value.items()
        }
    if isinstance(value, list):
        return [_scaled(v, factor) for v in value]
    return factor * value if isinstance(value, (int, float)) and factor != 1.0 else value


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    """Returns a function that makes a record, scaled by `factor`."""
    return lambda factor=1.0: _scaled(copy.deepcopy(_record()), factor)


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[[str, Any], str]:
    """Returns a function that writes a record as a run's metrics.json.

    The function returns the folder of the run.
    """

    def write(name: str, record: Any) -> str:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        text = record if isinstance(record, str) else json.dumps(record)
        (folder / "metrics.json").write_text(text, encoding="utf-8")
        return str(folder)

    return write


class Browser:
    """A headless Chromium with one page."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4. dash
        # supports only one-digit descriptors.
        self._process = subprocess.Popen(
            [
                "bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash",
                program, "--headless", "--no-sandbox", "--hide-scrollbars",
                "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
                f"--user-data-dir={profile}", "about:blank",
            ],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._count, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path | str, width: int) -> None:
        """Opens a file in a window of `width` pixels and clears `events`."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.events = []
        self._call("Page.navigate", url=Path(path).as_uri())
        self._until(lambda: self._seen("Page.loadEventFired"))

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path, x: float, y: float, width: float, height: float) -> None:
        """Writes a part of the page as PNG at twice its size."""
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 2}
        found = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def requests(self) -> list[str]:
        """Returns the URLs that the page requested."""
        found = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in found]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Returns the console messages and opened dialogs."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [e for e in self.events if e["method"] in (*kinds, "Page.javascriptDialogOpening")]

    def close(self) -> None:
        """Closes the browser."""
        os.close(self._write)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def _seen(self, method: str) -> bool:
        return any(event["method"] == method for event in self.events)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        number, answers = self._count, []
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")

        def answered() -> bool:
            answers[:] = [event for event in self.events if event.get("id") == number]
            return bool(answers)

        # Answers are mixed with the events and have no method.
        self._until(answered)
        self.events = [event for event in self.events if "id" not in event]
        assert "error" not in answers[0], (method, answers[0])
        return answers[0]["result"]

    def _until(self, is_true: Callable[[], bool]) -> None:
        end = time.monotonic() + _SECONDS
        while not is_true():
            left = end - time.monotonic()
            assert left > 0 and self._process.poll() is None, "the browser does not respond"
            if not select.select([self._read], [], [], min(left, 1.0))[0]:
                continue
            data = os.read(self._read, 1 << 20)
            assert data, "the browser process has exited"
            *messages, self._buffer = (self._buffer + data).split(b"\0")
            for text in messages:
                self.events.append({"method": "", **json.loads(text)})


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Provides a headless Chromium. Skips the test if none is installed."""
    program = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if program is None:
        pytest.skip(
            f"no browser: {', '.join(_BROWSERS)} are missing (`make test` installs one as root)"
        )
    found = Browser(program, tmp_path_factory.mktemp("profile"))
    try:
        yield found
    finally:
        found.close()
