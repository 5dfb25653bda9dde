"""A rank of `collectives.py` that exchanges tensors without computation.

    collectives_rank.py SETTINGS

SETTINGS is JSON: the sizes "dense", "keys" and "values" in bytes, the "loops" per call, "rounds",
"as_init" (whether threads are set up as in `distributed.init`), and the "output" file of rank 0.
The output contains the milliseconds per step for each case, as the median over all rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")

import horovod.tensorflow as hvd
import tensorflow as tf

from slipstream_tf.distributed import horovod

Tensors = list[tf.Tensor]


class Collectives:
    """The collectives of a training step, with tensors of realistic sizes.

    Args:
        dense: The size of the weights' gradients in bytes.
        keys: The size of a rank's keys in bytes.
        values: The size of the rows of these keys in bytes.
    """

    def __init__(self, dense: int, keys: int, values: int) -> None:
        self._dense = tf.Variable(tf.ones([dense // 4]))
        self._keys = tf.Variable(tf.ones([keys // 8], tf.int64))
        self._values = tf.Variable(tf.ones([values // 4]))
        self._sizes = tf.Variable(tf.ones([1, 8], tf.int64))
        self._message = tf.Variable(tf.zeros([keys + values + 64], tf.uint8))
        self._calls = tf.Variable(0)

    def cases(self) -> dict[str, Callable[[], Tensors]]:
        """Returns the functions to time by name; each returns the received tensors."""
        return {
            "no communication": lambda: [tf.identity(self._dense)],
            "allreduce of the dense gradients": lambda: [self._sum()],
            "allgather of one message": lambda: [self._gather(self._message, "message")],
            "allgather of one message, changing length": lambda: [
                self._gather(self._varied(), "varied")
            ],
            "concurrent allgathers of sizes, keys, values": lambda: self._three(
                self._values, "three"
            ),
            "concurrent allgathers, changing lengths": self._varied_three,
            "alltoall of one message": lambda: [self._exchange(self._message, "exchanged")],
            "concurrent allreduce and allgather of one message": lambda: [
                self._sum("both"), self._gather(self._message, "both.message"),
            ],
            "sharded: alltoalls of keys, rows, gradients during the allreduce": self._sharded,
            "earlier protocol: 4 sequential collectives, changing lengths": self._in_turn,
        }  # fmt: skip

    def _sum(self, name: str = "sum", after: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        return hvd.allreduce(_behind(self._dense, after), op=hvd.Sum, name=name)

    def _count(self, name: str, after: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        return hvd.allreduce(_behind(self._sizes[0, :1], after), op=hvd.Sum, name=name)

    def _gather(self, tensor: Any, name: str, after: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        return hvd.allgather(_behind(tensor, after), name=name)

    def _sharded(self) -> Tensors:
        keys = self._exchange(tf.bitcast(self._keys, tf.uint8), "sharded.keys")
        rows = self._exchange(tf.bitcast(self._values, tf.uint8), "sharded.rows", [keys])
        return [
            self._sum("sharded.sum"), self._exchange(self._message, "sharded.gradients", [rows]),
        ]  # fmt: skip

    def _exchange(self, tensor: Any, name: str, after: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        tensor = tf.reshape(tensor, [-1])
        each = tf.size(tensor) // hvd.size()
        splits = tf.tensor_scatter_nd_update(
            tf.fill([hvd.size()], each), [[0]], [tf.size(tensor) - each * (hvd.size() - 1)]
        )
        return hvd.alltoall(_behind(tensor, after), splits=splits, name=name)[0]

    def _varied(self) -> tf.Tensor:
        return self._message[self._calls.assign_add(1) % 7 :]

    def _three(self, values: Any, name: str, after: Sequence[tf.Tensor] = ()) -> Tensors:
        parts = (("sizes", self._sizes), ("keys", self._keys), ("values", values))
        return [self._gather(tensor, f"{name}.{part}", after) for part, tensor in parts]

    def _varied_three(self, after: Sequence[tf.Tensor] = ()) -> Tensors:
        return self._three(self._values[self._calls.assign_add(1) % 7 :], "varied.three", after)

    def _in_turn(self) -> Tensors:
        """Returns four dependent collectives: more batches?, batch size, rows, weights."""
        first = self._count("more")
        rows = self._varied_three([self._count("size", [first])])
        return [self._sum("last", rows), *rows]


def _behind(tensor: Any, after: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the tensor with a data dependency on other tensors."""
    if not after:
        return tf.identity(tensor)
    # TensorFlow removes control dependencies on unused values, and folds integers times 0. All
    # values are nonnegative, so the minimum with 0 is always 0.
    first = [tf.cast(tf.reshape(came, [-1])[0], tf.float32) for came in after]
    zeros = [tf.cast(tf.minimum(value, 0.0), tensor.dtype) for value in first]
    return tf.add_n([tf.identity(tensor), *(tf.broadcast_to(z, tf.shape(tensor)) for z in zeros)])


def looped(case: Callable[[], Tensors], loops: int) -> Any:
    """Returns a function that runs a case `loops` times in sequence."""

    def body(index: tf.Tensor, seen: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # TensorFlow would remove a collective with an unused result.
        first = [tf.cast(tf.reshape(tensor, [-1])[0], tf.float32) for tensor in case()]
        return index + 1, tf.add_n([seen, *first])

    def call() -> tf.Tensor:
        start = (tf.constant(0), tf.constant(0.0))
        return tf.while_loop(lambda i, _: i < loops, body, start, parallel_iterations=1)

    return tf.function(call, autograph=False)


def main() -> None:
    """Times all cases in turn for the given number of rounds."""
    given = json.loads(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with horovod.background_priority() if given["as_init"] else contextlib.nullcontext():
        hvd.init()
    if given["as_init"]:
        horovod.keep_to_part(hvd.local_rank(), hvd.local_size())
    collectives = Collectives(given["dense"], given["keys"], given["values"])
    cases = collectives.cases()
    calls = {name: looped(case, given["loops"]) for name, case in cases.items()}
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(given["rounds"]):
        for name, call in calls.items():
            hvd.allreduce(tf.zeros([1]), name="start")
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3 / given["loops"])
    if hvd.rank() == 0:
        with open(given["output"], "w", encoding="utf-8") as file:
            json.dump({name: statistics.median(each) for name, each in times.items()}, file)
    hvd.shutdown()


if __name__ == "__main__":
    main()
