"""Inputs: readers of click data, and the transformation that leaves skippable inputs out."""

from slipstream_tf.inputs.spec import MISSING_KEY, BadLineError, BadLines, DataSpec, Reader

__all__ = ["MISSING_KEY", "BadLineError", "BadLines", "DataSpec", "Reader"]
