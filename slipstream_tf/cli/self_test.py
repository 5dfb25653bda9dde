"""Self-tests of the stores and of a kernel: compute a few rows and compare the results.

All expected values are exact in float32. A mismatch raises a RunError that contains both values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf.cli.flag_set import RunError
from slipstream_tf.config import Retention, Table
from slipstream_tf.initializers import Constant
from slipstream_tf.ops.drift import row_drift
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables import NativeStore, SokEmbeddingStore, VariableStore


def native_store() -> None:
    """Tests lookup, SGD update and reading of rows with native tables.

    Raises:
        RunError: If a result differs from the expected value.
    """
    table = Table("items", dim=2, initializer=Constant(0.5))
    store = NativeStore([table], optimizers.SGD(0.25))
    found = _updated_rows(store)
    _compare("found keys", found, [True, True, False])
    _compare("number of rows", store.size("items"), 2)


def sok_store() -> None:
    """Tests lookup, SGD update and reading of rows with SOK.

    SOK is NVIDIA's Sparse Operation Kit, which stores tables on GPUs.

    Raises:
        ImportError: If SOK cannot be loaded.
        RunError: If a result differs from the expected value.
    """
    # HierarchicalKV tables require a power of two as capacity, and an eviction strategy.
    table = Table("items", 2, initializer=Constant(0.5), retention=Retention(1024, eviction="lru"))
    _updated_rows(SokEmbeddingStore([table], optimizers.SGD(0.25), cache_bytes=1 << 20))


def _updated_rows(store: Any) -> Any:
    """Updates the table "items" and checks its rows.

    Returns:
        Whether the keys 7, 9 and 8 were found, bool [3].
    """
    specs = [FeatureSpec("item", "items")]
    keys = tf.constant([[7], [9], [7]], tf.int64)
    (pooled,), plan = store.lookup(pack(keys, specs), training=True)
    _compare("looked up rows", pooled, [[0.5, 0.5]] * 3)
    assert plan is not None  # A lookup with `training=True` returns a plan.
    store.apply_gradients(plan, [tf.constant([[1.0, 0.0], [0.0, 2.0], [1.0, 4.0]])])
    # Key 7 occurs twice: 0.5 - 0.25 * (1 + 1) and 0.5 - 0.25 * (0 + 4). Key 8 has no row, so its
    # initial values are returned.
    rows, found = store.gather("items", [7, 9, 8])
    _compare("rows after the update", rows, [[0.0, -0.5], [0.5, 0.0], [0.5, 0.5]])
    return found


def variable_store() -> None:
    """Tests masking of a saturated key's gradient with a `tf.Variable`.

    Raises:
        RunError: If a result differs from the expected value.
    """
    with tf.device("CPU:0"):
        variable = tf.Variable(tf.fill([4, 2], 0.5))
        store = VariableStore({"items": variable})
        store.set_saturated("items", [2])
        values = tf.constant([[1.0, 0.0], [8.0, 8.0], [1.0, 4.0], [0.0, 2.0]])
        indices = tf.constant([3, 2, 3, 0], tf.int64)
        kept = store.filter_gradient("items", tf.IndexedSlices(values, indices))
        variable.scatter_sub(tf.IndexedSlices(0.25 * kept.values, kept.indices))
    _compare("keys that are not masked", kept.indices, [0, 3])
    rows = [[0.5, 0.0], [0.5, 0.5], [0.5, 0.5], [0.0, -0.5]]
    _compare("rows after the update", variable, rows)
    counts = store.update_counts("items")
    _compare("gradient rows offered and masked", [counts.offered, counts.masked], [3, 1])


def kernel(device: str) -> None:
    """Runs a small kernel of the op library on a device and compares the result with the CPU's.

    Args:
        device: The device, for example "GPU:0".

    Raises:
        RunError: If the op did not run on the device, or the results differ.
        tf.errors.OpError: If the kernel cannot be launched, for example because the driver is too
            old.
    """
    # 1,000 rows need multiple blocks of threads.
    rows = np.random.default_rng(0).normal(size=(2, 1000, 24)).astype(np.float32)
    with tf.device("CPU:0"):
        expected = row_drift(*rows)
    with tf.device(device):
        actual = row_drift(*rows)
    kind = tf.DeviceSpec.from_string(actual.device).device_type
    if kind != tf.DeviceSpec.from_string(device).device_type:
        raise RunError(f"The op library has no kernel for {device}; the op ran on a {kind}.")
    is_wrong = actual.numpy() != expected.numpy()
    if is_wrong.any():
        text = f"{is_wrong.sum()} of {is_wrong.size} row drifts differ from the CPU's"
        raise RunError(f"A kernel of the op library is wrong on {device}: {text}.")


def _compare(what: str, actual: Any, by_hand: Any) -> None:
    actual, by_hand = np.asarray(actual), np.asarray(by_hand)
    if not np.array_equal(actual, by_hand):
        text = f"{what}: {actual.tolist()}. Expected {by_hand.tolist()}."
        raise RunError(f"The self-test of table 'items' failed for {text}")
