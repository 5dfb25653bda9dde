"""Settings: what is refused, how it is said, and that configurations survive a round trip."""

from __future__ import annotations

import json

import pytest

from slipstream_tf import initializers, optimizers
from slipstream_tf.config import Retention, SaturationConfig, Table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, r"`dim`: 0 for table 'user'. Allowed: an integer >= 1"),
        ({"dim": 4.0}, r"`dim`: 4.0"),
        ({"dim": True}, r"`dim`: True"),
        ({"retention": 5}, r"`retention`: 5 for table 'user'"),
        ({"combiner": "max"}, r"`combiner`: 'max'.*'sum', 'mean', 'sqrtn'"),
        ({"initializer": "glorot"}, r"RandomUniform"),
        ({"name": ""}, r"`name`"),
    ],
)
def test_bad_tables_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Table(**{"name": "user", "dim": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, r"`capacity`: 0 for Retention"),
        ({"capacity": None}, r"`capacity`: None for Retention"),
        ({"capacity": 1, "eviction": "fifo"}, r"`eviction`: 'fifo'"),
    ],
)
def test_bad_retentions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Retention(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0}, r"`alpha`: 0.*> 0 <= 1"),
        ({"alpha": 2}, r"`alpha`: 2"),
        ({"target_skip": 1.5}, r"`target_skip`: 1.5.*>= 0 <= 1"),
        ({"target_skip": float("nan")}, r"`target_skip`: nan"),
        ({"metric": "cosine"}, r"`metric`: 'cosine'"),
        ({"skip": "all"}, r"`skip`: 'all'"),
        ({"snapshot_interval": 0}, r"`snapshot_interval`: 0"),
        ({"hot_budget_bytes": -1}, r"`hot_budget_bytes`: -1"),
        ({"max_threshold": -0.5}, r"`max_threshold`"),
        ({"count_decay": 1.1}, r"`count_decay`"),
        ({"skip": "random"}, r"`random_shares`"),
        ({"random_shares": (0.5,)}, r"`random_shares`"),
        ({"skip": "random", "random_shares": (1.5,)}, r"`random_shares`: 1.5"),
    ],
)
def test_bad_saturation_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SaturationConfig(**arguments)


@pytest.mark.parametrize(
    "build",
    [
        lambda: optimizers.SGD(-1.0),
        lambda: optimizers.Adagrad(epsilon=0.0),
        lambda: optimizers.Adam(beta_1=1.0),
        lambda: initializers.RandomUniform(1.0, 0.0),
        lambda: initializers.RandomNormal(stddev=float("inf")),
    ],
)
def test_bad_rules_and_initializers_are_refused(build):
    with pytest.raises(ValueError, match="Allowed"):
        build()


@pytest.mark.parametrize(
    "config",
    [
        Table("user", 4, initializer=initializers.RandomNormal(0.1, 0.2), retention=Retention(7)),
        SaturationConfig(skip="random", random_shares=(0.1, 0.2)),
        SaturationConfig(max_threshold=0.25),
    ],
)
def test_configurations_survive_json(config):
    again = type(config).from_config(json.loads(json.dumps(config.get_config())))
    assert again == config


@pytest.mark.parametrize(
    "rule", [optimizers.SGD(), optimizers.Adam(0.2), optimizers.RowWiseAdagrad()]
)
def test_optimizers_survive_serialisation(rule):
    assert optimizers.get(json.loads(json.dumps(optimizers.serialize(rule)))) == rule


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"threshold": 0.1, "max_auc_loss": 0.001}, "`max_auc_loss`: 0.001.*with a threshold"),
        (
            {"skip": "gradients", "threshold": 0.1, "max_log_loss_increase": 0.1},
            "`max_log_loss_increase`: 0.1.*with a threshold",
        ),
        (
            {"skip": "both", "max_log_loss_increase": 0.1},
            "`max_log_loss_increase`: 0.1.*by movement",
        ),
        (
            {"skip": "defer", "defer_trigger": "interval", "guard_tolerance": 0.1},
            "`guard_tolerance`: 0.1.*skip='defer'",
        ),
        ({"skip": "none", "guard_tolerance": 0.1}, "`guard_tolerance`: 0.1.*skip='none'"),
    ],
)
def test_what_nothing_would_steer_by_is_refused(settings, message):
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        SaturationConfig(**settings)


def test_a_threshold_and_a_budget_go_together_with_remembered_losses():
    config = SaturationConfig(score="remembered_loss", threshold=0.1, max_auc_loss=0.001)
    assert config.budget_share == 1.0
    assert SaturationConfig(skip="both").budget_share == 0.5
