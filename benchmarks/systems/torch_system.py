"""Trains with PyTorch on the CPU with fused embedding tables.

The tables come from FBGEMM or Intel's extension.

The arguments after the settings and the record select variants: "compiled" compiles the dense
layers, "bfloat16" enables autocast, and "ipex" uses Intel's extension for the tables.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from task import Batch, Recorder, read_arguments

_HALF_WIDTH = 0.05


def stack(widths: list[int], width: int, last_is_linear: bool) -> torch.nn.Sequential:
    """Returns linear layers with ReLU in between, initialized as in Keras."""
    layers: list[torch.nn.Module] = []
    for units in widths:
        linear = torch.nn.Linear(width, units)
        torch.nn.init.xavier_uniform_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
        layers += [linear, torch.nn.ReLU()]
        width = units
    return torch.nn.Sequential(*layers[: -1 if last_is_linear else None])


class Dense(torch.nn.Module):
    """The MLPs and pairwise dot products of DLRM.

    A model without numeric features has no bottom MLP.
    """

    def __init__(self, settings: Mapping[str, Any], fields: int) -> None:
        super().__init__()
        numbers, self.dim = settings["numbers"], settings["dim"]
        vectors = fields + bool(numbers)
        lower = torch.tensor([(i, j) for i in range(vectors) for j in range(i)]).T
        self.register_buffer("rows", lower[0].contiguous())
        self.register_buffer("columns", lower[1].contiguous())
        self.bottom = stack(settings["bottom"], numbers, False) if numbers else None
        width = lower.shape[1] + (self.dim if numbers else 0)
        self.top = stack(settings["top"], width, True)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Returns logits [n] for numbers and pooled rows.

        The shapes are [n, numbers] and [n, fields * dim].
        """
        bottom = None if self.bottom is None else self.bottom(dense)
        if bottom is not None:
            pooled = torch.cat([bottom, pooled.to(bottom.dtype)], dim=1)
        vectors = pooled.view(len(pooled), -1, self.dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.rows, self.columns]
        found = dots if bottom is None else torch.cat([bottom, dots], dim=1)
        return self.top(found)[:, 0].float()


class Fbgemm:
    """Tables of FBGEMM. The backward pass updates the rows with element-wise Adagrad."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        host, cpu = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
        self._layer = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, settings["dim"], host, cpu) for rows in settings["cardinalities"]],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=settings["rows_rate"],
            eps=settings["damping"] ** 0.5,  # FBGEMM adds eps outside the square root.
            pooling_mode=common.PoolingMode.SUM,
        )
        with torch.no_grad():
            for weights in self._layer.split_embedding_weights():
                weights.uniform_(-_HALF_WIDTH, _HALF_WIDTH)

    def __call__(self, keys: np.ndarray) -> torch.Tensor:
        """Returns rows [n, fields * dim] for keys [n, fields]."""
        flat = torch.from_numpy(np.ascontiguousarray(keys.T, np.int64).reshape(-1))
        return self._layer(flat, torch.arange(0, keys.size + 1, dtype=torch.int64))

    def step(self) -> None:
        """Does nothing, because the backward pass has updated the rows."""


class Merged:
    """Merged tables of Intel's extension with fused Adagrad."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import intel_extension_for_pytorch as ipex

        tables = [
            torch.nn.EmbeddingBag(rows, settings["dim"], mode="sum", sparse=True)
            for rows in settings["cardinalities"]
        ]
        for table in tables:
            torch.nn.init.uniform_(table.weight, -_HALF_WIDTH, _HALF_WIDTH)
        merged = ipex.nn.modules.MergedEmbeddingBagWithAdaGrad
        # The extension adds eps outside the square root.
        rule = {"lr": settings["rows_rate"], "eps": settings["damping"] ** 0.5}
        self._layer = merged.from_embeddingbag_list(tables, **rule)
        self._fields = len(tables)

    def __call__(self, keys: np.ndarray) -> torch.Tensor:
        """Returns rows [n, fields * dim] for keys [n, fields]."""
        columns = [torch.from_numpy(np.ascontiguousarray(c, np.int64)) for c in keys.T]
        offsets = [torch.arange(0, len(keys), dtype=torch.int64)] * self._fields
        return torch.cat(self._layer(columns, offsets), dim=1)

    def step(self) -> None:
        """Does nothing, because the backward pass has updated the rows."""


def main() -> None:
    task, record = read_arguments(sys.argv)
    ways, settings = sys.argv[3:], task.settings
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    tables = Merged(settings) if "ipex" in ways else Fbgemm(settings)
    plain = Dense(settings, task.fields)
    optimizer = torch.optim.Adam(plain.parameters(), settings["rate"], fused=True, eps=1e-7)
    layers: Any = torch.compile(plain) if "compiled" in ways else plain
    is_mixed = "bfloat16" in ways

    def mixed() -> Any:
        return torch.autocast("cpu", torch.bfloat16) if is_mixed else contextlib.nullcontext()

    def train(batch: Batch) -> None:
        pooled = tables(batch.keys)
        with mixed():
            logits = layers(torch.from_numpy(batch.dense), pooled)
        labels = torch.from_numpy(batch.labels)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def predict(keys: np.ndarray, dense: np.ndarray) -> np.ndarray:
        with mixed():
            return plain(torch.from_numpy(dense), tables(keys)).numpy()

    recorder = Recorder(task)
    for batch in task.batches():
        train(batch)
        recorder.step(predict)
    recorder.end(predict)
    recorder.finish(record, versions(ways))


def versions(ways: list[str]) -> dict[str, str]:
    """Returns the versions of the libraries that the variants use."""
    found = {"torch": torch.__version__}
    if "ipex" in ways:
        import intel_extension_for_pytorch as ipex

        return {**found, "intel_extension_for_pytorch": ipex.__version__}
    import fbgemm_gpu

    return {**found, "fbgemm_gpu": fbgemm_gpu.__version__}


if __name__ == "__main__":
    main()
