"""Exports models as plain SavedModels and updates them with row deltas."""

from slipstream_tf.export.deltas import apply_delta, delta
from slipstream_tf.export.rows import token
from slipstream_tf.export.saved import saved_model

__all__ = ["apply_delta", "delta", "saved_model", "token"]
