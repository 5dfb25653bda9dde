"""Stores: what holds the rows of embedding tables, or watches them.

`native` is the C++ hash table on the CPU, `variable` watches dense variables, `sok` those of
NVIDIA's Sparse Operation Kit on GPUs.
"""

from slipstream_tf.stores.base import EmbeddingStore, TrackedStore
from slipstream_tf.stores.migration import from_embedding, rename_keys
from slipstream_tf.stores.native import NativeStore
from slipstream_tf.stores.rows import TableRows
from slipstream_tf.stores.sok import files as sok_files
from slipstream_tf.stores.sok import hkv
from slipstream_tf.stores.sok.embeddings import SokEmbeddingStore
from slipstream_tf.stores.sok.store import SokStore
from slipstream_tf.stores.variable import VariableStore

__all__ = [
    "EmbeddingStore",
    "NativeStore",
    "SokEmbeddingStore",
    "SokStore",
    "TableRows",
    "TrackedStore",
    "VariableStore",
    "from_embedding",
    "hkv",
    "rename_keys",
    "sok_files",
]
