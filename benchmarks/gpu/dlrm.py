"""Trains a small DLRM whose sparse gradients pass through the CUDA launchers.

Three modes: `plain` sums gradients by key, `mask` drops the gradients of a third of the keys, and
`defer` defers gradients until they move a row by 0.002 or are ten steps old. In every step, the
keys and sums must equal the reference in tests/definitions.py bit for bit. A second run without
the comparison is timed.

    python3 benchmarks/gpu/dlrm.py LIBRARY --arrays=cupy --results=results.jsonl
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

from definitions import DeferralDefinition, DeferralRule, sum_and_mask  # noqa: E402
from launchers import Launchers  # noqa: E402
from results import Results  # noqa: E402

MODES = ("plain", "mask", "defer")
VOCABULARY, FEATURES, DIM, BATCH, HIDDEN = 3000, 8, 16, 512, 32
RATE, CAPACITY, MAX_AGE, MOVEMENT = 0.05, 4096, 10, 2e-3


def make_batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns Zipf-distributed keys [BATCH, FEATURES] and labels [BATCH] of a generated law."""
    law = np.random.default_rng(0).normal(size=(FEATURES, VOCABULARY)).astype("f4")
    random = np.random.default_rng(1000 + number)
    ids = np.minimum(random.zipf(1.2, (BATCH, FEATURES)), VOCABULARY) - 1
    logit = law[np.arange(FEATURES), ids].sum(1) * 0.7
    labels = (random.random(BATCH) < 1 / (1 + np.exp(-logit))).astype("f4")
    return (ids + np.arange(FEATURES) * VOCABULARY).astype(np.int64), labels


class Dense:
    """A two-layer perceptron over the concatenated rows, trained with SGD.

    The gradients are explicit expressions, so that the same code runs on NumPy and CuPy.
    """

    def __init__(self, xp: Any):
        random = np.random.default_rng(7)
        self._xp = xp
        self._w1 = xp.asarray(random.normal(size=(FEATURES * DIM, HIDDEN)).astype("f4") * 0.1)
        self._w2 = xp.asarray(random.normal(size=HIDDEN).astype("f4") * 0.1)
        self._b1, self._b2 = xp.zeros(HIDDEN, "f4"), xp.zeros((), "f4")

    def step(self, rows: Any, labels: Any) -> tuple[float, Any]:
        """Returns the mean log loss and the gradient of the rows.

        The gradient has the shape [BATCH * FEATURES, DIM].
        """
        xp = self._xp
        x = rows.reshape(BATCH, FEATURES * DIM)
        hidden = xp.maximum(x @ self._w1 + self._b1, 0)
        p = 1 / (1 + xp.exp(-(hidden @ self._w2 + self._b2)))
        loss = -xp.mean(labels * xp.log(p + 1e-7) + (1 - labels) * xp.log(1 - p + 1e-7))
        d_logit = (p - labels) / BATCH
        d_hidden = xp.outer(d_logit, self._w2) * (hidden > 0)
        d_x = d_hidden @ self._w1.T
        self._w2 -= RATE * (hidden.T @ d_logit)
        self._b2 -= RATE * d_logit.sum()
        self._w1 -= RATE * (x.T @ d_hidden)
        self._b1 -= RATE * d_hidden.sum(0)
        return float(loss), xp.ascontiguousarray(d_x.reshape(BATCH * FEATURES, DIM).astype("f4"))


class OnDevice:
    """Computes the gradients to apply with the launchers."""

    def __init__(self, mode: str, masked: np.ndarray, launchers: Launchers):
        self._xp = launchers.xp
        self._launchers, self._masked = launchers, launchers.key_set(masked)
        self._buffers = launchers.buffers(CAPACITY, DIM) if mode == "defer" else None

    def take(self, keys: Any, gradients: Any) -> tuple[Any, Any]:
        """Returns the keys and summed gradients to apply in this step."""
        kept, sums, counts = self._launchers.compact(keys, gradients, self._masked)
        n = int(counts[0])
        kept, sums = kept[:n], sums[:n]
        if self._buffers is None:
            return kept, sums
        indices, sums = self._buffers.add(kept, sums)
        may_wait = self._xp.abs(sums).max(1) < MOVEMENT
        due, due_sums, counts = self._buffers.take_due(kept, indices, sums, may_wait, MAX_AGE)
        n = int(counts[1])
        return due[:n], due_sums[:n]


class Defined:
    """Computes the gradients to apply with the reference on the host."""

    def __init__(self, mode: str, masked: np.ndarray):
        self._masked = set(masked.tolist())
        self._deferral = DeferralDefinition(DIM) if mode == "defer" else None
        self._rule = DeferralRule(limit=MOVEMENT, max_age=MAX_AGE, max_rows=CAPACITY)

    def take(self, keys: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys and summed gradients to apply in this step."""
        kept = sum_and_mask(keys, gradients, self._masked)
        if self._deferral is None:
            return kept.keys, kept.rows
        return self._deferral.step(self._rule, kept.keys, kept.rows)


def train(mode: str, launchers: Launchers, steps: int, *, compares: bool) -> dict[str, Any]:
    """Trains one mode and checks the gradients against the reference on request.

    Args:
        mode: An element of `MODES`.
        launchers: Launchers of the library under test.
        steps: Number of steps.
        compares: Whether to compare the keys and sums of each step with the reference.

    Returns:
        The mean losses of the first and last five steps, the number of applied rows, and the
        milliseconds per step.

    Raises:
        AssertionError: The keys or sums of a step differ from the reference.
    """
    xp = launchers.xp
    to_host = getattr(xp, "asnumpy", np.asarray)
    keys_in_all = FEATURES * VOCABULARY
    masked = np.arange(0, keys_in_all if mode == "mask" else 0, 3, dtype=np.int64)
    start_rows = np.random.default_rng(3).normal(size=(keys_in_all, DIM)) * 0.05
    table, squares = xp.asarray(start_rows.astype("f4")), xp.full((keys_in_all, DIM), 0.1, "f4")
    dense, device = Dense(xp), OnDevice(mode, masked, launchers)
    definition = Defined(mode, masked)
    batches = [tuple(map(xp.asarray, make_batch(i))) for i in range(steps)]
    losses, applied, start = [], 0, time.perf_counter()
    for number, (ids, labels) in enumerate(batches):
        ids = ids.reshape(-1)
        loss, gradients = dense.step(table[ids], labels)
        losses.append(loss)
        keys, sums = device.take(ids, gradients)
        if compares:
            wanted = definition.take(to_host(ids), to_host(gradients))
            for name, found, expected in zip(("keys", "sums"), (keys, sums), wanted, strict=True):
                same = to_host(found).tobytes() == expected.tobytes()
                assert same, f"{mode}: {name} of step {number} differ from the definition."
        applied += len(keys)
        squares[keys] += sums * sums
        table[keys] -= np.float32(RATE) * sums / (xp.sqrt(squares[keys]) + np.float32(1e-6))
    float(table[0, 0])  # Wait for the device.
    milliseconds = 1e3 * (time.perf_counter() - start) / steps
    ends = [float(np.mean(part)) for part in (losses[:5], losses[-5:])]
    return {"losses": ends, "applied_rows": applied, "milliseconds": milliseconds}


def main() -> int:
    """Runs all modes and continues after a failed mode."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("library", type=Path, help="shared library of benchmarks/gpu/c_api.cc")
    parser.add_argument("--arrays", choices=("cupy", "numpy"), default="cupy")
    parser.add_argument(
        "--steps", type=int, default=60, help="number of steps per mode, at least 5"
    )
    parser.add_argument(
        "--results",
        type=Path,
        required=True,
        help="JSON Lines file to which the results are appended",
    )
    given = parser.parse_args()
    launchers = Launchers(given.library, importlib.import_module(given.arrays))
    results = Results(given.results)
    for mode in MODES:
        with results.case("dlrm", mode) as record:
            record.update(train(mode, launchers, given.steps, compares=True))
            timed = train(mode, launchers, given.steps, compares=False)
            record.update(equals_definition=True, milliseconds=timed["milliseconds"])
    return results.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
