"""Trains DCN-v2 or DeepFM on Frappe_x1 with FuxiCTR.

    python fuxictr_frappe.py DATA MODEL SEED SETTINGS

Prints JSON with the AUC and log loss on the test part, the number of trained examples, and the
training time in seconds. SETTINGS is a JSON object with dim, mlp, cross_layers, dropout,
batch_size, learning_rate and embedding_regularizer.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import CrossNetV2, FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel

FIELDS = ("user", "item", "daytime", "weekday", "isweekend", "homework", "cost", "weather",
          "country", "city")  # fmt: skip


class Batches:
    """Iterates over a part in the format of FuxiCTR's loop."""

    def __init__(self, keys: np.ndarray, labels: np.ndarray, size: int, shuffles: bool) -> None:
        self._keys, self._labels = torch.from_numpy(keys), torch.from_numpy(labels)
        self._size, self._shuffles = size, shuffles
        self.examples = 0

    def __len__(self) -> int:
        return -(-len(self._labels) // self._size)

    def __iter__(self):
        count = len(self._labels)
        order = torch.randperm(count) if self._shuffles else torch.arange(count)
        for begin in range(0, count, self._size):
            chosen = order[begin : begin + self._size]
            self.examples += len(chosen)
            batch = {field: self._keys[chosen, i] for i, field in enumerate(FIELDS)}
            yield {**batch, "label": self._labels[chosen]}


class DCNv2(BaseModel):
    """A cross network and a deep MLP in parallel."""

    def __init__(self, feature_map: FeatureMap, settings: dict, **kwargs) -> None:
        super().__init__(feature_map, **kwargs)
        width = settings["dim"] * len(FIELDS)
        self.embedding = FeatureEmbedding(feature_map, settings["dim"])
        self.cross = CrossNetV2(width, settings["cross_layers"])
        self.deep = MLP_Block(width, settings["mlp"], dropout_rates=settings["dropout"],
                              batch_norm=True)  # fmt: skip
        self.head = torch.nn.Linear(width + settings["mlp"][-1], 1)

    def forward(self, inputs):
        features = self.embedding(self.get_inputs(inputs), flatten_emb=True)
        parts = torch.cat([self.cross(features), self.deep(features)], dim=-1)
        return {"y_pred": self.output_activation(self.head(parts))}


class DeepFM(BaseModel):
    """A factorization machine and a deep MLP in parallel."""

    def __init__(self, feature_map: FeatureMap, settings: dict, **kwargs) -> None:
        super().__init__(feature_map, **kwargs)
        width = settings["dim"] * len(FIELDS)
        self.embedding = FeatureEmbedding(feature_map, settings["dim"])
        self.machine = FactorizationMachine(feature_map)
        self.deep = MLP_Block(width, settings["mlp"], output_dim=1, batch_norm=True,
                              dropout_rates=settings["dropout"])  # fmt: skip

    def forward(self, inputs):
        inputs = self.get_inputs(inputs)
        vectors = self.embedding(inputs)
        logits = self.machine(inputs, vectors) + self.deep(vectors.flatten(start_dim=1))
        return {"y_pred": self.output_activation(logits)}


def feature_map_of(keys: np.ndarray, folder: str) -> FeatureMap:
    """Returns a feature map with a categorical field per column."""
    found = FeatureMap("frappe", folder)
    found.labels, found.num_fields = ["label"], len(FIELDS)
    for column, field in enumerate(FIELDS):
        size = int(keys[:, column].max()) + 1
        found.features[field] = {"source": "", "type": "categorical", "vocab_size": size,
                                 "padding_idx": None}  # fmt: skip
    return found


def main() -> None:
    data, model_name, seed, settings = *sys.argv[1:4], json.loads(sys.argv[4])
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(int(seed))
    with np.load(data) as arrays:
        parts = {
            part: (arrays[f"{part}_x"].astype(np.int64), arrays[f"{part}_y"].astype(np.float32))
            for part in ("train", "valid", "test")
        }
    size = settings["batch_size"]
    train = Batches(*parts["train"], size, shuffles=True)
    valid, test = (Batches(*parts[part], 8192, shuffles=False) for part in ("valid", "test"))
    with tempfile.TemporaryDirectory() as folder:
        features = feature_map_of(np.concatenate([keys for keys, _ in parts.values()]), folder)
        model = {"dcn": DCNv2, "deepfm": DeepFM}[model_name](
            features, settings, model_id=model_name, model_root=folder, verbose=0,
            metrics=["AUC", "logloss"], monitor="AUC", monitor_mode="max", early_stop_patience=2,
            embedding_regularizer=settings["embedding_regularizer"], reduce_lr_on_plateau=True,
        )  # fmt: skip
        model.compile("adam", "binary_crossentropy", settings["learning_rate"])
        model.reset_parameters()
        Path(model.model_dir).mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        model.fit(train, epochs=100, validation_data=valid)
        seconds = time.perf_counter() - start
        quality = model.evaluate(test)
    print(json.dumps({"auc": quality["AUC"], "log_loss": quality["logloss"],
                      "examples": train.examples, "seconds": seconds}))  # fmt: skip


if __name__ == "__main__":
    main()
