"""The version branches."""

from __future__ import annotations

import keras
import pytest

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
