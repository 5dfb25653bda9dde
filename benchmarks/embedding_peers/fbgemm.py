"""Measures FBGEMM's table-batched embeddings on the CPU with the fused optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import worker
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

_RULES = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def make(settings: Mapping[str, Any], keys: np.ndarray) -> worker.Step:
    """Builds the tables and returns a step; see `worker.serve`."""
    torch.set_num_threads(settings["threads"])
    tables, dim, batch = settings["tables"], settings["dim"], settings["batch"]
    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [(settings["rows"], dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * tables,
        optimizer=_RULES[settings["rule"]],
        learning_rate=settings["learning_rate"],
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    layer.init_embedding_weights_uniform(-0.05, 0.05)
    # FBGEMM expects the keys table by table. The conversion is not part of the measured time.
    of_tables = np.ascontiguousarray(keys.transpose(0, 2, 1)).reshape(len(keys), -1)
    indices = [torch.from_numpy(of_batch) for of_batch in of_tables]
    offsets = torch.arange(0, tables * batch + 1, dtype=torch.int64)
    gradient = torch.randn(batch, tables * dim, generator=torch.Generator().manual_seed(0))

    def step(number: int) -> None:
        layer(indices[number], offsets).backward(gradient)

    return step


if __name__ == "__main__":
    import fbgemm_gpu

    worker.serve(make, {"torch": torch.__version__, "fbgemm_gpu": fbgemm_gpu.__version__})
