"""Distributed training: collectives, stores, optimizers and elastic jobs."""

from slipstream_tf._utils.comm import Communicator, Link, SingleProcess
from slipstream_tf.checkpoint.manager import JobCheckpoints, SavedJob
from slipstream_tf.distributed.batches import even_ends, scale_loss, with_next
from slipstream_tf.distributed.elastic import ElasticState, run_elastic
from slipstream_tf.distributed.exchange import link_of
from slipstream_tf.distributed.exchanged import ReplicatedStore
from slipstream_tf.distributed.gradients import DistributedGradientTape
from slipstream_tf.distributed.horovod import init
from slipstream_tf.distributed.optimizer import DistributedOptimizer, flush_deferred
from slipstream_tf.distributed.sharded import ShardedStore
from slipstream_tf.distributed.watch import PeerLostError

__all__ = [
    "Communicator",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ElasticState",
    "JobCheckpoints",
    "Link",
    "PeerLostError",
    "ReplicatedStore",
    "SavedJob",
    "ShardedStore",
    "SingleProcess",
    "even_ends",
    "flush_deferred",
    "init",
    "link_of",
    "run_elastic",
    "scale_loss",
    "with_next",
]
