"""Stores: what holds the rows of embedding tables, or watches them.

`native` is the C++ hash table on the CPU, `variable` watches dense variables, `sok` those of
NVIDIA's Sparse Operation Kit on GPUs.
"""

from __future__ import annotations

from slipstream_tf.stores.base import EmbeddingStore
from slipstream_tf.stores.native import NativeStore
from slipstream_tf.stores.sok_embeddings import SokEmbeddingStore
from slipstream_tf.stores.sok_pooled import SokPooledStore
from slipstream_tf.stores.sok_store import SokStore
from slipstream_tf.stores.variable import VariableStore

__all__ = [
    "EmbeddingStore",
    "NativeStore",
    "SokEmbeddingStore",
    "SokPooledStore",
    "SokStore",
    "VariableStore",
]
