"""A rank of `collectives.py` that measures Gloo without Horovod, using PyTorch.

    collectives_gloo.py RANK RANKS PORT DENSE_BYTES MESSAGE_BYTES LOOPS ROUNDS

Rank 0 prints the medians over all rounds in milliseconds as JSON. PyTorch must be installed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def main() -> None:
    """Times a sum and a gather and prints the medians."""
    rank, ranks, port, dense, message, loops, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    summed = torch.ones(dense // 4)
    sent = torch.zeros(message, dtype=torch.uint8)
    every = [torch.empty_like(sent) for _ in range(ranks)]
    calls: dict[str, Callable[[], object]] = {
        "sum": lambda: dist.all_reduce(summed),
        "gather": lambda: dist.all_gather(every, sent),
    }
    medians = {}
    for name, call in calls.items():
        times = []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(loops):
                call()
            times.append((time.perf_counter() - start) * 1e3 / loops)
        medians[name] = statistics.median(times)
    if rank == 0:
        print(json.dumps(medians), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
