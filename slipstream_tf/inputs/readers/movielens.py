"""MovieLens 1M as a click task: does a user give a movie four stars or more?

In: the archive ml-1m.zip as GroupLens publishes it. Out: readers of a random 90/10 split.
"""

from __future__ import annotations

import io
import zipfile
import zlib

import numpy as np

from slipstream_tf.inputs.readers.arrays import ArrayReader
from slipstream_tf.inputs.spec import DataSpec

FIELDS = ("user", "movie", "gender", "age", "occupation", "region", "hour")
_LIKED_FROM = 4  # Stars.
_TEST_SHARE = 0.1
_SPLIT_SEED = 0


def read_archive(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the ratings with what is known of their users.

    Args:
        path: of ml-1m.zip.

    Returns:
        keys int64 [n, 7] in the order of `FIELDS`; labels float32 [n], 1 for four stars or more.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            ratings = _numbers(archive.read("ml-1m/ratings.dat"))
            profiles = _profiles(archive.read("ml-1m/users.dat").decode("latin-1"))
            user, movie, stars, timestamp = ratings.T
            keys = np.column_stack([user, movie, profiles[user], timestamp // 3600 % 24])
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, IndexError) as error:
        raise ValueError(f"{path}: not the archive ml-1m.zip of GroupLens ({error})") from None
    return keys, (stars >= _LIKED_FROM).astype(np.float32)


def _profiles(text: str) -> np.ndarray:
    """Returns (is female, age group, occupation, region) by user id, int64 [ids, 4]."""
    # UserID::Gender::Age::Occupation::Zip-code
    lines = [line.split("::") for line in text.splitlines()]
    profiles = np.zeros((max(int(user) for user, *_ in lines) + 1, 4), np.int64)
    for user, gender, age, occupation, zip_code in lines:
        profiles[int(user)] = (gender == "F", int(age), int(occupation), int(zip_code[:2]))
    return profiles


def _numbers(content: bytes) -> np.ndarray:
    # UserID::MovieID::Rating::Timestamp, all integers.
    text = io.StringIO(content.decode("latin-1").replace("::", " "))
    return np.loadtxt(text, dtype=np.int64, ndmin=2)


def split_rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of the training part's ratings and of the test part's, always the same."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(count)
    border = count - int(count * _TEST_SHARE)
    return order[:border], order[border:]


def open_movielens(
    path: str, part: str, batch_size: int, seed: int, ids: bool = False
) -> ArrayReader:
    """Opens a part of the task.

    Args:
        path: of ml-1m.zip.
        part: "train" or "test": a random 90/10 split, always the same.
        batch_size: inputs per batch.
        seed: of the training part's order.
        ids: see `ArrayReader`.

    Returns:
        The reader.

    Raises:
        OSError, ValueError: as `read_archive`.
    """
    keys, labels = read_archive(path)
    rows = split_rows(len(labels))[part == "test"]
    spec = DataSpec("movielens", FIELDS, 0, len(rows))
    shuffle_seed = seed if part == "train" else None
    return ArrayReader(
        spec, keys[rows], labels[rows], batch_size, shuffle_seed=shuffle_seed, ids=ids
    )
