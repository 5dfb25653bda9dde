"""Tests that `slipstream-train` accepts the commands that a dry run prints."""

from __future__ import annotations

import shlex

import pytest

from slipstream_tf.cli import train
from slipstream_tf.cli.defaults import DataFacts
from slipstream_tf.cli.settings import resolve
from slipstream_tf.cli.train_flags import make_flags


def settled(*arguments, data="generated"):
    """Returns the given flags and the resolved settings of a command line."""
    flags = make_flags()
    values, given = flags.parse(arguments)
    settings = resolve(values, given, lambda _: DataFacts(name=data, fields=26), flags)
    return {name: values[name] for name in given}, settings


def again(command, data="generated"):
    """Returns the settings of a printed command."""
    program, *arguments = shlex.split(command)
    assert program == "slipstream-train"
    return settled(*arguments, data=data)[1]


def test_dry_run_without_policies_measures_skipping_and_deferring():
    flags, settings = settled("--data=generated", "--dry_run", "--output=runs/dry")
    assert settings.dry_run and settings.policies == ("skip_examples", "defer_gradients")
    assert settings.engine["skip_score"] == "predicted_loss"
    found = train.commands_to_switch_on(flags, settings, 1)
    assert list(found) == ["skip_examples", "uniform", "random", "stop", "defer_gradients"]
    for policy in ("skip_examples", "defer_gradients"):
        on = again(found[policy])
        assert on.policies == (policy,) and not on.dry_run
    assert again(found["defer_gradients"]).engine == {}
    assert "--match=runs/skip_examples/metrics.json" in found["random"]
    uniform = again(found["uniform"])
    assert uniform.policies == ("skip_examples",) and uniform.engine["pilot"] == "label"


def test_dry_run_with_row_penalty_measures_skipping_only():
    alone = settled("--data=f.tsv", "--dry_run", "--rows_l2=0.01")[1]
    assert alone.rows_l2 and alone.policies == ("skip_examples",)
    flags, settings = settled("--data=f.tsv", "--dry_run", "--rows_l2=0", "--epochs=25")
    assert settings.engine["skip_score"] == "predicted_loss", "over several epochs, too"
    found = train.commands_to_switch_on(flags, settings, 1)
    assert again(found["skip_examples"]).engine["skip_score"] == "predicted_loss"
    assert again(found["defer_gradients"]).engine == {}
    words = train.how_to_switch_on(flags, settings, 1)
    assert "pass --policies=skip_examples instead of --dry_run" in words
    _, plain = settled("--data=f.tsv", "--dry_run", "--skip_score=row_drift")
    assert plain.engine["skip_score"] == "row_drift"


def test_commands_keep_relevant_flags_only():
    flags, settings = settled(
        "--data=my clicks.tsv", "--dry_run", "--skip_fraction=0.5", "--pilot=linear", "--seed=7",
        "--defer_max_age=50", "--mlp=32-16", data="criteo",
    )  # fmt: skip
    found = train.commands_to_switch_on(flags, settings, 1)
    skip, defer = (again(found[p], "criteo") for p in ("skip_examples", "defer_gradients"))
    assert {"skip_fraction": 0.5, "pilot": "linear"}.items() <= skip.engine.items()
    assert "defer_max_age" not in skip.engine
    assert defer.engine == {"defer_max_age": 50}
    for one in (skip, defer):
        assert (one.data, one.mlp, one.seed) == ("my clicks.tsv", (32, 16), 7)


@pytest.mark.parametrize(
    ("policies", "names"),
    [
        ("skip_examples", ["skip_examples", "uniform", "random", "stop"]),
        ("defer_gradients", ["defer_gradients"]),
        ("mask_gradients", ["mask_gradients"]),
        (
            "skip_examples,defer_gradients",
            ["skip_examples_and_defer_gradients", "uniform", "random", "stop"],
        ),
    ],
)
def test_commands_keep_given_policies(policies, names):
    mode = names[0]
    flags, settings = settled(
        "--data=generated", "--dry_run", f"--policies={policies}", f"--output=runs/{mode}"
    )
    found = train.commands_to_switch_on(flags, settings, 1)
    assert list(found) == names
    on = again(found[mode])
    assert on.policies == tuple(policies.split(",")) and not on.dry_run
    # The output of the dry run is not overwritten.
    assert f"--output=runs/{mode}-on" in found[mode]
    words = train.how_to_switch_on(flags, settings, 1)
    assert "To apply the policies, omit --dry_run" in words


def test_commands_of_ranks_start_with_launcher():
    flags, settings = settled("--data=generated", "--dry_run")
    for command in train.commands_to_switch_on(flags, settings, 2).values():
        assert command.startswith("horovodrun -np 2 slipstream-train ")
