"""The Keras 3 side: the embedding layer, and the front object of saturation with its callback."""

from slipstream_tf.keras.callback import SaturationCallback
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.keras.ledger import Ledger
from slipstream_tf.keras.slipstream import Slipstream
from slipstream_tf.ops.features import FeatureSpec

__all__ = ["EmbeddingCollection", "FeatureSpec", "Ledger", "SaturationCallback", "Slipstream"]
