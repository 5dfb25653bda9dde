"""Replicas are exported without their values and imported with their flags."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table
from slipstream_tf.config import Retention, Storage
from slipstream_tf.ops import table as table_ops
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import SATURATED
from slipstream_tf.optimizers import Adagrad
from slipstream_tf.tables.native import NativeStore
from slipstream_tf.tables.replicas import Replicas, ReplicatingStore

SPECS = [FeatureSpec("f", "t", "sum")]
KEYS = np.array([2, 3, 5, 7, 11])
FLAGS = np.array([0, SATURATED, SATURATED, 0, SATURATED], np.uint8)


def trained(steps: int = 1) -> Replicas:
    store = Replicas([Table("t", 4)], Adagrad(0.5), rows=8)
    for keys in (KEYS[::-1], KEYS[:3]) * steps:
        (rows,), plan = store.lookup(pack({"f": tf.constant(keys)}, SPECS), training=True)
        store.apply_gradients(plan, [rows + 1.0])
    store.set_row_flags("t", KEYS, FLAGS)
    return store


class ReplicasOnlyStore(ReplicatingStore):
    """A store that contains only replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self.tables, self._replicas = replicas.tables, replicas


def test_replica_export_has_no_values() -> None:
    store = trained()
    whole = store.export_table("t", flush=False)
    found = ReplicasOnlyStore(store).export_copies("t")
    np.testing.assert_array_equal(found.pop("marks"), FLAGS)
    assert set(whole) - set(found) == {"rows", "slots"} and len(found["last_used"]) == KEYS.size
    for name, values in found.items():
        np.testing.assert_array_equal(values, whole[name], name)


@pytest.mark.parametrize("takes_flags", [True, False])
def test_import_restores_saved_or_current_flags(takes_flags: bool) -> None:
    old, new = ReplicasOnlyStore(trained()), ReplicasOnlyStore(trained(3))
    new._replicas.set_row_flags("t", KEYS[:2], np.array([SATURATED, 0], np.uint8))
    new.import_copies("t", old.export_copies("t"), takes_flags)
    now = FLAGS if takes_flags else np.array([SATURATED, 0, 0, 0, 0])
    np.testing.assert_array_equal(new._replicas.row_flags("t", KEYS), now)
    found, whole = (s._replicas.export_table("t", flush=False) for s in (new, old))
    for name in ("rows", "slots"):
        assert found[name].shape == whole[name].shape and not found.pop(name).any()
    for name, values in found.items():
        np.testing.assert_array_equal(values, whole[name], name)


def test_spilled_rows_are_refused(tmp_path) -> None:
    storage = Storage(memory=1 << 20, spill=tmp_path)
    store = NativeStore([Table("t", 4, storage=storage)], Adagrad(0.5))
    with pytest.raises(tf.errors.InvalidArgumentError, match="'t' spills rows to disk"):
        table_ops.export_replicas(store._handle_of("t"))


def test_table_without_eviction_has_no_access_times() -> None:
    store = NativeStore([Table("t", 4, retention=Retention(8))], Adagrad(0.5))
    store.write_rows("t", KEYS, np.ones((KEYS.size, 4), np.float32))
    found = table_ops.export_replicas(store._handle_of("t"))
    assert found["keys"].tolist() == KEYS.tolist()
    assert found["last_used"].size == 0 and not found["marks"].any()
