"""Ranks that start at once: forks of a process that has imported TensorFlow, Keras and Horovod.

Importing takes longer than most of what these tests do. `python warm.py serve SOCKET` imports and
waits; `python warm.py run SOCKET PROGRAM ...` stands for `python PROGRAM ...`: the program runs in a
fork of the server, with the caller's environment, folder, input and outputs, and ends as the caller
does, or the other way round. Nothing is shared between programs: no op has run before the fork.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import struct
import sys

_LENGTH = struct.Struct("!q")


def run(address: str, arguments: list[str]) -> int:
    """Runs a program in a fork of the server; returns its exit code, negative for a signal."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        told = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
        descriptors = array.array("i", [0, 1, 2])
        server.sendmsg(
            [_LENGTH.pack(len(told))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        )
        server.sendall(told)
        # If this process is killed, the connection ends, and the monitor kills the program.
        answer = _read(server, _LENGTH.size)
    return _LENGTH.unpack(answer)[0] if answer else 1


def serve(address: str) -> list[str]:
    """Imports, then forks for every `run`. Returns in the forks alone: the program's arguments."""
    import horovod.tensorflow  # noqa: F401
    import keras  # noqa: F401
    import numpy  # noqa: F401
    import tensorflow  # noqa: F401

    import slipstream_tf  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Monitors need nobody to wait for them.
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(1.0)
        print("ready", flush=True)
        while os.getppid() == parent:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                listener.close()
                return _monitor(connection)
            connection.close()
    sys.exit(0)


def _monitor(connection: socket.socket) -> list[str]:
    """Forks once more, for the program. The monitor itself waits for its end, and never returns."""
    connection.settimeout(None)
    head, ancillary, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_SPACE(3 * 4))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data)
    arguments, environment, folder = json.loads(_read(connection, _LENGTH.unpack(head)[0]))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        connection.close()
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        return arguments
    for descriptor in descriptors:
        os.close(descriptor)
    _wait(program, connection)


def _wait(program: int, connection: socket.socket) -> None:
    """Tells the caller how the program ended; ends the program if the caller ends first."""
    import threading

    def kill_with_caller() -> None:
        if not connection.recv(1):
            os.killpg(program, signal.SIGKILL)

    threading.Thread(target=kill_with_caller, daemon=True).start()
    _, status = os.waitpid(program, 0)
    code = os.waitstatus_to_exitcode(status)
    try:
        connection.sendall(_LENGTH.pack(code))
    except OSError:
        pass
    os._exit(0)


def _read(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            return b""
        content += part
    return content


def _become(arguments: list[str]) -> None:
    """Runs a program as the interpreter would, in this process."""
    import runpy

    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folder = os.path.dirname(os.path.abspath(arguments[0]))
    sys.path[:] = list(dict.fromkeys([folder, *filter(None, paths), *sys.path[1:]]))
    sys.argv[:] = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    """See the module's text."""
    task, address, *arguments = sys.argv[1:]
    if task == "run":
        code = run(address, arguments)
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
    _become(serve(address))


if __name__ == "__main__":
    main()
