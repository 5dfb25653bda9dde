"""What every policy answers. The engine asks these questions, and knows no policy by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream_tf.config import Table
from slipstream_tf.ops.update_policy import UpdateCounts, UpdatePolicy

DEFAULT_SHARE = 0.3
"""Share of the hot examples that T is found for if nobody gives one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ended:
    """A window that ended, as policies see it.

    Attributes:
        losses: float32 [n], scores by foreseen loss of a sample of its examples; None: there are
            none.
        share: of the hot examples, to be found skippable next, bounded by `max_auc_loss`.
    """

    losses: np.ndarray | None
    share: float


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


class Policy:
    """Base of the policies; what it says holds for one that needs and decides nothing.

    Attributes:
        acts_on: "examples", "gradients", or "": nothing; at most one policy acts on each.
        alpha: share of an example's lookups that must be saturated.
        keep: share of the skippable examples that is trained all the same, with a weight.
        withholds_saturated: whether gradients of saturated keys do not reach their rows at once.
        loses_gradients: whether they never do.
        probes_every: windows from probe to probe of a saturated key; None: it does not matter.
        weighs_examples: whether examples get weights.
        steered_by: how the policy follows `max_auc_loss`: by its "share", by its "movement", or "":
            not at all.
        gives_key_share: whether somebody chose `key_share`.
        correct: how examples that are thinned by foreseen losses are corrected; "": none are.
        verb: what becomes of what is saved, for reports: "skipped", "masked", "deferred".
        columns: of `telemetry.ledger`, that tell of it.
    """

    acts_on = ""
    alpha = 1.0
    keep = 0.0
    withholds_saturated = False
    loses_gradients = False
    probes_every: int | None = None
    weighs_examples = False
    steered_by = ""
    gives_key_share = False
    correct = ""
    verb = ""
    columns: tuple[str, ...] = ()

    # What must be measured?

    @property
    def key_share(self) -> float | None:
        """Share of the hot examples whose keys are to count as saturated; None: no matter."""
        return None

    @property
    def target_share(self) -> float | None:
        """Share of the hot examples to save on; `max_auc_loss` lowers it. None: no share."""
        return self.key_share

    @property
    def pilot_settings(self) -> dict[str, Any]:
        """Arguments of `ops.classifier.InputClassifier` where a pilot foresees losses."""
        return {}

    def require_fit(self, tables: Tables) -> None:
        """Raises ValueError if the policy cannot work on these tables."""

    # What is decided at a window's end?

    def initial_state(self) -> dict[str, Any]:
        """Returns what is carried from window to window: JSON-serialisable values by name."""
        return {}

    def next_state(self, state: Mapping[str, Any], ended: Ended) -> dict[str, Any]:
        """Returns the state after a window."""
        return dict(state)

    def value_of_skipped(self, state: Mapping[str, Any], losses: Any) -> float | None:
        """Returns what a skipped example was worth by the policy's own estimate.

        Args:
            state: in the window that ends.
            losses: as `Ended.losses`.

        Returns:
            In average examples; None: it has no estimate.
        """
        return None

    # What is done with a batch?

    def example_rule(self, state: Mapping[str, Any], begins: Begins) -> dict[str, Any] | None:
        """Returns arguments of `InputClassifier.configure` after the warm-up; None: no rule."""
        return None

    def gradient_rule(self, table: Table, tables: Tables) -> UpdatePolicy | None:
        """Returns what becomes of a table's gradients after the warm-up; None: they are applied."""
        return None

    # What is told?

    def auc_loss(self, tables: Tables) -> tuple[float, float] | None:
        """Returns what it may cost, (least, most) AUC; None: no rule of its own tells."""
        return None

    def told(self, rows: UpdateCounts) -> str:
        """Returns what a report says of gradient rows beside how many were saved; or nothing."""
        return ""
