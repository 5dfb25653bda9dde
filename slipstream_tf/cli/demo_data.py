"""Which data the demo uses, and why: given, lying beside the sources, downloaded, or generated."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from slipstream_tf import disk
from slipstream_tf.cli.flag_set import UsageError

ENVIRONMENT = "SLIPSTREAM_DATA"
GLOBO_FILE = "globo_clicks.npz"

MOVIELENS_URL = "https://files.grouplens.org/datasets/movielens/ml-1m.zip"
MOVIELENS_SHA256 = "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20"
MOVIELENS_TERMS = (
    "MovieLens 1M by GroupLens, University of Minnesota: free for research; no redistribution or "
    "commercial use without their permission (Harper and Konstan, 2015, doi 10.1145/2827872)"
)
_MOST_BYTES = 50 << 20
_TIMEOUT_SECONDS = 10.0
_BLOCK_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Choice:
    """The data of a demo.

    Attributes:
        data: for `slipstream-train --data`.
        reason: why this one, in one sentence or more.
    """

    data: str
    reason: str


def choose(given: str | None, downloads: bool = True) -> Choice:
    """Decides on the data.

    In this order: what the user gave; globo clicks in the folder $SLIPSTREAM_DATA, or in
    ../shared/data beside the checkout that this is started in; MovieLens 1M, downloaded once; a
    seeded generator.

    Args:
        given: value of --data, or None.
        downloads: whether anything may be downloaded.

    Returns:
        The data and the reason.

    Raises:
        UsageError: $SLIPSTREAM_DATA is set, but the file is not there.
    """
    if given is not None:
        return Choice(given, "given by --data")
    path = local_globo()
    if path is not None:
        return Choice(str(path), f"found {GLOBO_FILE} on this machine")
    reasons = [f"no {GLOBO_FILE} in ${ENVIRONMENT} or ../shared/data"]
    if downloads:
        print(f"No {GLOBO_FILE} here; trying {MOVIELENS_URL} (6 MB) ...", file=sys.stderr)
        try:
            path = download_movielens(cache_folder())
        except (OSError, ValueError, http.client.HTTPException) as error:
            reasons.append(f"MovieLens could not be downloaded ({error})")
        else:
            return Choice(str(path), f"{reasons[0]}; {MOVIELENS_TERMS}")
    else:
        reasons.append("no download wanted")
    return Choice("generated", "; ".join(reasons) + "; so inputs are generated from a fixed seed")


def local_globo() -> Path | None:
    """Returns the path of the globo clicks on this machine, or None."""
    folder = os.environ.get(ENVIRONMENT)
    if folder:
        path = Path(folder) / GLOBO_FILE
        if not path.is_file():
            raise UsageError(
                f"Invalid {ENVIRONMENT}={folder}: no {GLOBO_FILE} in it. Allowed: a folder with "
                "that file, or unset the variable."
            )
        return path
    # `make demo` starts in the checkout; an installed package does not know where that is.
    for start in (Path.cwd(), Path(__file__).resolve().parents[2]):
        path = start.parent / "shared" / "data" / GLOBO_FILE
        if (start / "cc_ops").is_dir() and path.is_file():
            return path
    return None


def cache_folder() -> Path:
    """Returns where downloads are kept: $XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream_tf"


def download_movielens(folder: Path) -> Path:
    """Fetches MovieLens 1M once, and checks that it is what it should be.

    Args:
        folder: where it is kept.

    Returns:
        Path of the archive.

    Raises:
        OSError: it cannot be fetched or written.
        ValueError: the archive is another one.
    """
    url, path = MOVIELENS_URL, folder / "ml-1m.zip"
    if path.is_file() and _sha256(path) == MOVIELENS_SHA256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with disk.whole_file(path) as partial:
        try:
            _fetch(url, partial)
        except urllib.error.URLError as error:
            raise OSError(f"{url}: {error.reason}") from None
        if _sha256(partial) != MOVIELENS_SHA256:
            raise ValueError(f"{url}: not the archive that is expected (its SHA-256 differs)")
    return path


def _fetch(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response, open(path, "wb") as out:
        total = 0
        while block := response.read(_BLOCK_BYTES):
            total += len(block)
            if total > _MOST_BYTES:
                raise ValueError(f"{url}: longer than {_MOST_BYTES >> 20} MiB")
            out.write(block)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
