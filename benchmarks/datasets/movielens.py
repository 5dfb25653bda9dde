"""Prepares MovieLens 1M as a click task for slipstream-train.

    python benchmarks/datasets/movielens.py ml-1m.zip --output=prepared/movielens

The input is the archive that GroupLens publishes. A rating of at least four stars is a click. A
random permutation, which is also the order of the examples, assigns 90% of the ratings to training
and 10% to testing. With --hold_out, a tenth of the training part becomes the validation part.
"""

from __future__ import annotations

import io
import zipfile

import numpy as np
import preparing
import pyarrow as pa
import pyarrow.csv as pa_csv

from slipstream_tf.cli.flag_set import Flag

FIELDS = ("user", "movie", "gender", "age", "occupation", "region", "hour")
FLAGS = (Flag("hold_out", None, "move a tenth of the training part to a validation part"),)
_LIKED_FROM = 4  # Stars.
_TEST_FRACTION = 0.1
_SPLIT_SEED = 0
_RATING_COLUMNS = {"user": pa.int64(), "movie": pa.int64(), "stars": pa.int64(), "ts": pa.int64()}
_USER_COLUMNS = {
    "user": pa.int64(), "gender": pa.string(), "age": pa.int64(), "occupation": pa.int64(),
    "zip": pa.string(),
}  # fmt: skip


def read_archive(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the ratings and joins them with the features of their users.

    Args:
        path: Path of ml-1m.zip.

    Returns:
        Keys, int64 [n, 7], with columns in the order of `FIELDS`, and labels, float32 [n]: 1 for
        at least four stars.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not the MovieLens 1M archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            ratings = _read_table(archive, "ml-1m/ratings.dat", _RATING_COLUMNS)
            users = _read_table(archive, "ml-1m/users.dat", _USER_COLUMNS)
        gender = users["gender"].to_pylist()
        region = [int(code[:2]) for code in users["zip"].to_pylist()]
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile and pyarrow raise errors of many types for damaged files.
        raise ValueError(f"{path} is not the archive ml-1m.zip of GroupLens: {error}") from error
    known = users["user"].to_numpy()
    order = np.argsort(known)
    profiles = np.column_stack(
        [np.array(gender) == "F", users["age"], users["occupation"], region]
    ).astype(np.int64)[order]
    user = ratings["user"].to_numpy()
    indices = np.searchsorted(known, user, sorter=order)
    is_known = known[order][np.minimum(indices, len(known) - 1)] == user
    if not is_known.all():
        raise ValueError(
            f"{path}: user {user[~is_known][0]} of ratings.dat is missing in users.dat."
        )
    hour = ratings["ts"].to_numpy() // 3600 % 24
    keys = np.column_stack([user, ratings["movie"].to_numpy(), profiles[indices], hour])
    return keys, (ratings["stars"].to_numpy() >= _LIKED_FROM).astype(np.float32)


def _read_table(archive: zipfile.ZipFile, name: str, columns: dict[str, pa.DataType]) -> pa.Table:
    return pa_csv.read_csv(
        io.BytesIO(archive.read(name).replace(b"::", b"\t")),
        read_options=pa_csv.ReadOptions(column_names=list(columns)),
        parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pa_csv.ConvertOptions(column_types=columns, null_values=[]),
    )


def read(path: str, hold_out: bool) -> preparing.PartsSource:
    """Reads the archive and splits the ratings into parts.

    Args:
        path: Path of ml-1m.zip.
        hold_out: Whether to move a tenth of the training part to a validation part.

    Returns:
        The examples of all parts.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not the MovieLens 1M archive.
    """
    keys, labels = read_archive(path)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    border = len(labels) - int(len(labels) * _TEST_FRACTION)
    valid = border - int(border * _TEST_FRACTION) if hold_out else border
    rows = {"train": order[:valid], "valid": order[valid:border], "test": order[border:]}
    parts = {part: (keys[own], labels[own]) for part, own in rows.items() if len(own)}
    return preparing.PartsSource("movielens", path, FIELDS, parts, {"hold_out": hold_out})


if __name__ == "__main__":
    preparing.entry_point(
        "movielens.py", "Prepares MovieLens 1M as a click task.", "ml-1m.zip", FLAGS, read
    )
