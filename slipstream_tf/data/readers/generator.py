"""Generates synthetic examples in the shape of Criteo's data.

Keys follow a Zipf distribution and dense values are skewed.

No data is stored. Block b of a part is drawn from the seed (seed, part, b). Therefore a stream of
any length takes no memory, is the same in each run, and does not depend on the batch size. The
parts are independent streams of the same distribution.

Note: the AUC on these examples is not comparable with the AUC on real clicks.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from slipstream_tf._utils.errors import invalid, require_choice, require_integer, require_number
from slipstream_tf._utils.hashing import stream
from slipstream_tf.data.readers.base import BatchReader, Rows
from slipstream_tf.data.spec import PARTS, DataSpec

CLICK_RATE = 0.25
ZIPF = 1.05  # Exponent of the Zipf distribution of keys.
SMALLEST_CARDINALITY, LARGEST_CARDINALITY = 10, 100_000
MAX_KEYS = 1_000_000_000
BLOCK_INPUTS = 8192
DEFAULT_INPUTS = 400_000
_MAX_PREDICTED = 1_000_000
# Standard deviation of the logit. With 2.0, the true logits have an AUC of 0.87 (seed 0).
_SIGNAL = 2.0
# Weights of field pairs and of dense values in the logit. Single keys have weight 1.
_PAIR_WEIGHT, _DENSE_WEIGHT = 1.0, 0.25
# Number of the random stream of each part.
_STREAMS = {"train": 0, "test": 1, "valid": 4}
_LAW_STREAM, _CALIBRATION_STREAM = 2, 3
_LATENT_BITS = 21
_LARGEST_KEY = 1 << 62


class Named(NamedTuple):
    """Holds the settings in the name of a generated data set.

    Attributes:
        examples: Number of examples in the training part.
        largest: Number of keys of the largest field.
        click_rate: Fraction of the labels that are 1.
    """

    examples: int = DEFAULT_INPUTS
    largest: int = LARGEST_CARDINALITY
    click_rate: float = CLICK_RATE


def parse_name(name: str) -> Named | None:
    """Parses "generated", "generated:COUNT", "generated:COUNT:KEYS" or "...:RATE".

    Args:
        name: Name of a data set.

    Returns:
        The settings, or None if the name does not start with "generated".

    Raises:
        ValueError: If a number in the name is malformed or out of range.
    """
    head, *numbers = name.split(":")
    if head != "generated":
        return None
    counts, rate = numbers[:2], numbers[2:]
    is_rate = all(re.fullmatch(r"0?\.\d+", number) and float(number) > 0 for number in rate)
    if len(rate) > 1 or not is_rate or not all(n.isdecimal() and int(n) for n in counts):
        allowed = (
            "generated:COUNT, generated:COUNT:KEYS or generated:COUNT:KEYS:RATE, with COUNT "
            "examples, KEYS keys in the largest field (integers >= 1), and a click rate RATE "
            "between 0 and 1, for example 0.03"
        )
        raise invalid("data", name, "generated data", allowed)
    sizes = dict(zip(Named._fields, map(int, counts), strict=False))
    found = Named(**sizes, click_rate=float(rate[0]) if rate else CLICK_RATE)
    if not SMALLEST_CARDINALITY <= found.largest <= MAX_KEYS:
        bounds = f"from {SMALLEST_CARDINALITY} to {MAX_KEYS}"
        allowed = f"generated:COUNT:KEYS with {bounds} keys in the largest field"
        raise invalid("data", name, "generated data", allowed)
    return found


def default_cardinalities(fields: int, largest: int = LARGEST_CARDINALITY) -> tuple[int, ...]:
    """Returns `fields` cardinalities from 10 to `largest`, alternating small and large ones."""
    sizes = np.geomspace(SMALLEST_CARDINALITY, largest, fields).astype(int).tolist()
    return tuple(sizes[i // 2 if i % 2 == 0 else -1 - i // 2] for i in range(fields))


def zipf_ranks(uniform: np.ndarray, cardinalities: np.ndarray) -> np.ndarray:
    """Maps uniform numbers to ranks of a discretized Zipf distribution by inversion.

    Args:
        uniform: float64 [n, fields] in [0, 1).
        cardinalities: float64 [fields].

    Returns:
        int64 [n, fields], each in [0, cardinality of the field). The probability of rank r, from 0,
        is proportional to the integral of `x**-s` from r + 1 to r + 2, where s is `ZIPF`.
    """
    power = 1.0 - ZIPF
    position = (1.0 + uniform * ((cardinalities + 1.0) ** power - 1.0)) ** (1.0 / power)
    return np.clip(position, 1.0, cardinalities).astype(np.int64) - 1


def _latent(hashed: np.ndarray, number: int) -> np.ndarray:
    """Converts bits of a hash to float32 in [-1, 1)."""
    bits = (hashed >> np.uint64(number * _LATENT_BITS)) & np.uint64((1 << _LATENT_BITS) - 1)
    return bits.astype(np.float32) * np.float32(2.0 / (1 << _LATENT_BITS)) - np.float32(1.0)


def _find_intercept(logits: np.ndarray, click_rate: float) -> float:
    """Returns the logit shift that makes the mean probability equal `click_rate`."""
    low, high = -30.0, 30.0
    for _ in range(40):
        middle = (low + high) / 2
        if (1.0 / (1.0 + np.exp(-(logits + middle)))).mean() < click_rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class GeneratedReader(BatchReader):
    """Generates one part of a synthetic data set in batches.

    The keys of a field are 0 to cardinality - 1, in the order of their popularity.
    """

    def __init__(
        self,
        num_examples: int,
        part: str,
        batch_size: int,
        *,
        seed: int = 0,
        fields: int = 26,
        dense: int = 13,
        cardinalities: Sequence[int] | None = None,
        click_rate: float = CLICK_RATE,
    ):
        """Draws the parameters of the distribution, but no examples.

        Args:
            num_examples: Number of examples in this part.
            part: `"train"`, `"valid"` or `"test"`.
            batch_size: Number of examples in a batch.
            seed: Seed of the distribution and of the examples.
            fields: Number of categorical fields, at least 1.
            dense: Number of dense values per example. A value is log1p of a log-normal variable,
                and therefore positive.
            cardinalities: Number of keys of each field, [fields]. Defaults to values from 10 to
                100,000.
            click_rate: Fraction of the labels that are 1, in (0, 1).

        Raises:
            ValueError: If an argument is out of range.
        """
        super().__init__(batch_size)
        place = "GeneratedReader"
        require_integer("num_examples", num_examples, 1, None, place)
        require_choice("part", part, PARTS, place)
        require_integer("seed", seed, 0, None, place)
        require_integer("fields", fields, 1, None, place)
        require_integer("dense", dense, 0, None, place)
        require_number("click_rate", click_rate, 0.0, 1.0, place, open_minimum=True)
        if click_rate == 1.0:
            raise invalid("click_rate", click_rate, place, "a number > 0 and < 1")
        sizes = default_cardinalities(fields) if cardinalities is None else tuple(cardinalities)
        if len(sizes) != fields:
            raise invalid(
                "cardinalities", sizes, place, f"one integer per field, {fields} in total"
            )
        for size in sizes:
            require_integer("cardinalities", size, 1, _LARGEST_KEY // fields, place)
        self.cardinalities, self._num_inputs = sizes, num_examples
        self._seeds = seed, _STREAMS[part]
        names = tuple(f"c{i}" for i in range(1, fields + 1))
        self.spec = DataSpec("generated", names, dense, num_examples)
        law = np.random.default_rng([seed, _LAW_STREAM])
        self._salts = law.integers(0, 1 << 63, fields, dtype=np.uint64)
        self._dense_center = law.uniform(-1.0, 3.0, dense)
        self._dense_weights = law.choice([-1.0, 1.0], dense) * _DENSE_WEIGHT
        # Scale and shift the logits so that all seeds give problems of the same difficulty.
        self._mean, self._scale, self._intercept = 0.0, 1.0, 0.0
        sample = self._draw(np.random.default_rng([seed, _CALIBRATION_STREAM]), 2 * BLOCK_INPUTS)
        raw = self.click_logits(*sample)
        self._mean, self._scale = float(raw.mean()), _SIGNAL / max(float(raw.std()), 1e-9)
        self._intercept = _find_intercept((raw - self._mean) * self._scale, click_rate)

    def _draw(self, generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws keys int64 [count, fields] and dense float32 [count, num_dense]."""
        uniform = generator.random((count, len(self.cardinalities)))
        keys = zipf_ranks(uniform, np.array(self.cardinalities, float))
        normal = generator.standard_normal((count, len(self._dense_center)), np.float32)
        dense = np.log1p(np.exp(normal + self._dense_center.astype(np.float32)))
        return keys, dense

    def click_logits(self, keys: np.ndarray, dense: np.ndarray) -> np.ndarray:
        """Returns the true log odds of a click.

        No model can predict clicks better.

        The hash of a key determines its weight and a point in the plane. The points of adjacent
        fields are multiplied, so that pairs of fields affect the clicks.

        Args:
            keys: int64 [n, fields] of this reader.
            dense: float32 [n, num_dense] of this reader.

        Returns:
            float64 [n].
        """
        hashed = stream(self._salts, keys.astype(np.uint64))
        weight, x, y = (_latent(hashed, number) for number in range(3))
        raw = weight.sum(axis=1, dtype=np.float64)
        pairs = x[:, :-1] * x[:, 1:] + y[:, :-1] * y[:, 1:]
        raw += _PAIR_WEIGHT * pairs.sum(axis=1, dtype=np.float64)
        raw += dense @ self._dense_weights
        return (raw - self._mean) * self._scale + self._intercept

    def best_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns labels and their true log odds, for the best possible AUC.

        Returns:
            float32 [n] labels and float32 [n] log odds of at most the first 1,000,000 examples.
        """
        labels, logits = [], []
        for rows in itertools.islice(self._blocks(0), -(-_MAX_PREDICTED // BLOCK_INPUTS)):
            labels.append(rows.label)
            logits.append(self.click_logits(rows.keys, rows.dense).astype(np.float32))
        return np.concatenate(labels)[:_MAX_PREDICTED], np.concatenate(logits)[:_MAX_PREDICTED]

    def _block(self, index: int) -> Rows:
        generator = np.random.default_rng([*self._seeds, index])
        keys, dense = self._draw(generator, BLOCK_INPUTS)
        chance = 1.0 / (1.0 + np.exp(-self.click_logits(keys, dense)))
        label = (generator.random(BLOCK_INPUTS) < chance).astype(np.float32)
        end = min(BLOCK_INPUTS, self._num_inputs - index * BLOCK_INPUTS)
        return Rows(label[:end], dense[:end], keys[:end])

    def _blocks(self, number: int) -> Iterator[Rows]:  # All passes have the same order.
        return map(self._block, range(-(-self._num_inputs // BLOCK_INPUTS)))
