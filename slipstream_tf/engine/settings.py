"""Validates the engine's settings and combines the needs of its policies."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf._utils.errors import invalid, require_number
from slipstream_tf._utils.serialization import serialize
from slipstream_tf.config import DryRun, HotSet, Saturation, Window
from slipstream_tf.policies.base import DEFAULT_FRACTION, Policy, WindowStart

_PLACE = "Slipstream"
# The interval is long because an example is not skipped while any of its keys is probing.
_PROBES_EVERY = 100
_NO_POLICY = Policy()


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Validated settings of the engine: the arguments of `Slipstream`.

    Attributes:
        policies: One policy or a sequence of policies. Each class may occur once. At most one
            policy may act on examples, and at most one on gradients. Without policies the engine
            only measures.
        window: Length, warm-up and sample size, as a `Window`. None means `Window()`.
        hot_set: Choice of the keys with a measured drift, as a `HotSet`. None means `HotSet()`.
        saturation: Definition of a saturated key. None means `Saturation()`.
        max_auc_loss: Maximum AUC loss that the savings may cause, above 0, or None for no bound.
            The loss is estimated by `engine.steering`. Policies that lose AUC in different ways
            share the bound. Note: the estimate failed on a changing stream, where 0.0020 AUC were
            lost and 0.0005 allowed.
        dry_run: Whether to measure and count without saving: a bool or a `DryRun`. After
            construction it is a bool.
        estimates_cost: Whether a dry run records the losses of examples to estimate the AUC loss.
    """

    policies: Any = ()
    window: Any = None
    hot_set: Any = None
    saturation: Saturation | None = None
    max_auc_loss: float | None = None
    dry_run: Any = False
    estimates_cost: bool = dataclasses.field(init=False, default=False)

    def __post_init__(self) -> None:
        given = self.policies
        given = tuple(given) if isinstance(given, (list, tuple)) else (given,)
        _require_policies(given)
        object.__setattr__(self, "policies", given)
        kinds: dict[str, type] = {"window": Window, "hot_set": HotSet}
        for name, kind in kinds.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, kind())
            if not isinstance(getattr(self, name), kind):
                allowed = f"None or slipstream_tf.{kind.__name__}(...)"
                raise invalid(name, getattr(self, name), _PLACE, allowed)
        if self.saturation is not None and not isinstance(self.saturation, Saturation):
            allowed = "None or slipstream_tf.Saturation(...)"
            raise invalid("saturation", self.saturation, _PLACE, allowed)
        if self.max_auc_loss is not None:
            bound = require_number(
                "max_auc_loss", self.max_auc_loss, 0.0, place=_PLACE, open_minimum=True
            )
            object.__setattr__(self, "max_auc_loss", bound)
        if not isinstance(self.dry_run, (bool, DryRun)):
            allowed = "True, False or slipstream_tf.DryRun()"
            raise invalid("dry_run", self.dry_run, _PLACE, allowed)
        estimates = isinstance(self.dry_run, DryRun) and self.dry_run.estimates_cost
        object.__setattr__(self, "estimates_cost", estimates)
        object.__setattr__(self, "dry_run", bool(self.dry_run))
        if self.dry_run and not any(policy.verb for policy in self.policies):
            allowed = (
                "False, because a dry run estimates the savings of policies. Pass at least one "
                "policy, for example slipstream_tf.DeferGradients()"
            )
            raise invalid("dry_run", True, f"{_PLACE} without policies", allowed)
        if self.snapshot_bytes < 0:
            allowed = (
                f"at most `HotSet.memory`, {self.hot_set.memory!r}, which must also hold the "
                "pilot. Increase `HotSet.memory`"
            )
            given = self.examples.pilot_settings["pilot_memory_bytes"]
            raise invalid("memory", given, "PredictedLoss", allowed)
        self._require_composable()
        self._require_steerable()

    def _require_composable(self) -> None:
        """Raises ValueError for policies that conflict with each other.

        Two policies conflict if they act on the same things or need different thresholds T.
        """
        by_kind: dict[str, Policy] = {}
        for policy in self.policies:
            if policy.acts_on and policy.acts_on in by_kind:
                both = [type(by_kind[policy.acts_on]).__name__, type(policy).__name__]
                allowed = f"at most one policy that acts on {policy.acts_on}"
                raise invalid("policies", both, _PLACE, allowed)
            by_kind[policy.acts_on] = policy
        by_keys = [policy for policy in self.policies if policy.key_fraction is not None]
        fractions = {type(policy).__name__: policy.key_fraction for policy in by_keys}
        if len(set(fractions.values())) > 1:
            allowed = "the same fraction for these policies, because they share one threshold T"
            raise invalid("fraction", fractions, f"policies of {_PLACE}", allowed)
        if self.saturation is None:
            return
        if not self.goes_by_keys:
            allowed = "None, because no policy uses the saturation of keys"
            raise invalid("saturation", self.saturation, _PLACE, allowed)
        chosen = [type(policy).__name__ for policy in by_keys if policy.sets_key_fraction]
        if self.saturation.threshold is not None and chosen:
            place = f"Saturation with the `fraction` of {' and '.join(chosen)}"
            allowed = "None, because T follows from the fraction. Pass only one of the two"
            raise invalid("threshold", self.saturation.threshold, place, allowed)

    def _require_steerable(self) -> None:
        """Raises ValueError if `max_auc_loss` is set and no policy can follow it."""
        if self.max_auc_loss is None:
            return
        is_fixed = self.saturation is not None and self.saturation.threshold is not None
        place = allowed = ""
        if self.examples.pilot_settings and "fraction" in self._ways:
            place = " with PredictedLoss"
            allowed = "None, because weighted examples do not show the AUC over all examples"
        elif not self._ways:
            allowed = (
                "None, because no policy supports this bound. Pass a policy such as "
                "slipstream_tf.DeferGradients()"
            )
        elif is_fixed and self._ways == {"fraction"}:
            place = " with a threshold"
            allowed = "None, because the bound adjusts the threshold. Pass only one of the two"
        if allowed:
            raise invalid("max_auc_loss", self.max_auc_loss, f"{_PLACE}{place}", allowed)

    def get_config(self) -> dict[str, Any]:
        """Returns all settings as JSON-serializable values."""
        return {
            "policies": [serialize(policy) for policy in self.policies],
            "window": serialize(self.window),
            "hot_set": serialize(self.hot_set),
            "saturation": serialize(self.saturated),
            "max_auc_loss": self.max_auc_loss,
            "dry_run": self.dry_run,
        }

    # Combined properties of all policies.

    @property
    def examples(self) -> Policy:
        """The policy that acts on examples, or a `Policy` that changes nothing."""
        return next((p for p in self.policies if p.acts_on == "examples"), _NO_POLICY)

    @property
    def gradients(self) -> Policy:
        """The policy that acts on gradients, or a `Policy` that changes nothing."""
        return next((p for p in self.policies if p.acts_on == "gradients"), _NO_POLICY)

    @property
    def saturated(self) -> Saturation:
        """Definition of a saturated key."""
        return self.saturation or Saturation()

    @property
    def goes_by_keys(self) -> bool:
        """Whether the saturation of keys must be measured.

        This is the case if a policy depends on it, or if no policy saves anything and the engine
        only measures.
        """
        by_keys = any(policy.key_fraction is not None for policy in self.policies)
        return by_keys or not any(policy.verb for policy in self.policies)

    @property
    def steers_fraction(self) -> bool:
        """Whether `max_auc_loss` lowers the fraction of examples to save on."""
        return "fraction" in self._ways

    @property
    def key_fraction(self) -> float:
        """Target fraction of the hot examples with saturated keys; it determines T."""
        return _first(self.examples.key_fraction, self.gradients.key_fraction, DEFAULT_FRACTION)

    @property
    def target_fraction(self) -> float:
        """Fraction of the hot examples to save on, before `max_auc_loss` lowers it."""
        return _first(
            self.examples.target_fraction, self.gradients.target_fraction, DEFAULT_FRACTION
        )

    @property
    def revisit_every(self) -> int:
        """Number of windows between probes of a saturated key; 0 disables probes."""
        wanted = (self.gradients.revisit_every, self.examples.revisit_every, _PROBES_EVERY)
        return _first(self.saturated.revisit_every, *wanted)

    @property
    def skips_examples(self) -> bool:
        """Whether examples are dropped from training."""
        return bool(self.examples.acts_on) and not self.dry_run

    @property
    def needs_losses(self) -> bool:
        """Whether the losses of examples must be recorded.

        A bound that only sets the distance of `Movement` follows from the learning rates.
        """
        return (self.max_auc_loss is not None and self.steers_fraction) or self.estimates_cost

    @property
    def subsamples_in_step(self) -> bool:
        """Whether the training step drops examples by the model's own predictions."""
        return self.examples.pilot_settings.get("pilot") == "model"

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of `HotSet.memory` for snapshots; the pilot uses the rest."""
        pilot_bytes = self.examples.pilot_settings.get("pilot_memory_bytes", 0)
        return self.hot_set.memory_bytes - int(pilot_bytes)

    @property
    def _ways(self) -> set[str]:
        """The settings by which policies follow `max_auc_loss`: "fraction", "movement"."""
        return {policy.steered_by for policy in self.policies} - {""}

    @property
    def max_auc_loss_each(self) -> float | None:
        """`max_auc_loss` divided by the number of settings that follow it, or None."""
        return None if self.max_auc_loss is None else self.max_auc_loss / len(self._ways)

    # Decisions for one window.

    def classifier_settings(
        self, states: Mapping[str, Mapping[str, Any]], start: WindowStart
    ) -> tuple[dict[str, Any], bool]:
        """Finds the rule for skippable examples in a window.

        Args:
            states: The states of the policies by class name.
            start: The window that begins.

        Returns:
            Arguments for `ops.classifier.InputClassifier.configure`, and whether they may skip
            examples.
        """
        for policy in (self.examples, self.gradients) if start.windows else ():
            arguments = policy.classifier_settings(states.get(type(policy).__name__, {}), start)
            if arguments is not None:
                arguments = {"shadow": self.dry_run, **arguments}
                chance = max(arguments.get("threshold", 0.0), arguments.get("random_fraction", 0.0))
                return arguments, chance > 0.0 and not arguments["shadow"]
        return {"mode": "none"}, False


def _first(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next(value for value in values if value is not None)


def _require_policies(given: Sequence[Any]) -> None:
    """Raises ValueError unless all values are policies of different classes."""
    for value in given:
        if not isinstance(value, Policy):
            allowed = "a sequence of policies, for example slipstream_tf.DeferGradients()"
            raise invalid("policies", value, _PLACE, allowed)
    kinds = [type(value).__name__ for value in given]
    twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
    if twice:
        raise invalid("policies", twice, _PLACE, "at most one policy of each class")
