"""Click models over an `EmbeddingCollection`: DLRM and DCN-v2."""

from slipstream_tf.models.dcn import DCNv2
from slipstream_tf.models.dlrm import DLRM
from slipstream_tf.models.interaction import Cross, pairwise_dots
from slipstream_tf.models.mlp import MLP

__all__ = ["DLRM", "MLP", "Cross", "DCNv2", "pairwise_dots"]
