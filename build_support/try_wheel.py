"""Tests a wheel in clean Debian systems without a compiler.

    python build_support/try_wheel.py --debian=bookworm,trixie --tensorflow=2.18,2.19,2.20,2.21

The program installs the wheel from dist/ in a chroot and trains with it. It needs debootstrap and
root privileges. This Python's pip downloads the packages outside of the chroot. The program prints
a line per Debian and TensorFlow. The exit code is nonzero if the wheel does not work, and 75 if a
Debian system cannot be created.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from wheels import RELEASES, ROOT

_WORK = ROOT / "build" / "debian"
_MIRROR = "http://deb.debian.org/debian"
_TIMEOUT_SECONDS = 20.0
_NO_DEBIAN = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure.
_STEP = "slipstream-train --data=generated:20000 --output=/tmp/run"


class Debian:
    """A minimal Debian system with Python and without a compiler.

    Args:
        suite: Name of the release, for example "bookworm".
        mirror: URL of the package mirror.

    Attributes:
        root: Root folder of the system.
        python: Version of its Python, for example "3.11".
    """

    def __init__(self, suite: str, mirror: str) -> None:
        self.root = _WORK / suite
        whole = self.root / "whole"
        if not whole.exists():
            print(f"Creating Debian {suite}", flush=True)
            self.root.mkdir(parents=True, exist_ok=True)
            included = "--include=python3,python3-venv"
            command = ["debootstrap", "--variant=minbase", included, suite, self.root, mirror]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            whole.touch()
        self.python = self.run("python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'")
        if self.run("command -v g++ gcc cc || true"):
            raise RuntimeError(f"{self.root} has a compiler.")

    def run(self, command: str) -> str:
        """Runs a shell command in the system and returns its output.

        Raises:
            RuntimeError: If the command fails. The message contains the output.
        """
        # The mounts disappear with the process, because `unshare` gives it a mount namespace.
        inside = (
            'mount --bind /proc "$0/proc" && mount --bind /dev "$0/dev" && '
            'exec chroot "$0" /usr/bin/env -i HOME=/root TF_CPP_MIN_LOG_LEVEL=3 '
            'PATH=/usr/local/bin:/usr/bin:/bin sh -ec "$1"'
        )
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", inside, self.root, command],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command!r} failed: {(done.stdout + done.stderr)[-3000:]}")
        return done.stdout.strip()


def download(debian: Debian, release: str, wheel: Path) -> bool:
    """Downloads a TensorFlow release and the requirements of the wheel.

    Returns:
        Whether the release exists for the Python version of the system.

    Raises:
        RuntimeError: If the download fails for another reason.
    """
    folder = debian.root / "wheels"
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--only-binary=:all:", f"--python-version={debian.python}", f"--dest={folder}",
        f"tensorflow-cpu=={release}.*", wheel,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution found for tensorflow-cpu" not in done.stderr:
        raise RuntimeError(done.stderr)
    return not done.returncode


def try_one(debian: Debian, release: str, wheel: Path) -> float:
    """Installs the wheel and trains with it.

    Returns:
        Seconds to install the wheel, without TensorFlow.

    Raises:
        RuntimeError: If a command fails.
    """
    python = f"/{release}/bin/python"
    install = f"{python} -m pip install --quiet --no-index --find-links=/wheels"
    debian.run(f"rm -rf /{release}; python3 -m venv /{release}")
    debian.run(f"{install} 'tensorflow-cpu=={release}.*'")
    begin = time.perf_counter()
    debian.run(f"{install} /wheels/{wheel.name}")
    seconds = time.perf_counter() - begin
    debian.run(f"/{release}/bin/slipstream-doctor")
    debian.run(f"rm -rf /tmp/run; /{release}/bin/{_STEP}")
    debian.run(f"rm -rf /{release}")
    return seconds


def main() -> int:
    """Tests the wheel and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--debian",
        default="bookworm,trixie",
        help="Debian suites, separated by commas; default: %(default)s",
    )
    parser.add_argument(
        "--tensorflow",
        default=",".join(RELEASES),
        help="releases of TensorFlow, separated by commas; default: %(default)s",
    )
    parser.add_argument(
        "--mirror", default=_MIRROR, help="URL of the Debian mirror; default: %(default)s"
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        default=ROOT / "dist",
        help="folder of the wheels; default: %(default)s",
    )
    chosen = parser.parse_args()
    (wheel,) = chosen.wheels.glob("*.whl")
    works = 0
    for suite in chosen.debian.split(","):
        try:
            debian = Debian(suite, chosen.mirror)
        except subprocess.CalledProcessError as error:
            print(f"Debian {suite} could not be created from {chosen.mirror}: {error}", flush=True)
            return _NO_DEBIAN
        for release in chosen.tensorflow.split(","):
            reported = f"Debian {suite}, Python {debian.python}, TensorFlow {release}"
            if not download(debian, release, wheel):
                print(f"{reported}: this Python has no TensorFlow {release}", flush=True)
                continue
            seconds = try_one(debian, release, wheel)
            print(f"{reported}: works; installed in {seconds:.1f} s", flush=True)
            if seconds > _TIMEOUT_SECONDS:
                raise SystemExit(f"Installing took more than {_TIMEOUT_SECONDS:g} s.")
            works += 1
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main())
