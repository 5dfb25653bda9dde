"""A dictionary-based store, its tracker and short windows, for engine tests."""

from __future__ import annotations

import collections

import numpy as np
from engine_settings import engine_settings

from slipstream_tf.config import Table
from slipstream_tf.engine.states import KeyState
from slipstream_tf.engine.tracker import SaturationTracker
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.ops.update_policy import UpdateCounts
from slipstream_tf.tables.base import TrackedStore

DIM = 2
ROW_BYTES = 4 * DIM
SPECS = [FeatureSpec("user", "user"), FeatureSpec("item", "item")]
DRIFTS = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}


class Store(TrackedStore):
    """A tracked store that keeps rows in dictionaries and records calls."""

    def __init__(self):
        self.tables = (Table("user", DIM), Table("item", DIM))
        self.rows = {table.name: {} for table in self.tables}
        self.counts = {table.name: collections.Counter() for table in self.tables}
        self.policies, self.flags = {}, {}
        self.offered = self.masked = 0

    def train(self, table, drifts):
        for key, delta in drifts.items():
            row = self.rows[table].get(key, np.zeros(DIM, np.float32))
            self.rows[table][key] = row + np.float32(delta)
            self.counts[table][key] += 1

    def size(self, table):
        return len(self.rows[table])

    def hot_keys(self, table, k):
        ordered = sorted(self.counts[table].items(), key=lambda item: (-item[1], item[0]))[:k]
        keys, counts = zip(*ordered, strict=True) if ordered else ((), ())
        return np.array(keys, np.int64), np.array(counts, np.float32)

    def gather(self, table, keys):
        rows = [self.rows[table].get(int(key), np.zeros(DIM)) for key in keys]
        found = [int(key) in self.rows[table] for key in keys]
        return np.array(rows, np.float32).reshape(-1, DIM), np.array(found, bool)

    def policy_of(self, table):
        return self.policies.get(table)

    def set_update_policy(self, table, policy):
        self.policies[table] = policy

    def set_row_flags(self, table, keys, flags):
        self.flags[table] = dict(zip(map(int, keys), map(int, flags), strict=True))

    def update_counts(self, table):
        return UpdateCounts(offered=self.offered, masked=self.masked)

    def decay_counts(self, factor):
        for counts in self.counts.values():
            for key in counts:
                counts[key] *= factor


def make(*policies, **settings):
    """Returns a store and its tracker.

    For policies that skip or mask, `fraction` defaults to 0.5 and no key is probed.
    """
    defaults = {"window_steps": 10, "warmup": 0}
    if set(policies) & {"skip_examples", "mask_gradients"} or "defer_until" in settings:
        defaults["revisit_every"] = 0
        if "threshold" not in settings:
            defaults["fraction"] = 0.5
    store = Store()
    chosen = engine_settings(*policies, **{**defaults, **settings})
    return store, SaturationTracker(store, chosen, SPECS)


def window(store, tracker, drifts=None):
    """Trains one window and ends it.

    Each user key moves by its drift and item key 0 does not move. The classifier sees one example
    per user.

    Returns:
        (report of the window, results of the classifier as NumPy arrays).
    """
    drifts = DRIFTS if drifts is None else drifts
    store.train("user", drifts)
    store.train("item", {0: 0.0})
    users = np.array(list(drifts), np.int64)
    inputs = np.stack([users, np.zeros_like(users)], axis=1)
    found = tracker.classifier.classify(inputs, SPECS)
    return tracker.step(10), [part.numpy() for part in found]


def state_of(tracker, table, key):
    states = tracker.states[table]
    return KeyState(states.states[states.keys.tolist().index(key)])
