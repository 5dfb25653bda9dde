"""Distributed training: collectives, stores, optimizers and elastic jobs."""

from slipstream_tf._utils.comm import Communicator, Link, SingleProcess
from slipstream_tf.checkpoint.manager import CheckpointManager, SavedJob
from slipstream_tf.distributed.batches import pad_to_equal_steps, prefetch_keys, scale_loss
from slipstream_tf.distributed.elastic import ElasticState, run_elastic
from slipstream_tf.distributed.exchange import link_of
from slipstream_tf.distributed.exchanged import ReplicatedStore
from slipstream_tf.distributed.gradients import DistributedGradientTape
from slipstream_tf.distributed.horovod import init
from slipstream_tf.distributed.optimizer import DistributedOptimizer, flush_deferred
from slipstream_tf.distributed.sharded import ShardedStore
from slipstream_tf.distributed.watch import PeerLostError

__all__ = [
    "CheckpointManager",
    "Communicator",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ElasticState",
    "Link",
    "PeerLostError",
    "ReplicatedStore",
    "SavedJob",
    "ShardedStore",
    "SingleProcess",
    "flush_deferred",
    "init",
    "link_of",
    "pad_to_equal_steps",
    "prefetch_keys",
    "run_elastic",
    "scale_loss",
]
