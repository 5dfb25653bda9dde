"""Tests that a settings file sets flags missing from the command line."""

from __future__ import annotations

import json

import pytest
from train_programs import GENERATED

from slipstream_tf.cli.checkpoints import checkpoint_settings
from slipstream_tf.cli.flag_set import FROM_FILE, UsageError
from slipstream_tf.cli.settings import resolve
from slipstream_tf.cli.train_flags import make_flags


@pytest.fixture
def settled(tmp_path):
    """Returns a function that resolves settings from a file and arguments."""

    def settle(content, *arguments):
        path = tmp_path / "run.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        flags = make_flags()
        values, given = flags.parse(["--data=generated", f"--settings={path}", *arguments])
        return resolve(values, given, lambda _: GENERATED, flags)

    return settle


def test_file_overrides_presets_and_defaults(settled):
    content = {
        "dim": 32, "mlp": [128, 64], "batch_norm": True, "rows_init": 0.2, "batch_size": 64,
        "hot_set_memory": 4096, "policies": ["skip_examples"], "skip_fraction": 0.25,
        "memory": "1GB", "spill": "/local",
    }  # fmt: skip
    settings = settled(content)
    assert (settings.dim, settings.mlp, settings.batch_norm) == (32, (128, 64), True)
    assert (settings.rows_init, settings.batch_size) == (0.2, 64)
    assert (settings.policies, settings.memory) == (("skip_examples",), "1GB")
    assert settings.engine["skip_fraction"] == 0.25 and settings.engine["hot_set_memory"] == 4096


def test_command_line_overrides_file(settled):
    content = {"dim": 32, "batch_norm": True, "model": "dcn", "skip_fraction": 0.25}
    settings = settled(content, "--dim=8", "--nobatch_norm", "--policies=skip_examples")
    assert (settings.dim, settings.batch_norm, settings.model) == (8, False, "dcn")
    assert settings.engine["skip_fraction"] == 0.25


def test_file_flag_without_effect_is_accepted(settled):
    assert settled({"cross_layers": 2}, "--model=deepfm").model == "deepfm"
    with pytest.raises(UsageError, match=r"--cross_layers in this run\. It requires --model=dcn"):
        settled({}, "--model=deepfm", "--cross_layers=2")


def test_command_line_warmup_replaces_warmup_of_file(settled):
    settings = settled({"warmup_steps": 500}, "--policies=skip_examples", "--warmup=0.1")
    assert (settings.warmup, settings.warmup_steps) == (0.1, None)
    settings = settled({"warmup": 0.5}, "--policies=skip_examples", "--warmup_steps=20")
    assert settings.warmup_steps == 20
    with pytest.raises(UsageError, match="--warmup and --warmup_steps exclude each other"):
        settled({"warmup": 0.5, "warmup_steps": 20, "policies": ["skip_examples"]})


def test_control_accepts_file_with_policies(settled, tmp_path):
    record = {
        "settings": {"batch_size": 64}, "examples": {"trained": 640}, "windows": [],
        "engine": {"window": {"config": {"warmup": 5}}},
    }  # fmt: skip
    match = tmp_path / "metrics.json"
    match.write_text(json.dumps(record))
    content = {"policies": ["skip_examples"], "dry_run": True, "watch": True, "dim": 4}
    settings = settled(content, "--control=stop", f"--match={match}")
    assert settings == settled(content, "--control=stop", f"--match={tmp_path}")
    assert (settings.policies, settings.dry_run, settings.watch) == ((), False, False)
    assert (settings.dim, settings.stop_after) == (4, 640)
    with pytest.raises(UsageError, match="--policies with --control=stop"):
        settled({}, "--control=stop", f"--match={match}", "--policies=skip_examples")


def test_checkpoint_flags_of_file_require_output(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"checkpoint_every": 5, "resume": true}')
    assert not checkpoint_settings(*make_flags().parse([f"--settings={path}"])).is_used
    with pytest.raises(UsageError, match=r"--resume in this run\. It requires --output"):
        checkpoint_settings(*make_flags().parse([f"--settings={path}", "--resume"]))


def test_file_sets_saving_and_output_flags(tmp_path):
    (tmp_path / "run.json").write_text('{"checkpoint_every": 5, "output": "runs/a"}')
    values, given = make_flags().parse([f"--settings={tmp_path / 'run.json'}", "--output=runs/b"])
    assert (values["checkpoint_every"], values["output"]) == (5, "runs/b")
    assert values[FROM_FILE] == {"checkpoint_every"} and "checkpoint_every" not in given


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"dims": 3},
            r"Invalid name 'dims' in .*run\.json.* name of a flag of slipstream-train",
        ),
        ({"modle": "dcn"}, "Invalid name 'modle' in .*Did you mean 'model'"),
        ({"batch-norm": True}, "Invalid name 'batch-norm' in .*Did you mean 'batch_norm'"),
        ({"settings": "a.json"}, "Invalid name 'settings'"),
        ({"dim": 0}, r"Invalid value 0 of 'dim' in .*run\.json\. Expected an integer >= 1 and"),
        ({"dim": "32"}, "Invalid value '32' of 'dim'"),
        ({"dim": 3.5}, "Invalid value 3.5 of 'dim'"),
        ({"dim": True}, "Invalid value True of 'dim'"),
        ({"dim": None}, "Invalid value None of 'dim'"),
        ({"dropout": 1}, "Invalid value 1 of 'dropout'.*< 1"),
        ({"dropout": float("nan")}, "Invalid value nan of 'dropout'"),
        ({"model": "mlp"}, "Invalid value 'mlp' of 'model'.*dlrm, dcn, deepfm"),
        ({"mlp": [0]}, r"Invalid value \[0\] of 'mlp'"),
        ({"batch_norm": 1}, "Invalid value 1 of 'batch_norm'.*Expected true or false"),
        ({"policies": ["inputs"]}, r"Invalid value \['inputs'\] of 'policies'.*skip_examples"),
        ([1], r"Invalid flag --settings=.*contains \[1\]\. Expected a JSON object"),
        ("{", "Invalid flag --settings=.*not valid JSON"),
    ],
)
def test_errors_name_file_flag_value_and_allowed_values(settled, content, message):
    with pytest.raises(UsageError, match=message):
        settled(content)


def test_missing_file_is_named():
    with pytest.raises(UsageError, match=r"Invalid flag --settings=none\.json\. .*No such file"):
        make_flags().parse(["--settings=none.json"])
