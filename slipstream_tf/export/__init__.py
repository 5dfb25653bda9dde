"""Serving: SavedModels without this package's ops, and the rows that changed since one."""

from slipstream_tf.export.deltas import apply_delta, delta
from slipstream_tf.export.rows import token
from slipstream_tf.export.saved import saved_model

__all__ = ["apply_delta", "delta", "saved_model", "token"]
