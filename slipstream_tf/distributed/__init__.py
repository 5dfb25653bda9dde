"""Gradients on their way from the tape to the optimizer."""

from slipstream_tf.distributed.gradients import DistributedGradientTape

__all__ = ["DistributedGradientTape"]
