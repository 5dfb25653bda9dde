"""MovieLens 1M as a click task: does a user give a movie four stars or more?

In: the archive ml-1m.zip as GroupLens publishes it. Out: readers of a random 90/10 split.
"""

import contextlib
import io
import os
import re
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from slipstream_tf.inputs.readers.arrays import ArrayReader, open_entry
from slipstream_tf.inputs.spec import DataSpec

FIELDS = ("user", "movie", "gender", "age", "occupation", "region", "hour")
_LIKED_FROM = 4  # Stars.
_TEST_SHARE = 0.1
_SPLIT_SEED = 0

_RATINGS, _USERS = "ml-1m/ratings.dat", "ml-1m/users.dat"
# Those of GroupLens have 24.6 million and 134 thousand bytes.
_MOST_RATINGS_BYTES, _MOST_USERS_BYTES = 32 << 20, 1 << 20
_RATING = re.compile(rb"[0-9]{1,18}::[0-9]{1,18}::[1-5]::[0-9]{1,18}")
_RATING_FORM = "UserID::MovieID::Rating::Timestamp, integers, of 1 to 5 stars"
_USER = re.compile(rb"([0-9]{1,18})::([FM])::([0-9]{1,3})::([0-9]{1,3})::([0-9]{2}).*")
_USER_FORM = "UserID::Gender::Age::Occupation::Zip-code, of gender F or M and each user once"


def read_archive(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the ratings with what is known of their users.

    Args:
        path: of ml-1m.zip.

    Returns:
        keys int64 [n, 7] in the order of `FIELDS`; labels float32 [n], 1 for four stars or more.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such archive; the message names the file in it, and the line.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(file) as archive:
                with open_entry(archive, _RATINGS, size, _MOST_RATINGS_BYTES) as entry:
                    ratings = entry.read()
                with open_entry(archive, _USERS, size, _MOST_USERS_BYTES) as entry:
                    users = entry.read()
            return _joined(ratings, users)
        except Exception as error:  # There are many kinds that a damaged archive is told by.
            reason = f"{error}" or type(error).__name__
            raise ValueError(f"{path}: not the archive ml-1m.zip of GroupLens ({reason})") from None


def _joined(ratings: bytes, users: bytes) -> tuple[np.ndarray, np.ndarray]:
    user, movie, stars, timestamp = _rating_columns(ratings)
    known, profiles = _profiles(users)
    indices = np.searchsorted(known, user)
    is_unknown = known[np.minimum(indices, len(known) - 1)] != user
    if is_unknown.any():
        row = int(np.argmax(is_unknown))
        number, line = [(n, line) for n, line in enumerate(ratings.splitlines(), 1) if line][row]
        raise _malformed(_RATINGS, number, line, f"users that {_USERS} has")
    keys = np.column_stack([user, movie, profiles[indices], timestamp // 3600 % 24])
    return keys, (stars >= _LIKED_FROM).astype(np.float32)


def _rating_columns(content: bytes) -> list[np.ndarray]:
    """Returns users, movies, stars and timestamps, int64 [n] each; blank lines do not count."""
    # Arrow reads signs, spaces and hexadecimal numbers as well.
    table = None
    if content.strip() and not content.translate(None, b"0123456789:\r\n"):
        names = ["user", "movie", "stars", "timestamp"]
        with contextlib.suppress(pa.ArrowInvalid):
            table = pa_csv.read_csv(
                io.BytesIO(content.replace(b"::", b"\t")),
                read_options=pa_csv.ReadOptions(column_names=names, use_threads=False),
                parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
                convert_options=pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.int64()), null_values=[]
                ),
            )
    columns = [] if table is None else [column.to_numpy() for column in table.columns]
    if columns and ((columns[2] >= 1) & (columns[2] <= 5)).all():
        return columns
    for number, line in enumerate(content.splitlines(), 1):
        if line and not _RATING.fullmatch(line):
            raise _malformed(_RATINGS, number, line, _RATING_FORM)
    raise ValueError(f"{_RATINGS} has no ratings; allowed: lines of {_RATING_FORM}")


def _profiles(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Returns users, ascending, int64 [n]; is female, age, occupation, region, int64 [n, 4]."""
    profiles: dict[int, tuple[int, ...]] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        match = _USER.fullmatch(line)
        if match is None or int(match[1]) in profiles:
            raise _malformed(_USERS, number, line, _USER_FORM)
        user, gender, *numbers = match.groups()
        profiles[int(user)] = (gender == b"F", *map(int, numbers))
    if not profiles:
        raise ValueError(f"{_USERS} has no users; allowed: lines of {_USER_FORM}")
    users = sorted(profiles)
    return np.array(users, np.int64), np.array([profiles[user] for user in users], np.int64)


def _malformed(file: str, number: int, line: bytes, allowed: str) -> ValueError:
    shown = line[:60].decode(errors="backslashreplace")
    return ValueError(f"{file}:{number}: {shown!r}; allowed: {allowed}")


def split_rows(count: int, hold_out: bool = False) -> dict[str, np.ndarray]:
    """Returns the indices of the ratings of each part, always the same."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(count)
    border = count - int(count * _TEST_SHARE)
    valid = border - int(border * _TEST_SHARE)
    train = order[: valid if hold_out else border]
    return {"train": train, "valid": order[valid:border], "test": order[border:]}


def open_movielens(
    path: str, part: str, batch_size: int, seed: int, hold_out: bool = False
) -> ArrayReader:
    """Opens a part of the task.

    Args:
        path: of ml-1m.zip.
        part: "train", "valid" or "test": a random 90/10 split, always the same, of which "valid" is
            a tenth of the training part.
        batch_size: inputs per batch.
        seed: of the training part's order.
        hold_out: whether "valid" is left out of "train".

    Returns:
        The reader.

    Raises:
        OSError, ValueError: as `read_archive`.
    """
    keys, labels = read_archive(path)
    rows = split_rows(len(labels), hold_out)[part]
    spec = DataSpec("movielens", FIELDS, 0, len(rows))
    shuffle_seed = seed if part == "train" else None
    return ArrayReader(spec, keys[rows], labels[rows], batch_size, shuffle_seed=shuffle_seed)
