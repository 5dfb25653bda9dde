"""Base classes of policies and scores, through which the engine calls them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf.config import Table
from slipstream_tf.ops.update_policy import UpdateCounts, UpdatePolicy

DEFAULT_FRACTION = 0.3
"""Default fraction of the hot examples that should be skippable, from which the threshold T is
computed. An example is hot if the engine tracks its keys, so that its score is finite."""


@dataclasses.dataclass(frozen=True)
class WindowStart:
    """Describes the window that begins.

    Attributes:
        threshold: T, the drift below which a key is saturated, in the unit of the drift metric.
        windows: Number of windows that began after the warm-up, including this window. 0 means that
            this window is part of the warm-up.
    """

    threshold: float
    windows: int


@dataclasses.dataclass(frozen=True)
class Tables:
    """Describes the tables to which a policy for gradients applies.

    Attributes:
        tables: The tracked tables.
        rates: Maps a table name to the learning rate of its rows, or None if the rate is unknown.
        rows: Maps a table name to its current number of rows. For sharded tables, the number of
            rows on this rank times the number of ranks.
        are_native: Whether the rows are stored in native tables, which can compute how far an
            update moves a row.
        max_auc_loss: The part of the maximum AUC loss that this policy may use, or None for no
            bound.
    """

    tables: Sequence[Table]
    rates: Mapping[str, float | None]
    rows: Mapping[str, int]
    are_native: bool = True
    max_auc_loss: float | None = None


class Decisions:
    """Interface that policies and scores share.

    The defaults describe a policy that measures nothing and changes nothing.

    Attributes:
        alpha: Fraction of an example's keys that must be saturated for the example to be skippable,
            in (0, 1].
        revisit_every: A saturated key is probed (trained like any key, to measure its drift
            again) in one of `revisit_every` windows. 0 disables probes. None accepts the value of
            the other policies.
        steered_by: The setting that `max_auc_loss` adjusts: "fraction", "movement", or "" if the
            policy does not follow `max_auc_loss`.
        correction: How examples that are subsampled by predicted loss are corrected: "weight",
            "offset", or "" if examples are not subsampled by predicted loss.
    """

    alpha: float = 1.0
    revisit_every: int | None = None
    steered_by: str = ""
    correction: str = ""

    @property
    def pilot_settings(self) -> dict[str, Any]:
        """Pilot arguments of `ops.classifier.InputClassifier`; empty without a pilot."""
        return {}

    def initial_state(self) -> dict[str, Any]:
        """Returns the state of the policy in the first window.

        The state contains JSON-serializable values by name, which the policy computes for each
        window, for example a threshold.
        """
        return {}

    def next_state(self, state: Mapping[str, Any], losses: Any, fraction: float) -> dict[str, Any]:
        """Returns the state of the policy in the window that begins.

        Args:
            state: State during the window that ends, from `initial_state` or `next_state`.
            losses: float32 [n], the predicted-loss scores of a sample of the window's examples, or
                None if there are no such scores.
            fraction: Fraction of the hot examples that should be skippable in the next window,
                already bounded by `max_auc_loss`.
        """
        return dict(state)

    def value_of_skipped(self, state: Mapping[str, Any], losses: Any) -> float | None:
        """Returns the estimated training value of a skipped example.

        Args:
            state: State during the window that ends.
            losses: Predicted-loss scores, as in `next_state`.

        Returns:
            The value relative to a random example, or None if the policy has no estimate. For
            example, 0.2 means that skipping five examples costs as much as skipping one at random.
        """
        return None


class Policy(Decisions):
    """Base class of all policies.

    Attributes:
        acts_on: "examples", "gradients", or "" for a policy that changes neither. At most one
            policy may act on examples, and at most one on gradients.
        keep_rate: Fraction of the skippable examples that is trained nevertheless, with weight 1 /
            keep_rate.
        filters_saturated: Whether the policy masks or defers exactly the gradients of saturated
            keys.
        loses_gradients: Whether the masked gradients are lost, instead of applied later.
        weighs_examples: Whether the policy changes sample weights.
        sets_key_fraction: Whether the user set the fraction that `key_fraction` returns, so that
            `Saturation(threshold=)` would contradict it.
        verb: Word for reports: "skipped", "masked" or "deferred"; "" if the policy saves nothing.
        columns: Columns of `telemetry.savings_report` that show the savings of the policy.
    """

    acts_on = ""
    keep_rate = 0.0
    filters_saturated = False
    loses_gradients = False
    weighs_examples = False
    sets_key_fraction = False
    verb = ""
    columns: tuple[str, ...] = ()

    @property
    def key_fraction(self) -> float | None:
        """Fraction of the hot examples that should be skippable by drift.

        The engine computes the threshold T from it. None means that the policy does not depend on
        the saturation of keys.
        """
        return None

    @property
    def target_fraction(self) -> float | None:
        """Fraction of the hot examples to save on, before `max_auc_loss` lowers it.

        None means that the policy has no such target.
        """
        return self.key_fraction

    def require_fit(self, tables: Tables) -> None:
        """Raises ValueError if the policy cannot work with these tables."""

    def classifier_settings(
        self, state: Mapping[str, Any], start: WindowStart
    ) -> dict[str, Any] | None:
        """Returns the rule by which the input classifier finds skippable examples.

        Args:
            state: State of the policy in the window that begins.
            start: The window that begins.

        Returns:
            Arguments of `InputClassifier.configure`, or None if the policy needs no rule.
        """
        return None

    def update_policy_of(self, table: Table, tables: Tables) -> UpdatePolicy | None:
        """Returns the update policy of a table after the warm-up.

        Args:
            table: The table.
            tables: All tables to which the policy applies.

        Returns:
            The update policy, or None if all gradients are applied immediately.
        """
        return None

    def auc_loss(self, tables: Tables) -> tuple[float, float] | None:
        """Returns the estimated AUC loss that the policy causes.

        Returns:
            (minimum, maximum), or None if unknown.
        """
        return None

    def report_text(self, rows: UpdateCounts) -> str:
        """Returns report text about why deferred gradients were applied.

        Args:
            rows: Counts of gradient rows.

        Returns:
            The text, or an empty string if the policy defers no gradient.
        """
        return ""
