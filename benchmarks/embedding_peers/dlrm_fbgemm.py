"""Trains a DLRM in PyTorch with the tables of FBGEMM.

The argument "compiled" compiles the model from the pooled rows to the loss, without the embedding
op. The argument "layers" measures only the dense part: every step gets the same pooled rows, and
their gradient is discarded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import dlrm_start
import numpy as np
import torch
import worker
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)


def _stack(weights: list[np.ndarray], last_is_linear: bool) -> torch.nn.Sequential:
    """Returns linear layers with these weights and ReLU in between."""
    layers: list[torch.nn.Module] = []
    for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
        linear = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(kernel.T))
            linear.bias.copy_(torch.from_numpy(bias))
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[: -1 if last_is_linear else None])


class Dense(torch.nn.Module):
    """The model without the tables: MLPs, pairwise dot products and the loss."""

    def __init__(self, settings: Mapping[str, Any]):
        super().__init__()
        bottom, top = dlrm_start.dense_weights(settings)
        self.bottom, self.top = _stack(bottom, False), _stack(top, True)
        self.dim = settings["dim"]
        lower = torch.tensor(dlrm_start.pairs(len(settings["cardinalities"]) + 1)).T
        self.register_buffer("rows", lower[0].contiguous())
        self.register_buffer("columns", lower[1].contiguous())

    def forward(
        self, dense: torch.Tensor, pooled: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Returns the mean loss; `pooled` has shape [batch, tables * dim]."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom, pooled.to(bottom.dtype)], dim=1)
        vectors = vectors.view(len(dense), -1, self.dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.rows, self.columns]
        logits = self.top(torch.cat([bottom, dots], dim=1))[:, 0].float()
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)


def _tables(settings: Mapping[str, Any]) -> SplitTableBatchedEmbeddingBagsCodegen:
    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (rows, settings["dim"], EmbeddingLocation.HOST, ComputeDevice.CPU)
            for rows in settings["cardinalities"]
        ],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=settings["rows_rate"],
        eps=dlrm_start.ROWS_EPSILON,
        pooling_mode=PoolingMode.SUM,
    )
    with torch.no_grad():
        for table, weights in enumerate(layer.split_embedding_weights()):
            weights.copy_(torch.from_numpy(dlrm_start.initial_rows(settings, table)))
    return layer


def make(settings: Mapping[str, Any], keys: np.ndarray) -> worker.Step:
    """Builds the model and returns its training step; see `worker.serve`."""
    torch.set_num_threads(settings["threads"])
    tables, batch = len(settings["cardinalities"]), settings["batch"]
    layer, dense_part = _tables(settings), Dense(settings)
    parameters = list(dense_part.parameters())
    optimizer: torch.optim.Optimizer
    # The fused optimizers are the fastest of PyTorch on the CPU, with one kernel for all weights.
    if settings["dense_optimizer"] == "sgd":
        optimizer = torch.optim.SGD(parameters, settings["dense_rate"], fused=True)
    else:
        optimizer = torch.optim.Adagrad(
            parameters, settings["dense_rate"], fused=True, eps=dlrm_start.DENSE_EPSILON,
            initial_accumulator_value=dlrm_start.DENSE_ACCUMULATOR,
        )  # fmt: skip
    loss_of = torch.compile(dense_part) if "compiled" in sys.argv[1:] else dense_part
    given = dlrm_start.read_batches(settings)
    # FBGEMM expects the keys table by table. The conversion is not part of the measured time.
    of_tables = np.ascontiguousarray(keys.transpose(0, 2, 1)).reshape(len(keys), -1)
    batches = [
        tuple(map(torch.from_numpy, of_batch))
        for of_batch in zip(given.dense, of_tables, given.labels, strict=True)
    ]
    offsets = torch.arange(0, tables * batch + 1, dtype=torch.int64)
    is_mixed = settings["dtype"] == "mixed_bfloat16"
    same = torch.randn(batch, tables * settings["dim"]).mul_(0.1).requires_grad_()
    is_alone = "layers" in sys.argv[1:]

    def step(number: int) -> float:
        dense, indices, labels = batches[number]
        same.grad = None
        pooled = same if is_alone else layer(indices, offsets)
        mixed = torch.autocast("cpu", torch.bfloat16) if is_mixed else contextlib.nullcontext()
        with mixed:
            loss = loss_of(dense, pooled, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    import fbgemm_gpu

    worker.serve(make, {"torch": torch.__version__, "fbgemm_gpu": fbgemm_gpu.__version__})
