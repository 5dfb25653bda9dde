"""cli.train: the commands after a run in shadow mode are taken by slipstream-train."""

from __future__ import annotations

import shlex

import pytest

from slipstream_tf.cli import train
from slipstream_tf.cli.settings import resolve


def settled(*arguments, data="generated"):
    """(flags that were given, settings) of a command line."""
    values, given = train.make_flags().parse(arguments)
    return {name: values[name] for name in given}, resolve(values, given, lambda _: data)


def again(command, data="generated"):
    """The settings of a command as it is printed."""
    program, *arguments = shlex.split(command)
    assert program == "slipstream-train"
    return settled(*arguments, data=data)[1]


def test_shadow_alone_looks_at_inputs_and_at_rows():
    flags, settings = settled("--data=generated", "--shadow", "--output=runs/shadow")
    assert settings.skip == "both" and settings.engine == {"shadow": True}
    found = train.commands_to_switch_on(flags, settings, 1)
    assert list(found) == ["inputs", "random", "stop", "defer"]
    assert [again(found[mode]).skip for mode in ("inputs", "defer")] == ["inputs", "defer"]
    assert all(again(found[mode]).engine == {} for mode in ("inputs", "defer"))
    assert "--match=runs/inputs/metrics.json" in found["random"]


def test_over_several_epochs_inputs_go_by_their_losses():
    flags, settings = settled("--data=f.npz", "--shadow", data="frappe")
    assert settings.engine == {"shadow": True, "score": "remembered_loss"}
    found = train.commands_to_switch_on(flags, settings, 1)
    assert again(found["inputs"], "frappe").engine == {"score": "remembered_loss"}
    assert again(found["defer"], "frappe").engine == {}
    words = train.how_to_switch_on(flags, settings, 1)
    assert "add --skip=inputs --score=remembered_loss in place of --shadow" in words
    _, plain = settled("--data=f.npz", "--shadow", "--score=drift", data="frappe")
    assert plain.engine == {"shadow": True, "score": "drift"}


def test_flags_stay_where_they_matter():
    flags, settings = settled(
        "--data=my clicks.tsv", "--shadow", "--target_skip=0.5", "--keep_rate=0.1", "--strict",
        "--defer_max_age=50", "--mlp=32-16", data="criteo",
    )  # fmt: skip
    found = train.commands_to_switch_on(flags, settings, 1)
    inputs, defer = (again(found[mode], "criteo") for mode in ("inputs", "defer"))
    assert (inputs.target_skip, inputs.engine) == (0.5, {"keep_rate": 0.1})
    assert defer.engine == {"defer_max_age": 50}
    for one in (inputs, defer):
        assert (one.data, one.mlp, one.strict) == ("my clicks.tsv", (32, 16), True)


@pytest.mark.parametrize(
    ("skip", "names"),
    [
        ("inputs", ["inputs", "random", "stop"]),
        ("defer", ["defer"]),
        ("gradients", ["gradients"]),
        ("both", ["both", "random", "stop"]),
    ],
)
def test_a_given_skip_stays(skip, names):
    flags, settings = settled(
        "--data=generated", "--shadow", f"--skip={skip}", f"--output=runs/{skip}"
    )
    found = train.commands_to_switch_on(flags, settings, 1)
    assert list(found) == names
    on = again(found[skip])
    assert on.skip == skip and not on.engine
    # The run in shadow mode is not written over.
    assert f"--output=runs/{skip}-on" in found[skip]
    assert "add nothing, and leave --shadow out" in train.how_to_switch_on(flags, settings, 1)


def test_a_job_is_launched_again():
    flags, settings = settled("--data=generated", "--shadow")
    for command in train.commands_to_switch_on(flags, settings, 2).values():
        assert command.startswith("horovodrun -np 2 slipstream-train ")
