"""Stores for tables in NVIDIA's Sparse Operation Kit (SOK), sharded over ranks.

`SokStore` watches existing SOK variables. `SokEmbeddingStore` creates its tables in SOK. Both
implement the interfaces of `tables.base`, and import SOK only when a store is created.
"""

from slipstream_tf.tables.sok.table import wrap_optimizer

__all__ = ["wrap_optimizer"]
