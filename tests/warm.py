"""Starts programs fast, as forks of servers that have imported TensorFlow.

    python warm.py serve SOCKET MODULE ...
    python warm.py run FOLDER PROGRAM ...
    python warm.py run FOLDER -c TEXT ...

These imports take longer than most tests. `serve` imports the modules, prints "ready" and waits for
connections. `run` replaces `python PROGRAM ...`: it connects to one of the servers whose sockets
are in FOLDER, and the program runs in a fork of that server, with the caller's environment, working
directory, network namespace and standard streams. Signals are forwarded. The caller exits with the
program's exit code, and the program is killed if the caller ends first. If WARM_PYTHON is set, its
value becomes `sys.executable` of the program.

Programs share only the state that an import leaves behind. A server with a second thread, or with
an initialized TensorFlow runtime, refuses to fork. Note: environment variables that imports read
must be equal in the server and in the caller. Ranks with even and odd numbers are forks of two
servers with different string hashes. Therefore tests detect ranks that depend on the iteration
order of a set.
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

# Number of servers per environment. conftest.py starts the same number.
SERVERS = 2
_LENGTH = struct.Struct("!q")
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
# Descriptors of the caller: its standard streams and the namespaces that `ip netns exec` sets.
_DESCRIPTORS = ("fd/0", "fd/1", "fd/2", "ns/net", "ns/mnt")


def run(folder: str, arguments: list[str]) -> int:
    """Runs a program in a fork of a server.

    Returns:
        The exit code, negative if a signal ended the program.
    """
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"{folder}/{int(rank) % SERVERS}")
        reported = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
        spaces = [os.open(f"/proc/self/{name}", os.O_RDONLY) for name in _DESCRIPTORS[3:]]
        descriptors = array.array("i", [0, 1, 2, *spaces])
        server.sendmsg(
            [_LENGTH.pack(len(reported))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        )
        server.sendall(reported)
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        # If this process is killed, the connection closes and the monitor kills the program.
        answer = _read(server, _LENGTH.size)
    if not answer:
        print(f"warm.py: the server of {folder} has not run {arguments}", file=sys.stderr)
        return 1
    return _LENGTH.unpack(answer)[0]


def serve(address: str, modules: list[str]) -> list[str]:
    """Imports the modules, then forks once for every `run`.

    Returns:
        The program's arguments. Only the forks return. The server itself exits.
    """
    import gc
    import importlib

    for module in modules:
        importlib.import_module(module)
    _require_untouched()
    gc.freeze()  # Garbage collection in forks need not copy these objects.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nothing waits for the monitors.
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
    """Refuses to fork after threads or TensorFlow's runtime have started.

    Raises:
        RuntimeError: The process has more than one thread, or TensorFlow has an eager context.
    """
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        names = [_read_text(f"/proc/self/task/{thread}/comm").strip() for thread in threads]
        raise RuntimeError(f"{len(threads)} threads before a fork ({names}). Expected 1.")
    eager = sys.modules.get("tensorflow.python.eager.context")
    if eager is not None and eager.context_safe() is not None:
        raise RuntimeError("TensorFlow has an eager context before a fork. Expected none.")


def _monitor(connection: socket.socket) -> list[str]:
    """Forks the program's process and waits for its end.

    Returns:
        The program's arguments, in the new process. The monitor itself never returns.
    """
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
    """Adopts the caller's streams, namespaces, environment and working directory."""
    *streams, _, _ = descriptors
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor, name in zip(descriptors[3:], _DESCRIPTORS[3:], strict=True):
        if os.fstat(descriptor).st_ino != os.stat(f"/proc/self/{name}").st_ino:
            import ctypes

            libc = ctypes.CDLL(None, use_errno=True)  # os.setns requires Python 3.12.
            if libc.setns(descriptor, 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns failed for {name}")
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def _wait(program: int, connection: socket.socket) -> None:
    """Reports the program's exit code to the caller.

    Kills the program if the caller ends first.
    """
    import threading

    def pass_on() -> None:
        with contextlib.suppress(OSError):  # The program or its caller has ended.
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
    """Runs a program in this process as the interpreter would."""
    import types

    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # The `random` module does so by itself after a fork.
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
    """Runs the command line. See the module's docstring."""
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
