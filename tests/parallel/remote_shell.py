"""Replaces ssh. Runs commands on another host and detects silent hosts.

    remote_shell.py serve                 runs the commands that it receives, until it is killed
    remote_shell.py OPTIONS HOST COMMAND  runs a command and exits with its exit code, or with 255

The options are the options of ssh. The caller detects a silent host after 15 seconds, like ssh with
ServerAliveInterval=5 and ServerAliveCountMax=3. The command on the silent host continues.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import BinaryIO

PORT = 7722
_NO_ANSWER = 255
# First byte of a server message: output follows, or the exit code of the command.
_OUTPUT, _ENDED = b"o", b"e"


def serve() -> None:
    """Runs commands, each in its own process group."""
    with socket.create_server(("0.0.0.0", PORT), backlog=64) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection: socket.socket) -> None:
    command = connection.makefile("rb").readline().decode().rstrip("\n")
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    threading.Thread(target=_hang_up, args=(connection, process), daemon=True).start()
    is_heard = True
    while data := process.stdout.read1(65536):
        try:
            if is_heard:
                connection.sendall(_OUTPUT + len(data).to_bytes(4, "big") + data)
        except OSError:
            is_heard = False
    code = process.wait()
    if is_heard:
        connection.sendall(_ENDED + (code % 256).to_bytes(4, "big"))
    connection.close()


def _hang_up(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Terminates the command if its caller closes the connection."""
    try:
        if not connection.recv(1):
            os.killpg(process.pid, signal.SIGTERM)
    except OSError:
        return


def call(host: str, command: str) -> int:
    """Runs a command on a host and returns its exit code."""
    try:
        connection = socket.create_connection((host, PORT), 15.0)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.sendall(command.encode() + b"\n")
        return _pass_on(connection.makefile("rb"))
    except OSError:
        return _NO_ANSWER


def _pass_on(stream: BinaryIO) -> int:
    while (kind := stream.read(1)) == _OUTPUT:
        sys.stdout.buffer.write(stream.read(int.from_bytes(stream.read(4), "big")))
        sys.stdout.buffer.flush()
    return int.from_bytes(stream.read(4), "big") if kind == _ENDED else _NO_ANSWER


def main() -> int:
    """Runs the server or the caller. See the module's docstring."""
    arguments = sys.argv[1:]
    if arguments[0] == "serve":
        serve()
    while arguments[0] in ("-o", "-p", "-i"):
        del arguments[:2]
    return call(arguments[0], " ".join(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
