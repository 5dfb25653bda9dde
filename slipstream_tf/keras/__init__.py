"""Keras 3 layers, models, optimizers and callbacks, and the `Slipstream` engine."""

from slipstream_tf.keras.callbacks import (
    ElasticCallback,
    LearningRates,
    RanksCallback,
    SaturationCallback,
)
from slipstream_tf.keras.combined_optimizer import CombinedOptimizer
from slipstream_tf.keras.contract import connect
from slipstream_tf.keras.embedding import Embedding
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.keras.loss_feedback import LossFeedback, Model, Sequential
from slipstream_tf.keras.row_snapshots import limit_snapshots
from slipstream_tf.keras.slipstream import Slipstream
from slipstream_tf.ops.features import FeatureSpec

__all__ = [
    "CombinedOptimizer",
    "ElasticCallback",
    "Embedding",
    "EmbeddingCollection",
    "FeatureSpec",
    "LearningRates",
    "LossFeedback",
    "Model",
    "RanksCallback",
    "SaturationCallback",
    "Sequential",
    "Slipstream",
    "connect",
    "limit_snapshots",
]
