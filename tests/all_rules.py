"""A rule of each kind, for tests of what must hold for all of them."""

from __future__ import annotations

from slipstream_tf import optimizers

ALL_RULES = [
    optimizers.SGD(0.1),
    optimizers.SGD(0.1, momentum=0.5),
    optimizers.SGD(0.1, momentum=0.5, nesterov=True),
    optimizers.Adagrad(0.1),
    optimizers.RowWiseAdagrad(0.1),
    optimizers.Adam(0.1),
    optimizers.Adam(0.1, bias_correction="row"),
    optimizers.RowWiseAdam(0.1),
    optimizers.Ftrl(0.1, initial_accumulator_value=0.1),
]


def name_of(rule: optimizers.SparseOptimizer) -> str:
    """Names a rule in a test's id."""
    return rule.layout + ("Nesterov" if getattr(rule, "nesterov", False) else "")
