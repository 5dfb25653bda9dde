"""Times the CUDA launchers next to PyTorch's operations on the same data and the same GPU.

Each comparison checks that both sides agree and then times them in turns (A B A B ...). CUDA events
measure the time of one call, including the allocation of workspaces and results from the caching
allocators of CuPy and PyTorch.

| Launcher                         | PyTorch                                       |
|----------------------------------|-----------------------------------------------|
| drift                            | `(a - b).abs().amax(1)`, compiled             |
| compaction with sums             | `sparse_coo_tensor(...).coalesce()`           |
| mask without sums                | `isin` and a boolean mask                     |
| deferral, 10M rows of capacity   | `index_add_` on a dense buffer of 10M rows    |
| compaction with sums             | one step of `EmbeddingBag(sparse=True)` with  |
|                                  | `SparseAdam`, as a scale                      |

    python3 benchmarks/gpu/peers.py LIBRARY --results=results.jsonl

`--arrays=numpy` is for libraries that run on the CPU: the same comparisons with PyTorch on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from launchers import Launchers  # noqa: E402
from results import Results  # noqa: E402

DIM, KEYS_IN_ALL = 64, 10_000_000


@contextlib.contextmanager
def one_stream(xp: Any) -> Iterator[None]:
    """Returns a context in which CuPy and PyTorch use the same stream, so that events time both."""
    if xp is np:
        yield
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), xp.cuda.ExternalStream(stream.cuda_stream):
        yield


def to_torch(array: Any) -> torch.Tensor:
    """Returns a tensor that shares the memory of an array."""
    return torch.from_dlpack(array)


def draw_keys(law: str, n: int) -> np.ndarray:
    """Returns n int64 keys below KEYS_IN_ALL.

    The distribution is uniform, or Zipf's law with exponent 1.1.
    """
    random = np.random.default_rng(1)
    if law == "uniform":
        return random.integers(0, KEYS_IN_ALL, n)
    return np.minimum(random.zipf(1.1, n), KEYS_IN_ALL) - 1


class Turns:
    """Times two calls in turns on PyTorch's current stream."""

    def __init__(self, runs: int):
        self._runs = runs

    def compare(
        self, record: dict[str, Any], ours: Callable[[], Any], theirs: Callable[[], Any]
    ) -> None:
        """Adds the seconds and the median ratio to `record`.

        The ratio is the time of `theirs` relative to `ours`.
        """
        seconds: dict[str, list[float]] = {"seconds": [], "torch_seconds": []}
        for turn in range(-2, self._runs):  # The first two turns warm up.
            for name, call in (("seconds", ours), ("torch_seconds", theirs)):
                elapsed = self._seconds(call)
                if turn >= 0:
                    seconds[name].append(elapsed)
        ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
        record.update(seconds, times_as_fast=statistics.median(ratios))

    @staticmethod
    def _seconds(call: Callable[[], Any]) -> float:
        if not torch.cuda.is_initialized():
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


def compare_drift(record: dict[str, Any], launchers: Launchers, turns: Turns, rows: int) -> None:
    """Compares row drift with a compiled PyTorch expression."""
    xp = launchers.xp
    current = xp.random.default_rng(1).random((rows, DIM), np.float32)
    snapshot = xp.random.default_rng(2).random((rows, DIM), np.float32)
    a, b = to_torch(current), to_torch(snapshot)
    compiled = torch.compile(lambda x, y: (x - y).abs().amax(1))
    assert torch.equal(to_torch(launchers.drift(current, snapshot)), compiled(a, b))
    record["shape"] = [rows, DIM]
    turns.compare(record, lambda: launchers.drift(current, snapshot), lambda: compiled(a, b))


def compare_sums(
    record: dict[str, Any], launchers: Launchers, turns: Turns, law: str, n: int
) -> None:
    """Compares compaction with sums by key to `coalesce()`."""
    xp = launchers.xp
    keys = xp.asarray(draw_keys(law, n))
    rows = xp.random.default_rng(3).random((n, DIM), np.float32)
    none = launchers.key_set(np.empty(0, np.int64))
    sparse = torch.sparse_coo_tensor(
        to_torch(keys)[None], to_torch(rows), (KEYS_IN_ALL, DIM), check_invariants=False
    )
    kept, sums, counts = launchers.compact(keys, rows, none)
    number, expected = int(counts[0]), sparse.coalesce()
    assert torch.equal(to_torch(kept[:number]), expected.indices()[0])
    torch.testing.assert_close(to_torch(sums[:number]), expected.values(), rtol=1e-3, atol=1e-3)
    record.update(shape=[n, DIM], distinct=number)
    turns.compare(record, lambda: launchers.compact(keys, rows, none), sparse.coalesce)


def compare_mask(
    record: dict[str, Any], launchers: Launchers, turns: Turns, law: str, n: int
) -> None:
    """Compares compaction without sums to `isin()` and a mask.

    A third of the keys is masked.
    """
    xp = launchers.xp
    masked = np.arange(0, KEYS_IN_ALL, 3, dtype=np.int64)
    keys = xp.asarray(draw_keys(law, n))
    rows = xp.random.default_rng(4).random((n, DIM), np.float32)
    torch_keys, torch_rows = to_torch(keys), to_torch(rows)
    key_set, tensor = launchers.key_set(masked), torch.from_numpy(masked).to(torch_keys.device)

    def mask() -> tuple[torch.Tensor, torch.Tensor]:
        keeps = ~torch.isin(torch_keys, tensor)
        return torch_keys[keeps], torch_rows[keeps]

    kept, kept_rows, counts = launchers.compact(keys, rows, key_set, deduplicate=False)
    number, expected = int(counts[0]), mask()
    assert torch.equal(to_torch(kept[:number]), expected[0])
    assert torch.equal(to_torch(kept_rows[:number]), expected[1])
    record.update(shape=[n, DIM], kept=number)
    turns.compare(record, lambda: launchers.compact(keys, rows, key_set, deduplicate=False), mask)


def compare_deferral(
    record: dict[str, Any], launchers: Launchers, turns: Turns, n: int, capacity: int
) -> None:
    """Compares a deferral step to `index_add_` on a dense buffer.

    No row is due in the step.
    """
    xp = launchers.xp
    keys = xp.asarray(np.random.default_rng(5).choice(KEYS_IN_ALL, n, replace=False))
    rows = xp.random.default_rng(6).random((n, DIM), np.float32)
    buffers, waits = launchers.buffers(capacity, DIM), xp.ones(n, bool)
    torch_keys, torch_rows = to_torch(keys), to_torch(rows)
    dense = torch.zeros((capacity, DIM), device=torch_keys.device)
    buckets = torch_keys % capacity

    def step() -> Any:
        indices, sums = buffers.add(keys, rows)
        return buffers.take_due(keys, indices, sums, waits, max_age=1 << 40, max_due=n)

    _, _, counts = step()
    assert int(counts[1]) == 0, "No row is due."
    _, sums = buffers.add(keys, rows)
    assert bool((sums == rows + rows).all())
    record.update(shape=[n, DIM], capacity=capacity)
    turns.compare(record, step, lambda: dense.index_add_(0, buckets, torch_rows))


def compare_step(
    record: dict[str, Any], launchers: Launchers, turns: Turns, law: str, n: int
) -> None:
    """Compares compaction with sums to PyTorch's whole sparse step."""
    xp = launchers.xp
    keys = xp.asarray(draw_keys(law, n) % 1_000_000)
    rows = xp.random.default_rng(7).random((n, DIM), np.float32)
    none = launchers.key_set(np.empty(0, np.int64))
    torch_keys, upstream = to_torch(keys), to_torch(rows)
    device = torch_keys.device
    bag = torch.nn.EmbeddingBag(1_000_000, DIM, mode="sum", sparse=True, device=device)
    optimizer = torch.optim.SparseAdam(bag.parameters())
    offsets = torch.arange(n, device=device)

    def step() -> None:
        optimizer.zero_grad()
        bag(torch_keys, offsets).backward(upstream)
        optimizer.step()

    record["shape"] = [n, DIM]
    turns.compare(record, lambda: launchers.compact(keys, rows, none), step)


def main() -> int:
    """Runs all comparisons and continues after a failed one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("library", type=Path, help="shared library of benchmarks/gpu/c_api.cc")
    parser.add_argument(
        "--results",
        type=Path,
        required=True,
        help="JSON Lines file to which the results are appended",
    )
    parser.add_argument("--arrays", choices=("cupy", "numpy"), default="cupy")
    parser.add_argument("--runs", type=int, default=9, help="number of turns per comparison")
    parser.add_argument("--quick", action="store_true", help="use small inputs for a trial run")
    given = parser.parse_args()
    launchers = Launchers(given.library, importlib.import_module(given.arrays))
    turns = Turns(given.runs)
    results = Results(given.results)
    n, rows = (4096, 4096) if given.quick else (65_536 * 26, 2_097_152)
    deferred, capacity = (1024, 8192) if given.quick else (131_072, KEYS_IN_ALL)
    with one_stream(launchers.xp):
        with results.case("peer", "drift") as record:
            compare_drift(record, launchers, turns, rows)
        for law in ("uniform", "zipf"):
            with results.case("peer", f"sums, {law}") as record:
                compare_sums(record, launchers, turns, law, n)
            with results.case("peer", f"mask, {law}") as record:
                compare_mask(record, launchers, turns, law, n)
            with results.case("peer", f"sums next to SparseAdam, {law}") as record:
                compare_step(record, launchers, turns, law, n)
        with results.case("peer", "deferral") as record:
            compare_deferral(record, launchers, turns, deferred, capacity)
    return results.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
