"""Tests that given gradients produce bitwise the same rows in every version.

The digests are from the first edition, in which all tables shared one optimizer.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import initializers, optimizers
from slipstream_tf.config import Retention, Table
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import NativeStore

SPECS = [
    FeatureSpec("x", "a", "mean"),
    FeatureSpec("y", "b", "sum"),
    FeatureSpec("z", "b", "sqrtn"),
]
RULES = {
    "sgd": optimizers.SGD(0.1),
    "adagrad": optimizers.Adagrad(0.1, 0.1, 1e-7),
    "adagrad from 0": optimizers.Adagrad(0.05, 0.0, 1e-10),
    "rowwise_adagrad": optimizers.RowWiseAdagrad(0.1, 0.1, 1e-7),
    "adam": optimizers.Adam(0.01),
}
POLICIES = {
    "apply": UpdatePolicy(),
    "mask": UpdatePolicy("mask"),
    "movement": UpdatePolicy("defer", "movement", 0.02, 9, 64),
    "interval": UpdatePolicy("defer", "interval", max_age=4, max_rows=64),
}
STEPS, BATCH, WIDTH, KEYS = 30, 16, 3, 40
DIGESTS: dict[str, str] = {
    "sgd, apply": "df48f79fdc65c049c0ca9029",
    "sgd, mask": "226b5c42d30e6c36cc27b499",
    "sgd, movement": "15ed3aa68d6b864a39c79b8e",
    "sgd, interval": "7c5e112685bd9e5de187809c",
    "adagrad, apply": "7510c5a65734ce17c9244a22",
    "adagrad, mask": "bf3faebdb7ff9ca527fceddc",
    "adagrad, movement": "999aae15cc2f67aaa0e2de88",
    "adagrad, interval": "c78a469c8a50de9ae590d080",
    "adagrad from 0, apply": "ed0b6a97b8876edc9e2880d1",
    "adagrad from 0, mask": "2bf004b3b2cc796f760282bc",
    "adagrad from 0, movement": "4cf45a643a100529ffb1202b",
    "adagrad from 0, interval": "85d4fffb144bfe244993ca81",
    "rowwise_adagrad, apply": "a3d26df52c7a2c5ba556115b",
    "rowwise_adagrad, mask": "aa6cd5221f8815a91f3aca79",
    "rowwise_adagrad, movement": "c8f186649a3b5d1c1ceaab5c",
    "rowwise_adagrad, interval": "e07d3077f2619bb72cdbb753",
    "adam, apply": "4d2dd4c415dbdb5cb84e5b01",
    "adam, mask": "02798e7f163b191b749e848d",
    "adam, movement": "575637a9e1c345152be24fc3",
    "adam, interval": "b25f89e26dbc5da5218900ca",
}


def store_of(rule: optimizers.SparseOptimizer) -> NativeStore:
    tables = [
        Table("a", 5, initializer=initializers.RandomUniform(seed=1)),
        Table(
            "b", 16, initializer=initializers.RandomUniform(seed=2), retention=Retention(36, "lru")
        ),
    ]
    return NativeStore(tables, rule)


def digest(store: NativeStore, policy: UpdatePolicy) -> str:
    random = np.random.default_rng(7)
    for table in store.tables:
        store.set_update_policy(table.name, policy)
    for step in range(STEPS):
        if step == 10:
            for table in store.tables:
                keys = np.arange(0, KEYS, 3)
                store.set_row_flags(table.name, keys, np.full(keys.size, SATURATED))
        keys = random.integers(-1, KEYS, (BATCH, WIDTH))
        inputs = {"x": keys, "y": np.maximum(keys[:, 0], 0), "z": keys[:, 1:]}
        weights = {"z": random.random((BATCH, WIDTH - 1), np.float32)}
        packed = pack(inputs, SPECS, weights)
        _, plan = store.lookup(packed, training=True)
        gradients = [random.normal(size=(BATCH, dim)).astype(np.float32) for dim in (5, 16, 16)]
        store.apply_gradients(plan, [tf.constant(gradient) for gradient in gradients])
    hashed = hashlib.blake2b(digest_size=12)
    for table in store.tables:
        contents = store.export_table(table.name)
        for part in ("keys", "rows", "slots", "counts"):
            hashed.update(np.ascontiguousarray(contents[part]).tobytes())
    return hashed.hexdigest()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", RULES)
def test_rows_equal_recorded_digests(rule: str, policy: str) -> None:
    assert digest(store_of(RULES[rule]), POLICIES[policy]) == DIGESTS[f"{rule}, {policy}"]
