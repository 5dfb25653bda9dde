"""Adam with decoupled weight decay."""

import dataclasses
from typing import ClassVar

from slipstream_tf.optimizers.adam import Adam


@dataclasses.dataclass(frozen=True)
class AdamW(Adam):
    """`Adam` with a `weight_decay` of 0.004, the default of `keras.optimizers.AdamW`.

    The rows of a batch decay. Keras's decays all of a table in each step, as with `decay="all"`.
    """

    weight_decay: float | None = dataclasses.field(default=0.004, kw_only=True)
    rule: ClassVar[str] = "adamw"
