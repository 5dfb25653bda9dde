"""What every policy answers. The engine asks these questions, and knows no policy by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf.config import Table
from slipstream_tf.ops.update_policy import UpdateCounts, UpdatePolicy

DEFAULT_SHARE = 0.3
"""Share of the hot examples that T is found for if nobody gives one."""


@dataclasses.dataclass(frozen=True)
class Begins:
    """A window that begins, as policies see it.

    Attributes:
        threshold: T, in the unit of the drift metric.
        windows: that began after the warm-up, this one included; 0: it is warming up.
    """

    threshold: float
    windows: int


@dataclasses.dataclass(frozen=True)
class Tables:
    """The tables whose gradients a policy decides on.

    Attributes:
        tables: that are tracked.
        rates: table name -> learning rate of its rows; None: not known.
        rows: table name -> rows that it has now, of all ranks.
        are_native: whether the rows are in native tables, which know how far an update moves them.
        max_auc_loss: the policy's part of the maximum AUC that saving may cost; None: no bound.
    """

    tables: Sequence[Table]
    rates: Mapping[str, float | None]
    rows: Mapping[str, int]
    are_native: bool = True
    max_auc_loss: float | None = None


class Decisions:
    """Questions to a policy or to a score; the defaults measure nothing and change nothing.

    Attributes:
        alpha: share of an example's lookups that must be saturated, above 0, at most 1.
        probes_every: windows from probe to probe of a saturated key; 0: no probes; None: any.
        steered_by: how `max_auc_loss` is followed: by the "share", by the "movement", or "": not.
        correct: how examples that are subsampled by predicted losses are corrected: "weight" or
            "offset"; "": none are.
    """

    alpha: float = 1.0
    probes_every: int | None = None
    steered_by: str = ""
    correct: str = ""

    @property
    def pilot_settings(self) -> dict[str, Any]:
        """Arguments of `ops.classifier.InputClassifier` for a pilot; empty without a pilot."""
        return {}

    def initial_state(self) -> dict[str, Any]:
        """Returns the state of the first window: JSON-serializable values by name."""
        return {}

    def next_state(self, state: Mapping[str, Any], losses: Any, share: float) -> dict[str, Any]:
        """Returns the state after a window.

        Args:
            state: in the window that ends.
            losses: float32 [n], scores by foreseen loss of a sample of its examples; None: there
                are none.
            share: of the hot examples, to be found skippable next, bounded by `max_auc_loss`.
        """
        return dict(state)

    def value_of_skipped(self, state: Mapping[str, Any], losses: Any) -> float | None:
        """Returns the policy's own estimate of the worth of a skipped example.

        Args:
            state: in the window that ends.
            losses: as `next_state` takes them.

        Returns:
            In average examples; None: it has no estimate.
        """
        return None


class Policy(Decisions):
    """Base of the policies.

    Attributes:
        acts_on: "examples", "gradients", or "": nothing; at most one policy acts on each.
        keep: share of the skippable examples that is trained all the same, with a weight.
        withholds_saturated: whether gradients of saturated keys do not reach their rows at once.
        loses_gradients: whether they never do.
        weighs_examples: whether examples get weights.
        gives_key_share: whether the user chose `key_share`.
        verb: for reports: "skipped", "masked" or "deferred".
        columns: of `telemetry.ledger`, with the policy's savings.
    """

    acts_on = ""
    keep = 0.0
    withholds_saturated = False
    loses_gradients = False
    weighs_examples = False
    gives_key_share = False
    verb = ""
    columns: tuple[str, ...] = ()

    @property
    def key_share(self) -> float | None:
        """Share of the hot examples whose keys are to count as saturated; None: any."""
        return None

    @property
    def target_share(self) -> float | None:
        """Share of the hot examples to save on; `max_auc_loss` lowers it. None: no share."""
        return self.key_share

    def require_fit(self, tables: Tables) -> None:
        """Raises ValueError if the policy cannot work on these tables."""

    def example_rule(self, state: Mapping[str, Any], begins: Begins) -> dict[str, Any] | None:
        """Returns arguments of `InputClassifier.configure` after the warm-up; None: no rule."""
        return None

    def gradient_rule(self, table: Table, tables: Tables) -> UpdatePolicy | None:
        """Returns the rule of a table's gradients after the warm-up; None: they are applied."""
        return None

    def auc_loss(self, tables: Tables) -> tuple[float, float] | None:
        """Returns the estimated AUC loss, (minimum, maximum); None: there is no estimate."""
        return None

    def told(self, rows: UpdateCounts) -> str:
        """Returns a sentence for the report about saved gradient rows, or an empty string."""
        return ""
