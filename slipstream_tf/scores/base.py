"""What every score answers; `SkipExamples` asks."""

from collections.abc import Mapping
from typing import Any


class Score:
    """Base of the scores.

    Attributes:
        alpha: share of an example's lookups that must be saturated, above 0, at most 1.
        probes_every: windows from probe to probe of a saturated key; 0: none.
        needs_losses: whether examples' losses must come in.
        needs_ids: whether examples must be told apart in every pass.
        weighs_examples: whether examples get weights.
        examples_return: whether a skippable example is trained again some time.
        share_finds_threshold: whether the share of examples to skip is what T is found for.
    """

    alpha: float = 1.0
    probes_every = 100
    needs_losses = False
    needs_ids = False
    weighs_examples = False
    examples_return = False
    share_finds_threshold = True

    def key_share(self, share: float) -> float:
        """Returns the share of the hot examples whose keys are to count as saturated.

        Args:
            share: of the hot examples, to skip.
        """
        raise NotImplementedError

    def gives_key_share(self, is_share_given: bool) -> bool:
        """Returns whether somebody chose that share, or the share to skip that it follows."""
        return is_share_given

    @property
    def loss_memory(self) -> dict[str, Any]:
        """See `policies.Policy.loss_memory`."""
        return {}

    def initial_state(self) -> dict[str, Any]:
        """See `policies.Policy.initial_state`."""
        return {}

    def next_state(self, state: Mapping[str, Any], ended: Any) -> dict[str, Any]:
        """See `policies.Policy.next_state`."""
        return dict(state)

    def rule(self, state: Mapping[str, Any], begins: Any) -> dict[str, Any]:
        """Returns the mode and threshold of `ops.classifier.InputClassifier.configure`."""
        raise NotImplementedError
