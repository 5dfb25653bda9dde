"""Programs that start at once: forks of processes that have imported TensorFlow, Keras and Horovod.

    python warm.py serve SOCKET MODULE ...
    python warm.py run FOLDER PROGRAM ...
    python warm.py run FOLDER -c TEXT ...

Importing takes longer than most of what these tests do. `serve` imports modules, says "ready" and
waits. `run` stands for `python PROGRAM ...`: the program runs in a fork of one of the servers whose
sockets lie in FOLDER, with the caller's environment, folder, network, input and outputs; signals
are passed on, and it ends as the caller does, or the other way round. Where WARM_PYTHON is set, a
program finds it as `sys.executable`.

Programs share nothing but what an import leaves behind: a server that has a second thread, or in
which TensorFlow's runtime has begun, refuses to fork. Variables that are read by imports must be
those of the server. Ranks with even and with odd numbers are forks of different servers, in which
strings have different hashes: ranks that go through a set each in its own order are found out.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import struct
import sys

# Of every environment. conftest.py starts as many.
SERVERS = 2
_LENGTH = struct.Struct("!q")
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
# Of the caller: its input and outputs, and where `ip netns exec` has put it.
_DESCRIPTORS = ("fd/0", "fd/1", "fd/2", "ns/net", "ns/mnt")


def run(folder: str, arguments: list[str]) -> int:
    """Runs a program in a fork of a server; returns its exit code, negative for a signal."""
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{folder}/{int(rank) % SERVERS}")
        told = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
        spaces = [os.open(f"/proc/self/{name}", os.O_RDONLY) for name in _DESCRIPTORS[3:]]
        descriptors = array.array("i", [0, 1, 2, *spaces])
        server.sendmsg(
            [_LENGTH.pack(len(told))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        )
        server.sendall(told)
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        # If this process is killed, the connection ends, and the monitor kills the program.
        answer = _read(server, _LENGTH.size)
    if not answer:
        print(f"warm.py: the server of {folder} has not run {arguments}", file=sys.stderr)
        return 1
    return _LENGTH.unpack(answer)[0]


def serve(address: str, modules: list[str]) -> list[str]:
    """Imports, then forks for every `run`. Returns in the forks alone: the program's arguments."""
    import gc
    import importlib

    for module in modules:
        importlib.import_module(module)
    _require_untouched()
    gc.freeze()  # Collections in forks need not copy what is here already.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Monitors need nobody to wait for them.
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(16)
        listener.settimeout(1.0)
        print("ready", flush=True)
        while os.getppid() == parent:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            _require_untouched()
            if os.fork() == 0:
                listener.close()
                return _monitor(connection)
            connection.close()
    sys.exit(0)


def _require_untouched() -> None:
    """Refuses to fork a process of several threads, or one in which TensorFlow has begun to work.

    Raises:
        RuntimeError: it is one.
    """
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        names = [_read_text(f"/proc/self/task/{thread}/comm").strip() for thread in threads]
        raise RuntimeError(f"{len(threads)} threads before a fork ({names}). Allowed: 1.")
    eager = sys.modules.get("tensorflow.python.eager.context")
    if eager is not None and eager.context_safe() is not None:
        raise RuntimeError("TensorFlow has an eager context before a fork. Allowed: none.")


def _monitor(connection: socket.socket) -> list[str]:
    """Forks once more, for the program. The monitor itself waits for its end, and never returns."""
    connection.settimeout(None)
    room = socket.CMSG_SPACE(len(_DESCRIPTORS) * array.array("i").itemsize)
    head, ancillary, _, _ = connection.recvmsg(_LENGTH.size, room)
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
        _enter(descriptors, environment, folder)
        return arguments
    for descriptor in descriptors:
        os.close(descriptor)
    _wait(program, connection)


def _enter(descriptors: array.array[int], environment: dict[str, str], folder: str) -> None:
    """Puts this process where the caller is."""
    *streams, _, _ = descriptors
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor, name in zip(descriptors[3:], _DESCRIPTORS[3:], strict=True):
        if os.fstat(descriptor).st_ino != os.stat(f"/proc/self/{name}").st_ino:
            import ctypes

            libc = ctypes.CDLL(None, use_errno=True)  # os.setns is new in Python 3.12.
            if libc.setns(descriptor, 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns failed for {name}")
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def _wait(program: int, connection: socket.socket) -> None:
    """Tells the caller how the program ended; ends the program if the caller ends first."""
    import threading

    def pass_on() -> None:
        with contextlib.suppress(OSError):  # It, or its caller, has ended.
            while number := connection.recv(1):
                os.kill(program, number[0])
            os.killpg(program, signal.SIGKILL)

    threading.Thread(target=pass_on, daemon=True).start()
    _, status = os.waitpid(program, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):
        connection.sendall(_LENGTH.pack(code))
    os._exit(0)


def _read(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            return b""
        content += part
    return content


def _read_text(path: str) -> str:
    with open(path) as file:
        return file.read()


def _become(arguments: list[str]) -> None:
    """Runs a program as the interpreter would, in this process."""
    import types

    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # As Python's own generator does by itself.
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    sys.executable = os.environ.get("WARM_PYTHON", sys.executable)
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__)
    if arguments[0] == "-c":
        text, path, sys.path[0] = arguments.pop(1), "<string>", ""
    else:
        path = os.path.abspath(arguments[0])
        text, sys.path[0] = _read_text(path), os.path.dirname(path)
        module.__dict__.update(__file__=path)
    sys.argv[:] = arguments
    sys.modules["__main__"] = module
    exec(compile(text, path, "exec"), module.__dict__)


def main() -> None:
    """See the module's text."""
    task, place, *arguments = sys.argv[1:]
    if task == "run":
        code = run(place, arguments)
        if code < 0:
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
    _become(serve(place, arguments))


if __name__ == "__main__":
    main()
