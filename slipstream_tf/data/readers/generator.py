"""Inputs drawn from a made-up law, shaped like Criteo's: skewed numbers, Zipf keys, clicks.

Nothing is stored: block b of a part is drawn from the seed (seed, part, b), so a stream of any
length takes no memory, is the same in every run and does not depend on the batch size. The parts
are different streams of one law. AUC on these inputs says nothing about real clicks.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from slipstream_tf._utils.errors import invalid, require_choice, require_integer, require_number
from slipstream_tf._utils.hashing import stream
from slipstream_tf.data.readers.base import BatchReader, Rows, first_inputs
from slipstream_tf.data.spec import PARTS, DataSpec

CLICK_RATE = 0.25
SMALLEST_CARDINALITY, LARGEST_CARDINALITY = 10, 100_000
MOST_KEYS = 1_000_000_000
BLOCK_INPUTS = 8192
DEFAULT_INPUTS = 400_000
# Standard deviation of the logit: with 2.0 the hidden law itself has an AUC of 0.87 (seed 0).
_SIGNAL = 2.0
# How much pairs of fields and the numbers matter, beside the keys by themselves.
_PAIR_WEIGHT, _DENSE_WEIGHT = 1.0, 0.25
# Streams of random numbers.
_STREAMS = {"train": 0, "test": 1, "valid": 4}
_LAW_STREAM, _CALIBRATION_STREAM = 2, 3
_LATENT_BITS = 21
_LARGEST_KEY = 1 << 62


class Named(NamedTuple):
    """What the name of generated data says.

    Attributes:
        examples: of the training part.
        largest: keys of the largest field.
        click_rate: share of the labels that are 1.
    """

    examples: int = DEFAULT_INPUTS
    largest: int = LARGEST_CARDINALITY
    click_rate: float = CLICK_RATE


def parse_name(name: str) -> Named | None:
    """Reads "generated", "generated:COUNT", "generated:COUNT:KEYS" or "...:RATE".

    Args:
        name: of a data set.

    Returns:
        What it says; None for other data.

    Raises:
        ValueError: it begins like one of these, but is none.
    """
    head, *numbers = name.split(":")
    if head != "generated":
        return None
    counts, rate = numbers[:2], numbers[2:]
    is_rate = all(re.fullmatch(r"0?\.\d+", number) and float(number) > 0 for number in rate)
    if len(rate) > 1 or not is_rate or not all(n.isdecimal() and int(n) for n in counts):
        raise ValueError(
            f"Invalid data {name!r}. Allowed: generated:COUNT, generated:COUNT:KEYS or "
            "generated:COUNT:KEYS:RATE: integers of at least 1 (inputs, and keys of the largest "
            "field), and a click rate above 0 and below 1."
        )
    sizes = dict(zip(Named._fields, map(int, counts), strict=False))
    found = Named(**sizes, click_rate=float(rate[0]) if rate else CLICK_RATE)
    if not SMALLEST_CARDINALITY <= found.largest <= MOST_KEYS:
        raise ValueError(
            f"Invalid data {name!r}. Allowed: KEYS from {SMALLEST_CARDINALITY} to {MOST_KEYS}."
        )
    return found


def default_cardinalities(fields: int, largest: int = LARGEST_CARDINALITY) -> tuple[int, ...]:
    """Returns `fields` cardinalities from 10 to `largest`, small and large ones in turn."""
    sizes = np.geomspace(SMALLEST_CARDINALITY, largest, fields).astype(int).tolist()
    return tuple(sizes[i // 2 if i % 2 == 0 else -1 - i // 2] for i in range(fields))


def zipf_ranks(uniform: np.ndarray, cardinalities: np.ndarray, exponent: float) -> np.ndarray:
    """Maps uniform numbers to ranks of a discretised Zipf law by its inverse distribution.

    Args:
        uniform: float64 [n, fields] in [0, 1).
        cardinalities: float64 [fields].
        exponent: s > 0; rank r (from 0) has the mass of x**-s between r + 1 and r + 2.

    Returns:
        int64 [n, fields], each in [0, its field's cardinality).
    """
    last = cardinalities + 1.0
    power = 1.0 - exponent
    if abs(power) < 1e-6:
        position = np.exp(uniform * np.log(last))
    else:
        position = (1.0 + uniform * (last**power - 1.0)) ** (1.0 / power)
    return np.clip(position, 1.0, cardinalities).astype(np.int64) - 1


class _Law:
    """How inputs and their clicks are drawn: keys, numbers, and the hidden model of the label."""

    def __init__(
        self,
        seed: int = 0,
        fields: int = 26,
        dense: int = 13,
        cardinalities: Sequence[int] | None = None,
        zipf: float = 1.05,
        drift: float = 0.0,
        click_rate: float = CLICK_RATE,
    ):
        """See `GeneratedReader`."""
        place = "GeneratedReader"
        require_integer("seed", seed, 0, None, place)
        require_integer("fields", fields, 1, None, place)
        require_integer("dense", dense, 0, None, place)
        require_number("zipf", zipf, 0.0, 10.0, place, open_minimum=True)
        require_number("drift", drift, 0.0, 1.0, place)
        require_number("click_rate", click_rate, 0.0, 1.0, place, open_minimum=True)
        if click_rate == 1.0:
            raise invalid("click_rate", click_rate, place, "a number above 0 and below 1")
        sizes = default_cardinalities(fields) if cardinalities is None else tuple(cardinalities)
        if len(sizes) != fields:
            raise invalid("cardinalities", sizes, place, f"one integer for each of {fields} fields")
        for size in sizes:
            require_integer("cardinalities", size, 1, _LARGEST_KEY // fields, place)
        self.seed, self.sizes, self.num_dense = seed, sizes, dense
        self._cardinalities = np.array(sizes, np.int64)
        self._zipf, self._drift = zipf, drift
        law = np.random.default_rng([seed, _LAW_STREAM])
        self._salts = law.integers(0, 1 << 63, fields, dtype=np.uint64)
        self._dense_center = law.uniform(-1.0, 3.0, dense)
        self._dense_weights = law.choice([-1.0, 1.0], dense) * _DENSE_WEIGHT
        # The logit is scaled and shifted so that every seed gives the same difficulty.
        self._mean, self._scale, self._intercept = 0.0, 1.0, 0.0
        sample = self.draw(np.random.default_rng([seed, _CALIBRATION_STREAM]), 2 * BLOCK_INPUTS)
        raw = self.logits(sample[0], sample[1])
        self._mean, self._scale = float(raw.mean()), _SIGNAL / max(float(raw.std()), 1e-9)
        self._intercept = _find_intercept((raw - self._mean) * self._scale, click_rate)

    def draw(
        self, generator: np.random.Generator, count: int, progress: Any = 0.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws keys int64 [count, fields] and dense float32 [count, num_dense].

        Args:
            generator: of random numbers.
            count: inputs.
            progress: how far the popularity has drifted, 0 to 1: a number or [count, 1].
        """
        uniform = generator.random((count, len(self._cardinalities)))
        keys = zipf_ranks(uniform, self._cardinalities.astype(float), self._zipf)
        if self._drift:
            moved = (self._drift * progress * self._cardinalities).astype(np.int64)
            keys = (keys + moved) % self._cardinalities
        normal = generator.standard_normal((count, len(self._dense_center)), np.float32)
        dense = np.log1p(np.exp(normal + self._dense_center.astype(np.float32)))
        return keys, dense

    def logits(self, keys: np.ndarray, dense: np.ndarray) -> np.ndarray:
        """Returns the log odds of a click, float64 [n].

        A key has a weight and a point in the plane, all of them from its hash; the points of
        neighbouring fields are multiplied, so that pairs of fields matter.
        """
        hashed = stream(self._salts, keys.astype(np.uint64))
        weight, x, y = (_latent(hashed, number) for number in range(3))
        raw = weight.sum(axis=1, dtype=np.float64)
        pairs = x[:, :-1] * x[:, 1:] + y[:, :-1] * y[:, 1:]
        raw += _PAIR_WEIGHT * pairs.sum(axis=1, dtype=np.float64)
        raw += dense @ self._dense_weights
        return (raw - self._mean) * self._scale + self._intercept


def _latent(hashed: np.ndarray, number: int) -> np.ndarray:
    """Bits of a hash as float32 in [-1, 1)."""
    bits = (hashed >> np.uint64(number * _LATENT_BITS)) & np.uint64((1 << _LATENT_BITS) - 1)
    return bits.astype(np.float32) * np.float32(2.0 / (1 << _LATENT_BITS)) - np.float32(1.0)


def _find_intercept(logits: np.ndarray, click_rate: float) -> float:
    """Bisects for the shift that makes the mean click probability `click_rate`."""
    low, high = -30.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        if (1.0 / (1.0 + np.exp(-(logits + middle)))).mean() < click_rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class GeneratedReader(BatchReader):
    """Draws one part of a generated data set, in batches.

    The keys of a field are 0 .. cardinality - 1, the most popular first.
    """

    def __init__(
        self,
        num_examples: int,
        part: str,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        **law: Any,
    ):
        """Draws the law, not the inputs.

        Args:
            num_examples: inputs of this part.
            part: "train", "valid" or "test".
            batch_size: inputs of a batch.
            drop_remainder: leave out a last batch that is not full.
            **law: what inputs are drawn from, by name:
                seed (default 0), of the law and of the inputs;
                fields (26), categorical ones, at least 1;
                dense (13), numbers per input; each is log1p of a log-normal one, so above 0;
                cardinalities (None), keys per field, [fields]; None: 10 to 100,000;
                zipf (1.05), exponent of the keys' popularity; larger is more skewed;
                drift (0.0), share of its field's keys by which the ranking of popularity moves on
                from the first to the last training input; the test part has the ranking of the end.
                click_rate (0.25), the share of the labels that are 1.
                With a drift, training inputs depend on `num_examples`.

        Raises:
            ValueError: an argument is out of its range.
        """
        super().__init__(batch_size, drop_remainder=drop_remainder)
        require_integer("num_examples", num_examples, 1, None, "GeneratedReader")
        require_choice("part", part, PARTS, "GeneratedReader")
        self._law = _Law(**law)
        self._num_inputs = num_examples
        self._stream = _STREAMS[part]
        self.cardinalities = self._law.sizes
        names = tuple(f"c{i}" for i in range(1, len(self.cardinalities) + 1))
        self.spec = DataSpec("generated", names, self._law.num_dense, num_examples)

    def click_logits(self, keys: np.ndarray, dense: np.ndarray) -> np.ndarray:
        """Returns the hidden law's log odds of a click: the best that a model can do.

        Args:
            keys: int64 [n, fields] of this reader.
            dense: float32 [n, num_dense] of this reader.

        Returns:
            float64 [n].
        """
        return self._law.logits(keys, dense)

    def best_predictions(self, most: int = 1_000_000) -> tuple[np.ndarray, np.ndarray]:
        """Returns labels and the hidden law's own log odds of them: no model ranks better.

        Args:
            most: inputs from the part's first one on.

        Returns:
            float32 [n] and float32 [n].
        """
        labels, logits = [], []
        for rows in first_inputs(self._blocks(0), most):
            labels.append(rows.label)
            logits.append(self.click_logits(rows.keys, rows.dense).astype(np.float32))
        return np.concatenate(labels), np.concatenate(logits)

    def _block(self, index: int) -> Rows:
        begin = index * BLOCK_INPUTS
        generator = np.random.default_rng([self._law.seed, self._stream, index])
        progress: Any = 1.0
        if self._stream == _STREAMS["train"]:
            positions = np.arange(begin, begin + BLOCK_INPUTS) / self._num_inputs
            progress = np.minimum(positions, 1.0)[:, None]
        keys, dense = self._law.draw(generator, BLOCK_INPUTS, progress)
        chance = 1.0 / (1.0 + np.exp(-self._law.logits(keys, dense)))
        label = (generator.random(BLOCK_INPUTS) < chance).astype(np.float32)
        end = min(BLOCK_INPUTS, self._num_inputs - begin)
        return Rows(label[:end], dense[:end], keys[:end])

    def _blocks(self, number: int) -> Iterator[Rows]:  # All passes are alike.
        return map(self._block, range(-(-self._num_inputs // BLOCK_INPUTS)))
