"""Click models over an `EmbeddingCollection`: DLRM, DCN-v2, DeepFM, FinalMLP, DIN, TBSM."""

from slipstream_tf.models.click_model import MLP
from slipstream_tf.models.dcn import DCNv2
from slipstream_tf.models.deepfm import DeepFM
from slipstream_tf.models.din import DIN
from slipstream_tf.models.dots import DLRM, TBSM
from slipstream_tf.models.final_mlp import FinalMLP
from slipstream_tf.models.interaction import pairwise_dots
from slipstream_tf.models.standardization import Standardization

__all__ = [
    "DIN",
    "DLRM",
    "MLP",
    "TBSM",
    "DCNv2",
    "DeepFM",
    "FinalMLP",
    "Standardization",
    "pairwise_dots",
]
