"""A process that makes training steps when it is told to, so that libraries can take turns.

Run by embedding_step.py and dlrm_step.py with the Python of the library's own virtual environment;
needs NumPy only. Commands come as lines of JSON on standard input; answers go, as JSON, to the file
descriptor that `ANSWERS` in the environment names: libraries print to standard output what they
like.
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
    """Trains with one batch; where that is all, rows by a given gradient of the outputs."""

    def __call__(self, number: int) -> float | None:
        """Makes the step with the batch of that number; returns its loss, if it has one."""
        ...


def limit_threads(tensorflow: Any, threads: int) -> None:
    """Gives a TensorFlow so many threads; before its first op."""
    threading = tensorflow.config.threading
    if threading.get_intra_op_parallelism_threads() != threads:
        threading.set_intra_op_parallelism_threads(threads)
        threading.set_inter_op_parallelism_threads(threads)


def without_autotune(tensorflow: Any, data: Any) -> Any:
    """Returns a data set whose iterators end at once.

    With autotuning, one that has more to give waits at its end for the tuner's next turn; turns are
    10, 20, 40, ... milliseconds apart. A short `fit` of an endless data set takes as long.
    """
    options = tensorflow.data.Options()
    options.autotune.enabled = False
    return data.with_options(options)


def serve(
    make: Callable[[Mapping[str, Any], np.ndarray], Step], versions: Mapping[str, str]
) -> None:
    """Answers commands until standard input ends.

    Commands: {"make": settings} with threads, keys (a .npy file, int64 [steps, batch, tables]) and
    what else the program needs; {"run": steps}, answered by {"ms": [...], "losses": [...]}, the
    milliseconds and the loss of each step.

    Args:
        make: of settings and keys: the step; rows of all keys are there when it returns.
        versions: of the libraries.
    """
    answers = os.fdopen(int(os.environ["ANSWERS"]), "w", encoding="utf-8")

    def answer(content: Mapping[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    step: Step | None = None
    batches = 0
    for line in sys.stdin:
        command = json.loads(line)
        if "make" in command:
            step = None  # The tables before are freed first.
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
