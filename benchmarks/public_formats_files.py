"""Writes generated files in ten public formats, and reads them with pandas.

The values are drawn by a law. Its probabilities have the highest possible AUC.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import common
import numpy as np

Row = dict[str, Any]
Law = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Format:
    """Describes a public format.

    Attributes:
        write: Function of (random generator, number of examples, folder) that writes the published
            files, and DATA if it is not a published file. It returns the probability of a positive
            label and the time of each line of DATA, float64 [lines] and int64 [lines].
        data: Name of DATA.
        schema: The schema, or None.
        read: Function of (pandas, folder) that reads the published files as a data frame with the
            columns of the schema.
        split: Value of --split: "runs" or "time".
    """

    write: Callable[[np.random.Generator, int, Path], Law]
    data: str
    schema: Mapping[str, Any] | None
    read: Callable[[Any, Path], Any]
    split: str = "runs"


@dataclasses.dataclass
class Drawn:
    """Holds drawn examples.

    Attributes:
        codes: int64 [count, columns], skewed.
        chance: float64 [count]: probability of a click.
        clicked: bool [count].
        seconds: int64 [count]: times since 1970, ascending.
    """

    codes: np.ndarray
    chance: np.ndarray
    clicked: np.ndarray
    seconds: np.ndarray

    def by_column(self, column: int) -> Drawn:
        """Returns the examples in the order of a code, as files that are sorted by users."""
        order = np.argsort(self.codes[:, column], kind="stable")
        fields = (self.codes, self.chance, self.clicked, self.seconds)
        return Drawn(*(values[order] for values in fields))


def draw(
    random: np.random.Generator,
    count: int,
    sizes: Sequence[int],
    mean: float,
    others: np.ndarray | float = 0.0,
) -> Drawn:
    """Draws examples: each code has an effect on the log-odds.

    Args:
        random: Random generator.
        count: Number of examples.
        sizes: Number of distinct codes of each column.
        mean: Log-odds without effects.
        others: Log-odds of other columns, a scalar or [count].
    """
    codes = np.stack([common.zipf_keys(random, n, [count], 0.7) for n in sizes], axis=1)
    odds = mean + others + np.zeros(count)
    for column, size in zip(codes.T, sizes, strict=True):
        odds += random.normal(0, 1.5 / len(sizes) ** 0.5, size)[column]
    chance = 1 / (1 + np.exp(-odds))
    seconds = np.sort(random.integers(1_400_000_000, 1_420_000_000, count))
    return Drawn(codes, chance, random.random(count) < chance, seconds)


def write_lines(path: Path, lines: Sequence[str], encoding: str = "utf-8", end: str = "\n") -> None:
    """Writes lines to a file, compressed if its name ends with .gz."""
    content = "".join(line + end for line in lines).encode(encoding)
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)


def joined(lines: Sequence[str], column: int, others: Sequence[str], delimiter: str) -> list[str]:
    """Appends to each line the line of another table that begins with the value of a column."""
    named = dict(line.split(delimiter, 1) for line in others)
    return [line + delimiter + named[line.split(delimiter)[column]] for line in lines]


# MovieLens: ratings.dat, users.dat and movies.dat of 1M. Titles are in Latin-1 and contain quotes.
_TITLES = ("Misérables, Les ({})", '"Great Performances" Cats ({})', 'Léon: 7" Cut ({})', "{}")
_GENRES = ("Action", "Children's", "Film-Noir", "Sci-Fi", "Drama", "War")


def _movielens_dat(random: np.random.Generator, count: int, folder: Path) -> Law:
    drawn = draw(random, count, [1_500, 800], 0.3).by_column(0)
    ratings = [
        f"{user + 1}::{movie + 1}::{random.integers(4, 6) if good else random.integers(1, 4)}::{at}"
        for (user, movie), good, at in zip(drawn.codes, drawn.clicked, drawn.seconds, strict=True)
    ]
    users = [
        f"{user + 1}::{'FM'[user % 2]}::{(1, 18, 25, 56)[user % 4]}::{user % 21}::{user + 10000}"
        for user in range(1_500)
    ]
    movies = [
        f"{movie + 1}::{_TITLES[movie % 4].format(1950 + movie % 50)}::"
        + "|".join(_GENRES[: 1 + movie % 3] if movie % 2 else _GENRES[3:])
        for movie in range(800)
    ]
    for name, lines in (("ratings", ratings), ("users", users), ("movies", movies)):
        write_lines(folder / f"{name}.dat", lines, "latin-1")
    lines = joined(joined(ratings, 0, users, "::"), 1, movies, "::")
    write_lines(folder / "joined.dat", lines, "latin-1")
    return drawn.chance, drawn.seconds


_DAT = ("user", "movie", "stars", "time", "gender", "age", "job", "zip", "title", "genres")


def _read_movielens_dat(pandas: Any, folder: Path) -> Any:
    tables = {"ratings": _DAT[:4], "users": ("user", *_DAT[4:8]), "movies": ("movie", *_DAT[8:])}
    options: Row = {"sep": "::", "engine": "python", "encoding": "latin-1", "quoting": 3}
    ratings, users, movies = (
        pandas.read_csv(folder / f"{name}.dat", names=names, **options)
        for name, names in tables.items()
    )
    return ratings.merge(users).merge(movies)


def _movielens_csv(random: np.random.Generator, count: int, folder: Path) -> Law:
    drawn = draw(random, count, [1_500, 800], 0.3).by_column(0)
    stars = np.where(drawn.clicked, random.integers(8, 11, count), random.integers(1, 8, count))
    lines = [
        f"{user + 1},{movie + 1},{half / 2},{at}"
        for (user, movie), half, at in zip(drawn.codes, stars, drawn.seconds, strict=True)
    ]
    write_lines(folder / "ratings.csv", ["userId,movieId,rating,timestamp", *lines])
    return drawn.chance, drawn.seconds


# RetailRocket: times in milliseconds, in no order. Most visitors have few events.
def _retailrocket(random: np.random.Generator, count: int, folder: Path) -> Law:
    drawn = draw(random, count, [3_000, 1_000], -2.5)
    lines = []
    for row in random.permutation(count):
        visitor, item = drawn.codes[row]
        event = ("transaction" if row % 3 == 0 else "addtocart") if drawn.clicked[row] else "view"
        bought = row if event == "transaction" else ""
        lines.append(
            (row, f"{drawn.seconds[row]}{row % 1000:03},{visitor},{event},{item},{bought}")
        )
    header = "timestamp,visitorid,event,itemid,transactionid"
    write_lines(folder / "events.csv", [header, *(line for _, line in lines)])
    order = [row for row, _ in lines]
    return drawn.chance[order], drawn.seconds[order] * 1000 + np.array(order) % 1000


# Book-Crossing: all values are quoted, except NULL. Lines end with CRLF. Titles contain escaped
# quotes and delimiters.
def _book_crossing(random: np.random.Generator, count: int, folder: Path) -> Law:
    drawn = draw(random, count, [2_000, 1_000], -0.5)
    isbns = [f"{book * 7919 % 10**9:09}{'0123456789X'[book % 11]}" for book in range(1_000)]
    ratings = [
        f'"{user + 1}";"{isbns[book]}";"{random.integers(7, 11) if good else 0}"'
        for (user, book), good in zip(drawn.codes, drawn.clicked, strict=True)
    ]
    places = ("nyc, new york, usa", "münchen, bayern, germany", "n/a, n/a, n/a", "cádiz, , spain")
    users = [
        f'"{user + 1}";"{places[user % 4]}";' + (f'"{15 + user % 60}"' if user % 3 else "NULL")
        for user in range(2_000)
    ]
    titles = (r"The \"Real\" Thing {}", "Plain &amp; Simple; {}", "Cien años: {}", "It {}")
    books = [
        f'"{isbn}";"{titles[book % 4].format(book)}";"Author {book % 300}";"{1970 + book % 35}"'
        for book, isbn in enumerate(isbns)
    ]
    tables = {
        "BX-Book-Ratings": ('"User-ID";"ISBN";"Book-Rating"', ratings),
        "BX-Users": ('"User-ID";"Location";"Age"', users),
        "BX-Books": ('"ISBN";"Book-Title";"Book-Author";"Year-Of-Publication"', books),
    }
    for name, (header, lines) in tables.items():
        write_lines(folder / f"{name}.csv", [header, *lines], "latin-1", "\r\n")
    all_of = [[header, *lines] for header, lines in tables.values()]
    lines = joined(joined(all_of[0], 0, all_of[1], ";"), 1, all_of[2], ";")
    write_lines(folder / "joined.csv", lines, "latin-1", "\r\n")
    return drawn.chance, drawn.seconds


def _read_book_crossing(pandas: Any, folder: Path) -> Any:
    options: Row = {"sep": ";", "encoding": "latin-1", "escapechar": "\\", "dtype": str}
    ratings, users, books = (
        pandas.read_csv(folder / f"BX-{name}.csv", **options)
        for name in ("Book-Ratings", "Users", "Books")
    )
    found = ratings.merge(users).merge(books)
    return found.assign(**{"Book-Rating": found["Book-Rating"].astype(int)})


# MIND: a line of behaviors.tsv has all news of an impression, with clicks, and the user's history.
def _mind(random: np.random.Generator, count: int, folder: Path) -> Law:
    number = np.searchsorted(np.arange(20, count, 20), np.arange(count), "right")  # Impression.
    users = common.zipf_keys(random, 1_000, [number[-1] + 1], 0.7)
    drawn = draw(random, count, [800], -2.5, random.normal(0, 1, 1_000)[users[number]])
    lines = []
    for impression, user in enumerate(users.tolist()):
        rows = np.flatnonzero(number == impression)
        drawn.seconds[rows] = drawn.seconds[rows[0]]
        at = datetime.fromtimestamp(drawn.seconds[rows[0]], timezone.utc)
        history = " ".join(f"N{n + 10000}" for n in range(user % 7))
        shown = " ".join(
            f"N{drawn.codes[row, 0] + 10000}-{int(drawn.clicked[row])}" for row in rows.tolist()
        )
        moment = f"{at.month}/{at.day}/{at.year} {at.strftime('%I').lstrip('0')}:{at:%M:%S %p}"
        lines.append(f"{impression + 1}\tU{user + 1}\t{moment}\t{history}\t{shown}")
    write_lines(folder / "behaviors.tsv", lines)
    mind_examples(folder / "behaviors.tsv", folder / "examples.tsv")
    return drawn.chance, drawn.seconds


def mind_examples(behaviors: Path, output: Path) -> None:
    """Writes a line per shown news: click, user, time as in ISO 8601, history, news."""
    with open(behaviors, encoding="utf-8") as lines, open(output, "w", encoding="utf-8") as file:
        for line in lines:
            _, user, text, history, shown = line.rstrip("\n").split("\t")
            at = datetime.strptime(text, "%m/%d/%Y %I:%M:%S %p").isoformat(" ")
            for news, click in (one.rsplit("-", 1) for one in shown.split()):
                file.write(f"{click}\t{user}\t{at}\t{history}\t{news}\n")


_MIND = ("click", "user", "time", "history", "news")


def _read_mind(pandas: Any, folder: Path) -> Any:
    names = ("impression", "user", "time", "history", "shown")
    found = pandas.read_csv(folder / "behaviors.tsv", sep="\t", names=names)
    found = found.assign(shown=found["shown"].str.split(" ")).explode("shown")
    parts = found["shown"].str.rsplit("-", n=1, expand=True)
    return found.assign(news=parts[0], click=parts[1].astype(int))


# Criteo with a header, as in samples of other libraries: commas, numbers as floats.
_CRITEO_NUMBERS, _CRITEO_KEYS = (
    [f"{kind}{i + 1}" for i in range(n)] for kind, n in (("I", 13), ("C", 26))
)


def _criteo(random: np.random.Generator, count: int, folder: Path) -> Law:
    numbers = random.geometric(0.05, (count, 13)) - 3.0
    numbers[random.random(numbers.shape) < 0.2] = np.nan
    effect = 0.4 * np.nan_to_num(np.log1p(np.maximum(numbers[:, :2], 0)), nan=1.0).sum(1)
    drawn = draw(random, count, [20 + 60 * i for i in range(26)], -3.0, effect)
    is_missing = random.random(drawn.codes.shape) < 0.1
    drawn_lines = []
    for clicked, values, codes, missing in zip(
        drawn.clicked, numbers, drawn.codes, is_missing, strict=True
    ):
        shown = ["" if np.isnan(v) else f"{v:.1f}" for v in values]
        keys = [
            "" if lost else f"{(code + 1) * 2_654_435_761 % (1 << 32):08x}"
            for code, lost in zip(codes.tolist(), missing, strict=True)
        ]
        drawn_lines.append(",".join([str(int(clicked)), *shown, *keys]))
    header = ",".join(["label", *_CRITEO_NUMBERS, *_CRITEO_KEYS])
    write_lines(folder / "criteo_sample.txt", [header, *drawn_lines])
    return drawn.chance, drawn.seconds


# Avazu: ids are uint64, hours are YYMMDDHH, -1 in C20 means missing but is a value of the file.
AVAZU = (
    *("id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category"),
    *("app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model"),
    *("device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22))),
)


def _avazu(random: np.random.Generator, count: int, folder: Path) -> Law:
    sizes = [
        7,
        7,
        800,
        700,
        20,
        900,
        80,
        25,
        1_500,
        3_000,
        900,
        5,
        4,
        500,
        8,
        9,
        150,
        4,
        60,
        90,
        60,
    ]
    drawn = draw(random, count, sizes, -1.8)
    lines = []
    for row, (codes, clicked) in enumerate(zip(drawn.codes.tolist(), drawn.clicked, strict=True)):
        at = datetime.fromtimestamp(1_413_849_600 + row * 864_000 // count, timezone.utc)
        texts = [f"{(c + 1) * 2_654_435_761 % (1 << 32):08x}" for c in codes[2:11]]
        numbers = [str(c) for c in codes[11:]]
        numbers[7] = "-1" if codes[18] == 0 else str(100_000 + codes[18])
        first = [str(2**64 - 1 - row * 7919), str(int(clicked)), f"{at:%y%m%d%H}"]
        lines.append(",".join([*first, str(1000 + codes[0]), str(codes[1]), *texts, *numbers]))
    write_lines(folder / "train.csv", [",".join(AVAZU), *lines])
    return drawn.chance, drawn.seconds


# HetRec: user_taggedmovies.dat has no label. Each line gets two negatives with a random movie.
_HETREC = (
    "userID\tmovieID\ttagID\tdate_day\tdate_month\tdate_year\tdate_hour\tdate_minute\tdate_second"
)
_NEGATIVES = 2


def _hetrec(random: np.random.Generator, count: int, folder: Path) -> Law:
    tags, movies, lines = 300, 500, count // (1 + _NEGATIVES)
    odds = random.normal(0, 0.8, movies) + random.normal(0, 1, (tags, 3)) @ random.normal(
        0, 0.8, (3, movies)
    )
    weights = np.exp(odds)
    weights /= weights.sum(1, keepdims=True)
    tag = common.zipf_keys(random, tags, [lines], 0.7)
    edges = weights.cumsum(1)[tag]
    movie = np.minimum((random.random((lines, 1)) > edges).sum(1), movies - 1)
    user = common.zipf_keys(random, 800, [lines], 0.7)
    when = [(n % 28 + 1, n % 12 + 1, 2008, n % 24, n % 60, n % 59) for n in range(lines)]
    ids = zip(user + 75, movie + 1, tag + 1, strict=True)
    shown = ["\t".join(map(str, (*one, *at))) for one, at in zip(ids, when, strict=True)]
    write_lines(folder / "user_taggedmovies.dat", [_HETREC, *shown])
    add_negatives(folder / "user_taggedmovies.dat", folder / "labeled.dat", movies)
    with open(folder / "labeled.dat", encoding="utf-8") as file:
        next(file)
        keys = np.array([line.split("\t")[1:4] for line in file], np.int64)
    # Odds of a positive: its probability, over the negatives' 1 / movies for each of _NEGATIVES.
    ratio = weights[keys[:, 2] - 1, keys[:, 1] - 1] * movies / _NEGATIVES
    return ratio / (1 + ratio), np.arange(len(ratio))


def add_negatives(tagged: Path, output: Path, movies: int) -> None:
    """Writes each line with the label 1, followed by lines of label 0 with other movies."""
    random = np.random.default_rng(1)
    with open(tagged, encoding="utf-8") as lines, open(output, "w", encoding="utf-8") as file:
        file.write("label\t" + next(lines))
        for line in lines:
            user, _, rest = line.split("\t", 2)
            file.write(f"1\t{line}")
            for movie in random.integers(1, movies + 1, _NEGATIVES):
                file.write(f"0\t{user}\t{movie}\t{rest}")


# steam-200k.csv: no header. A game that was played has two lines: "purchase" and "play".
def _steam(random: np.random.Generator, count: int, folder: Path) -> Law:
    drawn = draw(random, count, [1_500, 600], -0.5)
    games = ("The Elder Scrolls V Skyrim {}", '"Warhammer 40,000 Dawn of War {}"', "Ori {}", "Q{}")
    lines, chances = [], []
    for (user, game), chance, played in zip(drawn.codes, drawn.chance, drawn.clicked, strict=True):
        first = f"{151603712 + user},{games[game % 4].format(game)}"
        lines.append(f"{first},purchase,1.0,0")
        if played:
            lines.append(f"{first},play,{random.integers(1, 3000) / 10},0")
        chances += [chance / (1 + chance)] * (1 + played)
    write_lines(folder / "steam-200k.csv", lines[:count])
    return np.array(chances[:count]), np.arange(count)


# Amazon reviews of 2018: JSON lines, compressed. Names may be absent, and `style` is an object.
def _amazon(random: np.random.Generator, count: int, folder: Path) -> Law:
    verified = random.random(count) < 0.7
    drawn = draw(random, count, [2_500, 800], 0.5, np.where(verified, 0.5, -0.5))
    lines = []
    for row, ((user, item), good) in enumerate(zip(drawn.codes, drawn.clicked, strict=True)):
        at = datetime.fromtimestamp(drawn.seconds[row], timezone.utc)
        review: Row = {"overall": float(random.integers(4, 6) if good else random.integers(1, 4))}
        if row % 5 == 0:
            review["vote"] = f"{row:,}"
        review["verified"] = bool(verified[row])
        review["reviewTime"] = f"{at:%m} {at.day}, {at.year}"
        review["reviewerID"] = f"A{user * 7919:012X}"
        review["asin"] = f"{item * 104_729 % 10**10:010}"
        if row % 4 == 0:
            review["style"] = {"Format:": " Hardcover"}
        review["reviewerName"] = 'José "Joe" 👍'
        review["reviewText"] = 'Good,\n"really" good\u2028' * (row % 3)
        lines.append(json.dumps({**review, "unixReviewTime": int(drawn.seconds[row])}))
    write_lines(folder / "reviews_5.json.gz", lines)
    return drawn.chance, drawn.seconds


def _csv(name: str, **options: Any) -> Callable[[Any, Path], Any]:
    return lambda pandas, folder: pandas.read_csv(folder / name, **options)


_STEAM = ("user", "game", "behavior", "hours", "zero")
FORMATS: Mapping[str, Format] = {
    "movielens_dat": Format(
        _movielens_dat,
        "joined.dat",
        {
            "label": {"column": "stars", "positive_from": 4},
            "keys": ["user", "movie", "gender", "age", "job", "zip", "title",
                     {"column": "genres", "separator": "|"}],
            "delimiter": "::", "quoting": "none", "columns": list(_DAT), "time": "time",
        },
        _read_movielens_dat,
        "time",
    ),
    "movielens_csv": Format(
        _movielens_csv,
        "ratings.csv",
        {
            "label": {"column": "rating", "positive_from": 4},
            "keys": ["userId", "movieId"], "time": "timestamp",
        },
        _csv("ratings.csv"),
        "time",
    ),
    "retailrocket": Format(
        _retailrocket,
        "events.csv",
        {
            "label": {"column": "event", "positive": ["addtocart", "transaction"]},
            "keys": ["visitorid", "itemid"], "time": "timestamp",
        },
        _csv("events.csv"),
        "time",
    ),
    "book_crossing": Format(
        _book_crossing,
        "joined.csv",
        {
            "label": {"column": "Book-Rating", "positive_from": 7},
            "keys": ["User-ID", "ISBN", "Location", "Book-Title", "Book-Author"],
            "dense": ["Age"],
            "delimiter": ";", "escape": "\\", "missing": ["NULL"],
        },
        _read_book_crossing,
    ),
    "mind": Format(
        _mind,
        "examples.tsv",
        {
            "label": "click",
            "keys": ["user", "news", {"column": "history", "separator": " ", "table": "news"}],
            "delimiter": "\t", "columns": list(_MIND), "time": "time",
        },
        _read_mind,
        "time",
    ),
    "criteo_header": Format(
        _criteo,
        "criteo_sample.txt",
        {
            "label": "label",
            "keys": [{"column": name, "as": "hex"} for name in _CRITEO_KEYS],
            "dense": [{"column": name, "transform": "log"} for name in _CRITEO_NUMBERS],
        },
        _csv("criteo_sample.txt", dtype=dict.fromkeys(_CRITEO_KEYS, str)),
    ),
    "avazu": Format(
        _avazu, "train.csv", None, _csv("train.csv", dtype=dict.fromkeys(AVAZU[2:], str))
    ),
    "hetrec": Format(
        _hetrec,
        "labeled.dat",
        {"label": "label", "keys": ["userID", "movieID", "tagID"], "delimiter": "\t"},
        _csv("labeled.dat", sep="\t"),
    ),
    "steam": Format(
        _steam,
        "steam-200k.csv",
        {
            "label": {"column": "behavior", "positive": ["play"]},
            "keys": ["user", "game"], "columns": list(_STEAM),
        },
        _csv("steam-200k.csv", names=_STEAM),
    ),
    "amazon": Format(
        _amazon,
        "reviews_5.json.gz",
        {
            "label": {"column": "overall", "positive_from": 4},
            "keys": ["reviewerID", "asin", "verified", "vote"], "time": "unixReviewTime",
        },
        lambda pandas, folder: pandas.read_json(
            folder / "reviews_5.json.gz", lines=True, dtype=False, convert_dates=False
        ),
        "time",
    ),
}  # fmt: skip
