"""What a message between ranks takes, and in what dtype rows are exchanged soonest. Pure.

A message takes the link's latency, its bytes on the way, and the making and reading of its values;
whatever is sent less often or in fewer bytes pays by these alone.
"""

import dataclasses
from collections.abc import Mapping

from slipstream_tf._utils.errors import require_number

# What the values of rows may become between ranks; the ops take their numbers. An int8 is a
# multiple of a 127th of its row's largest magnitude, which goes with the row as a float.
WIRE_DTYPES = ("float32", "bfloat16", "float16", "int8")
_VALUE_BYTES = dict(zip(WIRE_DTYPES, (4, 2, 2, 1), strict=True))
# What "auto" chooses among, the most exact first. A float16 takes as long as a bfloat16.
CHOICES = ("float32", "bfloat16", "int8")
# A dtype that rounds more is to take at most this part of what the one before it takes, and so many
# seconds less for each value: a training step spends some ten times as much on it.
_WORTH, _LEAST_SAVED = 0.8, 1e-9


def encoded_bytes(dtype: str, floats: float) -> float:
    """Returns the bytes of a row of so many values, 0 of none, in a dtype of `WIRE_DTYPES`."""
    scale = 4 if dtype == "int8" and floats else 0
    return floats * _VALUE_BYTES[dtype] + scale


def copies_of(ranks: int, is_spread: bool) -> float:
    """Returns how many others each row of a rank goes to, on average.

    Args:
        ranks: of the job.
        is_spread: whether each row has one owner; else all ranks have all rows.
    """
    return (ranks - 1) / ranks if is_spread else ranks - 1


@dataclasses.dataclass(frozen=True)
class Link:
    """What a message between ranks takes.

    Attributes:
        bytes_per_second: that a rank sends, while all do.
        latency: seconds of a message with next to nothing in it.
        codec_seconds: dtype -> seconds, for a value, of putting it into a message and taking it
            out.
    """

    bytes_per_second: float
    latency: float = 0.0
    codec_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require_number("bytes_per_second", self.bytes_per_second, 1.0, place="Link")
        require_number("latency", self.latency, 0.0, place="Link")

    def seconds(self, rows: float, floats: float, dtype: str, copies: float = 1.0) -> float:
        """Returns what rows and their keys take in one message, without its latency.

        Args:
            rows: of this rank.
            floats: values of a row.
            dtype: of the values, one of `WIRE_DTYPES`.
            copies: how many others each row goes to.
        """
        sent = rows * copies * (8 + encoded_bytes(dtype, floats))
        coded = rows * floats * max(copies, 1.0) * self.codec_seconds.get(dtype, 0.0)
        return sent / self.bytes_per_second + coded

    def choose(self, floats: float, copies: float = 1.0) -> str:
        """Returns the most exact of `CHOICES` beside which none that rounds more is worth it.

        Args:
            floats: values of a row.
            copies: see `seconds`.
        """
        chosen = CHOICES[0]
        for dtype in CHOICES[1:]:
            taken, before = (self.seconds(1, floats, it, copies) for it in (dtype, chosen))
            if taken < min(_WORTH * before, before - _LEAST_SAVED * floats):
                chosen = dtype
        return chosen

    def __str__(self) -> str:
        speed = f"{self.bytes_per_second / 1e6:,.0f} MB/s"
        return f"{speed} from each rank, {1e3 * self.latency:.2f} ms a message"
