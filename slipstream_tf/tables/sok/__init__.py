"""Stores of tables in NVIDIA's Sparse Operation Kit (SOK), whose rows are spread over ranks.

In: variables of the user's that `SokStore` watches, or settings of tables that `SokEmbeddingStore`
makes. Out: the contracts of `tables.base`. SOK is imported when one is made.
"""

from slipstream_tf.tables.sok.table import open_sok, require_lookup_sparse, slots_of, wrap_optimizer

__all__ = ["open_sok", "require_lookup_sparse", "slots_of", "wrap_optimizer"]
