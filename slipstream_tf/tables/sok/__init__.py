"""Stores of tables in NVIDIA's Sparse Operation Kit (SOK), whose rows are spread over ranks.

In: variables of the user's that `SokStore` watches, or settings of tables that `SokEmbeddingStore`
makes. Out: the contracts of `tables.base`. SOK is imported when one is made.
"""

from slipstream_tf.tables.sok.table import wrap_optimizer

__all__ = ["wrap_optimizer"]
