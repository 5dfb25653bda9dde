"""The version branches."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import _compat


@pytest.mark.parametrize(
    ("version", "numbers"), [("3.15.1", (3, 15)), ("2.21.0-rc1", (2, 21)), ("3.0", (3, 0))]
)
def test_version_numbers(version, numbers):
    assert _compat.version_numbers(version) == numbers


def test_keras_3_is_found():
    assert _compat.require_keras() is keras


def test_keras_2_is_refused(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "2.15.0")
    with pytest.raises(ImportError, match=r"needs Keras 3, found keras 2\.15\.0\. Run: pip"):
        _compat.require_keras()


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError, match=r"found 'jax'\. Set KERAS_BACKEND=tensorflow"):
        _compat.require_keras()


def test_arrays_become_tensors_of_their_own_dtype():
    inputs = {"keys": {"a": np.array([1 << 60])}, "dense": tf.zeros((1, 2))}
    outputs = _compat.arrays_to_tensors(inputs)
    assert outputs["keys"]["a"].dtype == tf.int64
    assert int(outputs["keys"]["a"][0]) == 1 << 60
    assert outputs["dense"] is inputs["dense"]
    assert _compat.arrays_to_tensors(np.ones(2, np.float32)).dtype == tf.float32
