"""What the demo's table says, in words that follow from its numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# AUCs closer than this count as equal: other seeds move them by more.
EQUAL_AUC = 0.001


def verdict(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Compares the paper run with plain training and with its controls.

    Args:
        records: metrics.json by run: plain, paper, random, stop.

    Returns:
        A few sentences.
    """
    auc = {name: record["test"]["auc"] for name, record in records.items()}
    if any(value is None for value in auc.values()):
        return "The test part has labels of one kind only; AUC is not defined and nothing compares."
    inputs = records["paper"]["inputs"]
    if not inputs["skipped"]:
        return (
            "The paper's rule skipped nothing here (no input was made of saturated keys alone), so "
            "the table compares equal runs. More inputs, a higher --target_skip or a lower --alpha "
            "would make it skip."
        )
    share = inputs["skipped"] / inputs["seen"]
    loss = auc["plain"] - auc["paper"]
    first = (
        f"Skipping inputs of saturated keys left out {share:.1%} of the inputs and "
        f"{_change(-loss)}."
    )
    gains = {
        "random skipping at the same rate": auc["paper"] - auc["random"],
        "plain training stopped at the same cost": auc["paper"] - auc["stop"],
    }
    words = [f"{_relation(gain)} {name} ({gain:+.4f} AUC)" for name, gain in gains.items()]
    second = f"It is {' and '.join(words)}."
    beaten = all(gain > EQUAL_AUC for gain in gains.values())
    third = (
        "So in this run choosing inputs by drift was worth more than simply training on fewer"
        if beaten
        else "So in this run nothing shows that choosing inputs by drift is worth more than "
        "simply training on fewer"
    )
    third += ", and training on all of them was better still." if loss > EQUAL_AUC else "."
    return f"{first} {second} {third} One seed is a hint, not a result."


def _change(difference: float) -> str:
    if abs(difference) <= EQUAL_AUC:
        return f"moved the AUC by {difference:+.4f} from plain, no more than another seed would"
    return f"{'gained' if difference > 0 else 'lost'} {abs(difference):.4f} AUC against plain"


def _relation(gain: float) -> str:
    if abs(gain) <= EQUAL_AUC:
        return "level with"
    return "better than" if gain > 0 else "worse than"
