"""A rank of test_train_cli.py: slipstream-train; with `fail-on-1` first, rank 1 breaks off."""

from __future__ import annotations

import sys
from typing import Any

from slipstream_tf import launch
from slipstream_tf.cli import train


def break_off() -> None:
    """Makes this rank's data fail at its third batch."""
    import numpy as np
    import tensorflow as tf

    from slipstream_tf.cli import session

    whole = session.share_of_rank

    def check(index: np.int64) -> np.int64:
        if index == 2:
            raise ValueError("the third batch is torn")
        return index

    def torn(dataset: tf.data.Dataset, comm: Any) -> tf.data.Dataset:
        def read(index: Any, batch: Any) -> Any:
            with tf.control_dependencies([tf.numpy_function(check, [index], tf.int64)]):
                return tf.nest.map_structure(tf.identity, batch)

        return whole(dataset, comm).enumerate().map(read)

    session.share_of_rank = torn


if __name__ == "__main__":
    if sys.argv[1] == "fail-on-1":
        del sys.argv[1]
        if launch.rank() == 1:
            break_off()
    train.entry_point()
