"""Stores: what owns the rows of embedding tables. `native` is the C++ hash table on the CPU."""

from __future__ import annotations

from slipstream_tf.stores.base import EmbeddingStore
from slipstream_tf.stores.native import NativeStore

__all__ = ["EmbeddingStore", "NativeStore"]
