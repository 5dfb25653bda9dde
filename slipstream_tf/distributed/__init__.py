"""Gradients on their way from the tape to the optimizer, and the ranks they travel between."""

from slipstream_tf.distributed.comm import Communicator, SingleProcess, Traffic, init
from slipstream_tf.distributed.gradients import DistributedGradientTape
from slipstream_tf.distributed.watch import PeerLostError

__all__ = [
    "Communicator",
    "DistributedGradientTape",
    "PeerLostError",
    "SingleProcess",
    "Traffic",
    "init",
]
