"""Serving: SavedModels without this package's ops, and the rows that changed since one."""

from slipstream_tf.export.deltas import apply_delta, delta
from slipstream_tf.export.rows import TableRows, Token, token
from slipstream_tf.export.saved import saved_model

__all__ = ["TableRows", "Token", "apply_delta", "delta", "saved_model", "token"]
