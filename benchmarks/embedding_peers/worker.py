"""Runs training steps on request, so that libraries take turns.

embedding_step.py and dlrm_step.py run this code with the Python of the virtual environment of each
library. It requires only NumPy. Commands are lines of JSON on standard input. Answers are lines of
JSON on standard output. From `serve` on, what libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np


class Step(Protocol):
    """A training step. Embedding benchmarks apply a given gradient."""

    def __call__(self, number: int) -> float | None:
        """Trains with batch `number` and returns its loss, if any."""
        ...


def limit_threads(tensorflow: Any, threads: int) -> None:
    """Limits the number of threads that TensorFlow uses.

    Note: TensorFlow accepts the limit only before its first op.
    """
    threading = tensorflow.config.threading
    if threading.get_intra_op_parallelism_threads() != threads:
        threading.set_intra_op_parallelism_threads(threads)
        threading.set_inter_op_parallelism_threads(threads)


def without_autotune(tensorflow: Any, data: Any) -> Any:
    """Returns the data set with autotuning disabled, so that iterators end immediately.

    With autotuning, an iterator that has not reached the end of its data waits for the next cycle
    of the tuner before it ends. Cycles are 10, 20, 40, ... milliseconds apart. For an endless data
    set, this wait would dominate a short `fit`.
    """
    options = tensorflow.data.Options()
    options.autotune.enabled = False
    return data.with_options(options)


def serve(
    make: Callable[[Mapping[str, Any], np.ndarray], Step], versions: Mapping[str, str]
) -> None:
    """Executes commands until standard input ends.

    `{"make": settings}` builds a step. The settings contain "threads", "keys" (path of a .npy file,
    int64 [steps, batch, tables]) and the settings of the program. The answer contains the versions.
    `{"run": steps}` runs steps. The answer `{"ms": [...], "losses": [...]}` contains the duration
    in milliseconds and the loss of each step.

    Args:
        make: Function that takes the settings and keys, allocates the rows of all keys and returns
            the step.
        versions: Versions of the libraries.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(content: Mapping[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    step: Step | None = None
    batches = 0
    for line in sys.stdin:
        command = json.loads(line)
        if "make" in command:
            step = None  # Free the previous tables first.
            keys = np.load(command["make"]["keys"])
            batches = len(keys)
            step = make(command["make"], keys)
            answer({"versions": dict(versions)})
        elif step is not None:
            milliseconds, losses = [], []
            for number in range(command["run"]):
                start = time.perf_counter()
                loss = step(number % batches)
                milliseconds.append(1e3 * (time.perf_counter() - start))
                losses.append(loss)
            answer({"ms": milliseconds, "losses": losses})
