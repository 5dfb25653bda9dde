"""Takes the screenshots of the documentation from the runs of docs/tutorials/skipping.md.

    python docs/pictures/screenshots.py FOLDER

FOLDER is the folder in which the commands of the tutorial ran, with `--tensorboard=board` for the
run "predicted". The program writes report.png and tensorboard.png to its folder. It requires
Chromium and TensorBoard.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
_WIDTH = 1280


def shoot(address: str, name: str, height: int, seconds: float) -> None:
    """Writes a screenshot of a page, some seconds after the page is opened."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Neither chromium nor google-chrome is on PATH.")
    options = [
        *("--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"),
        *(f"--window-size={_WIDTH},{height}", f"--virtual-time-budget={int(1000 * seconds)}"),
        f"--screenshot={HERE / name}",
    ]
    subprocess.run([browser, *options, address], check=True, capture_output=True)


def free_port() -> int:
    """Returns a free port on the loopback interface."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def shoot_board(folder: pathlib.Path) -> None:
    """Takes a screenshot of TensorBoard for a log folder."""
    port = free_port()
    address = f"http://127.0.0.1:{port}/"
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", f"--logdir={folder.name}", f"--port={port}"],
        cwd=folder.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(120):
            try:
                if len(json.load(urllib.request.urlopen(address + "data/runs"))):
                    break
            except (urllib.error.URLError, ConnectionError):
                pass
            time.sleep(0.5)
        else:
            raise SystemExit(f"TensorBoard found no run in {folder}.")
        shoot(f"{address}#timeseries", "tensorboard.png", 1000, 30)
    finally:
        server.terminate()
        server.wait()


def main() -> int:
    """Takes both screenshots and returns the exit code."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    folder = pathlib.Path(sys.argv[1]).resolve()
    shoot((folder / "runs/report/report.html").as_uri(), "report.png", 1000, 5)
    shoot_board(folder / "board")
    return 0


if __name__ == "__main__":
    sys.exit(main())
