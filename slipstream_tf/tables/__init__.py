"""Stores, which hold the rows of embedding tables or watch external rows.

`native` contains C++ hash tables on the CPU. `variable` watches dense `tf.Variable`s. `sok` works
with tables of NVIDIA's Sparse Operation Kit (SOK) on GPUs.
"""

from slipstream_tf.tables.native import NativeStore
from slipstream_tf.tables.rows import from_embedding, rename_keys
from slipstream_tf.tables.sok import files as sok_files
from slipstream_tf.tables.sok import hkv
from slipstream_tf.tables.sok.embeddings import SokEmbeddingStore
from slipstream_tf.tables.sok.store import SokStore
from slipstream_tf.tables.variable import VariableStore

__all__ = [
    "NativeStore",
    "SokEmbeddingStore",
    "SokStore",
    "VariableStore",
    "from_embedding",
    "hkv",
    "rename_keys",
    "sok_files",
]
