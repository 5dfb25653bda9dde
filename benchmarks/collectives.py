"""Minimum communication time of a step with two ranks: collectives without computation.

The tensors have the sizes of a training step, and each rank has one thread. Horovod is measured
with its default settings and with the settings of `slipstream_tf.distributed.init`. Gloo (with
PyTorch) and MPI without Horovod, which need no negotiation, are measured for comparison.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --dense=114000 --keys=130000 --values=1040000
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import peers
import summary
from absl import app, flags

_DENSE = flags.DEFINE_integer(
    "dense", 56_000, "Bytes of the dense gradients per step.", lower_bound=64
)
_KEYS = flags.DEFINE_integer(
    "keys", 6_000, "Bytes of the keys that a rank sends per step.", lower_bound=64
)
_VALUES = flags.DEFINE_integer(
    "values", 48_000, "Bytes of the embedding rows that a rank sends per step.", lower_bound=64
)
_LOOPS = flags.DEFINE_integer("loops", 100, "Number of steps per measured round.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 9, "Number of rounds. The results are medians over rounds.", lower_bound=1
)
_FOLDER = flags.DEFINE_string(
    "folder", "runs/peers", "Folder of the Python environments of the other libraries."
)
_PEERS = flags.DEFINE_list(
    "peers", ["gloo", "mpi"], "Libraries to measure in addition to Horovod: gloo, mpi."
)

_RANKS = 2
# Heading -> (whether threads are set up as in `init`, cycle time in ms, controller).
_WAYS = {
    "Horovod, 1 ms": (False, 1.0, "gloo"),
    "Horovod, 0.1 ms": (False, 0.1, "gloo"),
    "init settings, 1 ms": (True, 1.0, "gloo"),
    "init settings, 0.1 ms": (True, 0.1, "gloo"),
    "Horovod, Open MPI, 0.1 ms": (False, 0.1, "mpi"),
    "init settings, Open MPI": (True, 0.1, "mpi"),
}
_HERE = Path(__file__).resolve().parent
_SUM, _GATHER = "allreduce of the dense gradients", "allgather of one message"


def horovod(as_init: bool, cycle: float, controller: str) -> dict[str, float]:
    """Returns the milliseconds per step for each case with Horovod."""
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "times.json")
        given = {
            "dense": _DENSE.value, "keys": _KEYS.value, "values": _VALUES.value,
            "loops": _LOOPS.value, "rounds": _ROUNDS.value, "as_init": as_init, "output": output,
        }  # fmt: skip
        launch = common.horovodrun(_RANKS, controller)
        rank = [sys.executable, str(_HERE / "collectives_rank.py"), json.dumps(given)]
        yields = {"OMPI_MCA_mpi_yield_when_idle": "1"} if as_init else {}
        _run([*launch, *rank], {"HOROVOD_CYCLE_TIME": str(cycle), **yields, **common.AS_ROOT})
        return json.loads(Path(output).read_text(encoding="utf-8"))


def gloo() -> dict[str, float] | None:
    """Returns milliseconds per step for each case of plain Gloo."""
    python = peers.python_of("torch", Path(_FOLDER.value))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sizes = map(str, (_DENSE.value, _message(), _LOOPS.value, _ROUNDS.value))
    common = [str(_RANKS), str(port), *sizes]
    commands = [
        [python, str(_HERE / "collectives_gloo.py"), str(rank), *common] for rank in range(_RANKS)
    ]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for command in commands
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("The ranks of Gloo failed. Their errors are printed above.")
    return json.loads(outputs[0].splitlines()[-1])


def mpi() -> dict[str, float] | None:
    """Returns milliseconds per step of plain MPI; None if not installed."""
    if shutil.which("mpicxx") is None or shutil.which("mpirun") is None:
        print("MPI is not installed, therefore its column is omitted.", flush=True)
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "peer")
        _run(["mpicxx", "-O2", "-o", program, str(_HERE / "collectives_peer.cc")], {})
        sizes = map(str, (_DENSE.value, _message(), _LOOPS.value, _ROUNDS.value))
        done = _run(["mpirun", "-np", str(_RANKS), program, *sizes], common.AS_ROOT)
        return json.loads(done.splitlines()[-1])


def _message() -> int:
    return _KEYS.value + _VALUES.value + 64


def _run(command: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{command[0]} failed with exit code {done.returncode}.")
    return done.stdout


def main(arguments: Sequence[str]) -> None:
    """Measures all variants in turn; prints and writes the results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    measures = {"gloo": gloo, "mpi": mpi}
    unknown = set(_PEERS.value) - set(measures)
    if unknown:
        raise app.UsageError(
            f"Invalid --peers={','.join(_PEERS.value)}. Expected names of {', '.join(measures)}."
        )
    times: dict[str, dict[str, float]] = {}
    for heading, way in _WAYS.items():
        print(f"{heading} ...", flush=True)
        times[heading] = horovod(*way)
    cases = list(next(iter(times.values())))
    for name in _PEERS.value:
        print(f"{name} ...", flush=True)
        found = measures[name]()
        if found is not None:
            times[f"{name} without Horovod"] = {_SUM: found["sum"], _GATHER: found["gather"]}
    columns: list[Any] = [summary.column("case", cases)]
    for heading, of_case in times.items():
        columns.append(summary.column(heading, [of_case.get(case) for case in cases], "{:.2f}"))
    last = times["init settings, 0.1 ms"]
    claims = {
        "one_message_and_sum_ms": summary.claim(
            [last["concurrent allreduce and allgather of one message"]]
        ),
        "earlier_protocol_ms": summary.claim([times["Horovod, 1 ms"][cases[-1]]]),
    }
    part = (
        f"{_RANKS} ranks of a machine, {_DENSE.value:,} bytes of weights, {_KEYS.value:,} of keys, "
        f"{_VALUES.value:,} of rows; milliseconds"
    )
    print(summary.write("collectives", part, {"": columns}, claims))


if __name__ == "__main__":
    app.run(main)
