"""Sums the counts of shards in a manifest, and requires few malformed lines and positive labels."""

import collections
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slipstream_tf.data.columns import TO_UTF_8, shown_label
from slipstream_tf.data.shards import MAX_LABELS
from slipstream_tf.data.spec import PARTS

_SHOWN_REASONS = 5
_SHOWN_LABELS = 10
# Pattern in a reason -> advice. Only the first match of a reason is used.
_ADVICE = {
    "columns; expected": "Set the `delimiter`, `quoting` and `escape` of the files in the schema.",
    "`positive(_from)?`": "If the column is not the label, name another column in the schema.",
    "a decimal point": "Convert the numbers of the column, for example 0,5 to 0.5.",
    "a finite number": "List the texts of missing numbers in `missing` of the schema, or use the "
    "column as a key.",
    "(integer|digits).* or a missing": "Remove `as` from the key in the schema, so that its text "
    "is hashed.",
}


class TooManyBadLinesError(ValueError):
    """Raised if more lines are malformed than `Options.max_bad_fraction` allows.

    Attributes:
        may_accept: Whether a higher fraction can give usable data. It cannot if no line is
            well-formed, or if labels are neither 0 nor 1: a label of 1 may then be a low rating.
    """

    may_accept = False


def summed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sums over all shards, and the first malformed line, as in statistics.json."""
    shards = manifest["shards"]
    counted = {
        what: {part: sum(shard[part][what] for shard in shards if shard[part]) for part in PARTS}
        for what in ("inputs", "clicks")
    }
    reasons: collections.Counter[str] = collections.Counter()
    labels: collections.Counter[str] = collections.Counter()
    for shard in shards:
        reasons.update(shard["bad_reasons"])
        labels.update(shard.get("labels", {}))
    return {
        **counted,
        "bad_lines": reasons.total(),
        "bad_reasons": dict(reasons.most_common()),
        "first_bad_line": first_bad_line(manifest),
        "labels": dict(labels.most_common()),
        "shards": len(shards),
    }


def first_bad_line(manifest: Mapping[str, Any]) -> str | None:
    """Returns the place and the reason of the first malformed line, or None."""
    lines = (shard["first_bad_line"] for shard in manifest["shards"])
    return next((line for line in lines if line is not None), None)


def has_many_bad_lines(manifest: Mapping[str, Any], max_fraction: float) -> bool:
    """Returns whether more than `max_fraction` of the rows are malformed."""
    totals = summed(manifest)
    bad = totals["bad_lines"]
    return bad > max_fraction * (bad + sum(totals["inputs"].values()))


def require_few_bad_lines(manifest: Mapping[str, Any], max_fraction: float) -> None:
    """Raises TooManyBadLinesError if more than `max_fraction` of the rows are malformed."""
    if not has_many_bad_lines(manifest, max_fraction):
        return
    totals = summed(manifest)
    bad, good = totals["bad_lines"], sum(totals["inputs"].values())
    head = "" if good else "The data contains no well-formed example. "
    reasons = totals["bad_reasons"]
    lines = [
        f"{head}{bad:,} of {bad + good:,} lines ({bad / (bad + good):.1%}) are malformed. Expected "
        f"at most {max_fraction:.1%}. The reasons:",
        *reason_lines(reasons),
        f"The first is {totals['first_bad_line']}.",
        *dict.fromkeys(advice for reason in reasons if (advice := _advice(reason))),
    ]
    error = TooManyBadLinesError("\n".join(lines))
    error.may_accept = good > 0 and not any("`positive_from`" in reason for reason in reasons)
    raise error


def _positive(manifest: Mapping[str, Any]) -> list[str]:
    """Returns the texts of `positive` in the schema; empty without them."""
    return list(manifest["source"].get("schema", {}).get("positive") or ())


def has_positive(manifest: Mapping[str, Any]) -> bool:
    """Returns whether a label is 1, if the schema has `positive`."""
    return not _positive(manifest) or any(summed(manifest)["clicks"].values())


def positive_labels(manifest: Mapping[str, Any], labels: Mapping[str, int]) -> list[str]:
    """Returns the texts among `labels` that are in `positive`."""
    positive = {shown_label(text.encode()) for text in _positive(manifest)}
    return [text for text in labels if text in positive]


def unused_positive(manifest: Mapping[str, Any], labels: Mapping[str, int]) -> list[str]:
    """Returns the texts of `positive` that no label has; empty if some labels were not counted."""
    if len(labels) >= MAX_LABELS:
        return []
    return [text for text in _positive(manifest) if shown_label(text.encode()) not in labels]


def require_positive(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError if no label is one of the texts of `positive`."""
    if has_positive(manifest):
        return
    column, found = manifest["columns"]["label"], summed(manifest)["labels"]
    positive = _positive(manifest)
    raise ValueError(
        f"All labels would be 0, because no value of the column {column!r} is in `positive`, "
        f"{positive}, of the schema. Expected one of its values: {shown_counts(found)}."
        f"{positive_advice(positive, found)}"
    )


def positive_advice(unused: Sequence[str], labels: Collection[str]) -> str:
    """Returns why no label may be one of the texts of `positive`, or an empty string.

    Args:
        unused: Texts of `positive` that no label has.
        labels: Texts of the labels, as returned by `shown_label`.
    """
    advice = ""
    if any(map(_is_number, unused)) and any(map(_is_number, labels)):
        advice += " Set `positive_from` instead of `positive` to compare labels as numbers."
    is_ascii = all(text.isascii() for text in unused)
    if not is_ascii and any(re.search(r"\\x[89a-f]", label) for label in labels):
        advice += f" Some labels are not in UTF-8. Convert the files, for example with {TO_UTF_8}."
    return advice


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def shown_counts(counts: Mapping[str, int]) -> str:
    """Returns the most frequent texts with their counts, for a message.

    Args:
        counts: Counts by text, by descending count.
    """
    pairs = [f"{text!r} ({count:,})" for text, count in counts.items()]
    rest = len(pairs) - _SHOWN_LABELS
    more = [f"and {rest} more"] if rest > 0 else []
    return ", ".join(pairs[:_SHOWN_LABELS] + more)


def reason_lines(reasons: Mapping[str, int]) -> list[str]:
    """Returns a line of text for each of the most frequent reasons of malformed lines.

    Args:
        reasons: Number of malformed lines by reason, by descending number.
    """
    shown = list(reasons.items())[:_SHOWN_REASONS]
    lines = [f"  {count:,} line{'s' if count > 1 else ''}: {reason}" for reason, count in shown]
    rest = len(reasons) - len(shown)
    return [*lines, f"  and {rest} more reason{'s' if rest > 1 else ''}"] if rest else lines


def _advice(reason: str) -> str:
    return next((advice for part, advice in _ADVICE.items() if re.search(part, reason)), "")
