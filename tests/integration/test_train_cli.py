"""slipstream-train from flags to metrics.json, on generated examples and data samples."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from train_programs import GENERATED, SMALL, prepared, refused

from slipstream_tf.cli import prepare, train
from slipstream_tf.cli.program import run_program
from slipstream_tf.cli.settings import resolve
from slipstream_tf.data.memory_plan import read_uses

BY_DRIFT = ("--skip_score=row_drift", "--skip_alpha=0.6", "--skip_fraction=0.6")
SKIPPING = ("--policies=skip_examples", *BY_DRIFT, "--window_steps=6")
SKIPS, DEFERS, MASKS = (
    f"--policies={policy}" for policy in ("skip_examples", "defer_gradients", "mask_gradients")
)
Train = Callable[..., dict[str, Any]]


def data_folder() -> Path:
    """Returns the folder of the data samples.

    It is $SLIPSTREAM_DATA, or ../shared/data relative to the repository.
    """
    root = Path(__file__).resolve().parents[2]
    return Path(os.environ.get("SLIPSTREAM_DATA") or root.parent / "shared" / "data")


def sample(name: str) -> Path:
    path = data_folder() / name
    if not path.is_file():
        pytest.skip(f"no {name} in $SLIPSTREAM_DATA or ../shared/data")
    return path


def policies_of(record: dict[str, Any]) -> list[str]:
    """Returns the class names of a run's policies."""
    return [policy["class_name"] for policy in record["engine"]["policies"]]


def warmup_of(record: dict[str, Any]) -> Any:
    """Returns the warm-up of a run's windows, in steps."""
    return record["engine"]["window"]["config"]["warmup"]


@pytest.fixture(name="run_train")
def fixture_run_train(tmp_path: Path) -> Train:
    """Returns a function that runs slipstream-train here and returns its record."""

    def run(*flags: str, name: str = "run") -> dict[str, Any]:
        output = tmp_path / name
        code = run_program(train.make_flags(), train.main, [*flags, f"--output={output}"])
        assert code == 0
        assert os.listdir(output) == ["metrics.json"]
        return json.loads((output / "metrics.json").read_text())

    return run


def test_plain_run_writes_complete_record(
    run_train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_train(*SMALL)
    assert {"schema", "data", "test", "training", "examples", "test_bad_lines", "row_lookups"} | {
        "rows", "seconds", "windows", "engine", "settings", "flags", "versions", "machine",
    } <= set(record)  # fmt: skip
    assert record["examples"] == {
        "seen": 18_000, "trained": 18_000, "skipped": 0, "bad_lines": 0, "planned": 18_000,
    }  # fmt: skip
    assert record["row_lookups"] == 18_000 * 26
    assert record["test"]["examples"] == 1_800
    assert 0.5 < record["test"]["auc"] < 1.0
    assert set(record["seconds"]) == {
        "reading", "training", "window_ends", "evaluation", "total",
    }  # fmt: skip
    assert record["settings"]["seed"] == 0 and record["flags"]["dim"] == 4
    assert record["windows"] == [] and record["engine"] is None
    assert record["not_learned"] == "" and record["report"] == "" and record["dry_run"] is None
    captured = capsys.readouterr()
    for text in ("test AUC", "calibration", "examples trained", "18,000 (100.0%)"):
        assert text in captured.out
    for text in ("loss", "AUC", "skipped", "examples/s"):
        assert text in captured.err


def test_model_depends_on_seed(run_train: Train) -> None:
    first, second = (run_train(*SMALL, name=name) for name in ("a", "b"))
    assert first["test"] == second["test"] and first["training"] == second["training"]
    assert run_train(*SMALL, "--seed=1", name="c")["test"] != first["test"]


def test_evaluation_during_training_does_not_change_results(run_train: Train) -> None:
    # No gradients are deferred here, because an evaluation would flush them. The first run trains
    # six steps per call and the other run one step per call.
    flags = (*SMALL, "--watch", "--window_steps=6", "--max_examples=8000")
    without, record = run_train(*flags), run_train(*flags, "--evaluate_every=7", name="watched")
    for name in ("test", "examples", "rows", "gradient_rows"):
        assert record[name] == without[name]
    for watched, at_once in ((without, 6), (record, 1)):
        *_, last = watched["evaluations"]
        assert {name: last[name] for name in watched["test"]} == watched["test"]
        assert last["examples_seen"] == watched["examples"]["seen"]
        assert last["examples_trained"] == watched["examples"]["trained"]
        points = watched["progress"]
        ends = [*range(at_once, last["step"], at_once), last["step"]]
        assert [point["step"] for point in points] == ends
        assert points[-1]["loss"] == pytest.approx(watched["training"]["loss"])
        assert points[-1]["auc"] == pytest.approx(watched["training"]["auc"])
        for name in ("seconds", "examples_trained", "examples_seen"):
            assert [p[name] for p in points] == sorted(p[name] for p in points)
    assert len(without["evaluations"]) == 1
    evaluations = record["evaluations"]
    assert [e["step"] for e in evaluations[:-1]] == list(range(7, evaluations[-1]["step"], 7))
    assert all(e["examples"] == record["test"]["examples"] for e in evaluations)
    assert len({e["log_loss"] for e in evaluations}) == len(evaluations) > 2


def test_long_run_records_limited_number_of_points(run_train: Train) -> None:
    record = run_train("--data=generated:1000", "--dim=2", "--mlp=", "--bottom=",
                       "--batch_size=4", "--evaluate_every=251")  # fmt: skip
    # 251 is a prime number, so that each call trains one step.
    steps = [point["step"] for point in record["progress"]]
    assert steps[-1] == 250 and steps[:-1] == list(range(4, 250, 4))


def test_tensorboard_logs_every_window_except_last(run_train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "board"
    record = run_train(*SMALL, "--watch", "--window_steps=20", f"--tensorboard={folder}")
    (path,) = (folder / "slipstream").iterdir()
    steps = {
        event.step
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.tag == "saturation/threshold"
    }
    # The last window ends with the run, after `fit`.
    assert steps == {window["step"] for window in record["windows"][:-1]} == {20, 40, 60}


def test_skipping_and_control_runs_count_every_example(run_train: Train) -> None:
    paper = run_train(*SMALL, *SKIPPING, name="paper")
    inputs = paper["examples"]
    assert inputs["seen"] == 18_000 and inputs["skipped"] > 1_000
    assert inputs["trained"] + inputs["skipped"] == inputs["seen"]
    windows = paper["windows"]
    assert sum(w["examples_seen"] for w in windows) == inputs["seen"]
    assert any(w["threshold"] > 0 and w["saturated_fraction"] > 0 for w in windows)
    # A quarter of the steps: 18,000 examples / 256 per step / 4.
    assert warmup_of(paper) == 18
    assert all(not w["examples_skipped"] for w in windows if w["is_warming_up"])

    match = f"--match={Path(paper['flags']['output']) / 'metrics.json'}"
    random = run_train("--control=random", match, name="random")
    assert random["settings"]["skip_alpha"] == 0.6 and random["settings"]["dim"] == 4
    assert random["examples"]["seen"] == 18_000
    assert random["examples"]["trained"] == pytest.approx(inputs["trained"], rel=0.05)
    assert policies_of(random) == ["SkipAtRandom"] and warmup_of(random) == 18

    stop = run_train("--control=stop", match, name="stop")
    whole = round(inputs["trained"] / 256) * 256
    assert stop["examples"]["trained"] == stop["examples"]["seen"] == whole


def test_epochs_limits_tracking_and_warmup_steps_combine(run_train: Train) -> None:
    record = run_train(
        "--data=generated:1800", "--model=dcn", "--cross_layers=1", "--mlp=", "--dim=2",
        "--epochs=3", "--max_examples=5001", "--batch_size=500", "--watch", "--warmup_steps=3",
        "--window_steps=2", "--precision=mixed_bfloat16", "--rows_optimizer=rowwise_adagrad",
    )  # fmt: skip
    assert record["examples"]["seen"] == record["examples"]["trained"] == 5_001
    assert policies_of(record) == [] and warmup_of(record) == 3
    # The eleventh step has one example, which was read together with the examples of the tenth
    # step.
    assert [w["step"] for w in record["windows"]][:5] == [2, 4, 6, 8, 10]
    assert any(w["threshold"] > 0 for w in record["windows"])


def test_deepfm_trains_and_exports(run_train: Train, tmp_path: Path) -> None:
    import tensorflow as tf

    record = run_train(
        "--data=generated:1800", "--model=deepfm", "--mlp=8", "--dim=3", "--batch_size=500",
        f"--export={tmp_path / 'served'}",
    )  # fmt: skip
    assert record["settings"]["model"] == "deepfm"
    served = tf.saved_model.load(str(tmp_path / "served")).signatures["serving_default"]
    specs = served.structured_input_signature[1]
    batch = {name: tf.zeros([3, *spec.shape[1:]], spec.dtype) for name, spec in specs.items()}
    outputs = served(**batch)["outputs"].numpy()
    assert outputs.shape == (3, 1)
    assert ((outputs > 0) & (outputs < 1)).all()


def test_export_takes_columns_of_original_file(
    run_train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, count = np.random.default_rng(0), 2_000
    number = draw.integers(0, 50, count)
    price = [f"{value:.2f}" if value > 1 else "" for value in draw.exponential(9.0, count)]
    rows = {
        "clicked": [str(int(i % 3 == 0)) for i in number],
        "user id": [f"user {i}" if i else "" for i in draw.integers(0, 50, count)],
        "ad": [f"{i}" if i % 9 else "" for i in number],
        "tags": ["|".join(f"t{i % k}" for k in range(1, i % 4 + 1)) for i in number],
        "price": price,
    }
    table = [list(rows), *zip(*rows.values(), strict=True)]
    (tmp_path / "a.csv").write_text("".join(",".join(row) + "\n" for row in table))
    ad, tags = {"column": "ad", "as": "integer"}, {"column": "tags", "separator": "|"}
    dense = [{"column": "price", "transform": "log"}]
    schema = {"label": "clicked", "keys": ["user id", ad, tags], "dense": dense}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    data, export = tmp_path / "prepared", tmp_path / "served"
    flags = [str(tmp_path / "a.csv"), f"--schema={tmp_path / 'schema.json'}", f"--output={data}"]
    assert run_program(prepare.make_flags(), prepare.main, flags) == 0
    record = run_train(
        f"--data={data}", "--model=dlrm", "--dim=4", "--mlp=8", "--bottom=4", "--batch_size=100",
        f"--export={export}",
    )  # fmt: skip
    assert record["test"]["auc"] > 0.6
    assert "ad (int64), price (float32), tags (string), user_id (string)" in capsys.readouterr().out
    is_test = np.arange(count) // 100 % 10 == 9
    label, user, ad, tags, price = (np.array(column)[is_test] for column in rows.values())
    served = tf.saved_model.load(str(export)).signatures["serving_default"]
    outputs = served(
        user_id=tf.constant(user),
        ad=tf.constant([int(i) if i else -(2**63) for i in ad], tf.int64),
        tags=tf.constant(tags),
        price=tf.constant([float(p) if p else np.nan for p in price], tf.float32),
    )["outputs"][:, 0]
    log_loss = keras.losses.binary_crossentropy(label.astype(np.float32), outputs)
    assert float(log_loss) == pytest.approx(record["test"]["log_loss"], rel=1e-5)


def test_columns_whose_names_are_no_input_names_are_served(
    run_train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["a b", "a-b", "_id", "class"]
    columns = {"clicked": [1.0, 0.0] * 600, **{key: [1, 2] * 600 for key in keys}}
    data, export = prepared(tmp_path, columns, keys, []), tmp_path / "served"
    capsys.readouterr()
    run_train(
        f"--data={data}", "--model=dlrm", "--dim=4", "--mlp=8", "--batch_size=100",
        f"--export={export}",
    )  # fmt: skip
    printed = capsys.readouterr().out
    served = tf.saved_model.load(str(export)).signatures["serving_default"]
    names = ["a_b", "a_b_2", "inputs_id", "inputs_class"]
    assert set(served.structured_input_signature[1]) == set(names)
    assert all(f"{name} (int64)" in printed for name in names)
    outputs = served(**{name: tf.constant([1, 2], tf.int64) for name in names})["outputs"]
    assert outputs.shape[0] == 2


def test_deferred_gradients_are_counted(run_train: Train) -> None:
    record = run_train(
        *SMALL, "--max_examples=9000", "--policies=defer_gradients",
        "--defer_movement=0.01", "--window_steps=6",
    )  # fmt: skip
    assert record["examples"]["trained"] == record["examples"]["seen"] == 9_000
    rows = record["gradient_rows"]
    assert set(rows) == {f"c{i}" for i in range(1, 27)}
    for counts in rows.values():
        assert counts["sent"] < counts["offered"] and counts["masked"] == 0
        # Gradients that are not sent are in a sum that was sent or is deferred. The evaluation
        # flushed the rest.
        assert counts["deferred_now"] == 0 < counts["flushed"]
    assert policies_of(record) == ["DeferGradients"]
    assert record["settings"]["engine"] == {"defer_movement": 0.01}
    assert "been sent" in record["report"]


@pytest.mark.parametrize(
    ("flags", "name", "needs"),
    [
        ((DEFERS, "--skip_score=row_drift"), "skip_score", SKIPS),
        ((MASKS, "--skip_keep_rate=0.1"), "skip_keep_rate", SKIPS),
        ((SKIPS, "--defer_movement=1"), "defer_movement", DEFERS),
        ((SKIPS, "--defer_max_age=3"), "defer_max_age", DEFERS),
        ((DEFERS, "--revisit_every=2"), "revisit_every", "--skip_score=row_drift or --watch"),
        ((DEFERS, "--skip_fraction=0.5"), "skip_fraction", SKIPS),
        (
            (DEFERS, "--max_auc_loss=0.001", "--defer_movement=0.1"),
            "defer_movement",
            "a run without --max_auc_loss",
        ),
        ((SKIPS, "--revisit_every=2"), "revisit_every", "--skip_score=row_drift or --watch"),
        ((SKIPS, "--skip_keep_rate=0.1"), "skip_keep_rate", "--skip_score=row_drift"),
        ((SKIPS, "--skip_score=row_drift", "--pilot=fm"), "pilot", "--skip_score=predicted_loss"),
        ((SKIPS, "--mask_fraction=0.5"), "mask_fraction", MASKS),
        (("--max_auc_loss=0.001",), "max_auc_loss", "--policies=defer_gradients"),
        (("--window_steps=5",), "window_steps", "--policies or --watch"),
        (("--prefetch",), "prefetch", "multiple ranks"),
    ],
)  # fmt: skip
def test_engine_flag_without_effect_is_refused(
    flags: tuple[str, ...], name: str, needs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "--data=generated", *flags)
    assert f"Invalid flag --{name} in this run. It requires " in line and needs in line


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ((), ("--data",)),
        (("--data=nowhere.npz",), ("--data=nowhere.npz", "the path does not exist", "Expected ")),
        (("--data=generated:7",), ("generated:7", ">= 100")),
        (("--data=generated", "--dim=0"), ("--dim=0", "an integer >= 1")),
        (("--data=generated", "--skip_alpha=0"), ("--skip_alpha=0", "> 0 and <= 1")),
        (("--data=generated", "--skip_alpha=2"), ("--skip_alpha=2", "> 0 and <= 1")),
        (("--data=generated", "--skip_fraction=1.5"), ("--skip_fraction=1.5", "> 0 and <= 1")),
        (("--data=generated", "--epochs=many"), ("--epochs=many", "an integer >= 1")),
        (("--data=generated", "--model=mlp"), ("--model=mlp", "dlrm, dcn, deepfm")),
        (("--data=generated", "--dropout=1"), ("--dropout=1", "< 1")),
        (("--data=generated", "--mlp=64-x"), ("--mlp=64-x", "256-128")),
        (("--data=generated", "--warmup=nan"), ("--warmup=nan", "<= 1")),
        (("--data=generated", "--resume=perhaps"), ("--resume=perhaps", "true, false")),
        (("--data=generated", "--epoch=1"), ("epoch", "epochs")),
        (("--data=generated", "extra"), ("'extra'", "--flag=value")),
        (("--data=generated", "--watch", "--warmup=0.1", "--warmup_steps=1"), ("exclude",)),
        (("--data=generated", "--warmup=0.4"), ("--warmup", "--policies or --watch")),
        (("--data=generated", "--skip_fraction=0.4"), ("--skip_fraction", SKIPS)),
        (("--data=generated", "--policies=inputs"), ("--policies=inputs", "skip_examples")),
        (("--data=generated", "--model=dcn", "--bottom=4"), ("--bottom", "--model=dlrm")),
        (("--data=generated", "--model=deepfm", "--bottom=4"), ("--bottom", "--model=dlrm")),
        (("--data=generated", "--model=deepfm", "--cross_layers=4"), ("--cross_layers",)),
        (
            ("--data=generated", f"--export={Path(__file__).parent}"),
            ("--export=", "is not an empty folder"),
        ),
        (("--data=generated", "--model=dlrm", "--cross_layers=4"), ("--cross_layers",)),
        (("--data=generated", "--tensorboard=x"), ("--tensorboard", "--watch")),
        (("--data=generated", "--evaluate_every=0"), ("--evaluate_every=0", "an integer >= 1")),
        (("--data=generated", SKIPS, "--watch"), ("--watch", "without --policies")),
        (
            (f"--data={Path(__file__).parent}",),
            ("--data=", "was not written by slipstream-prepare", "slipstream-prepare --schema"),
        ),
        (("--data=generated", "--match=x"), ("--match=x", "--control=random")),
        (("--control=random",), ("--match", "metrics.json")),
        (("--control=stop", "--match=nowhere"), ("--match=nowhere", "No such file")),
        (("--control=stop", "--match=x", SKIPS), ("--policies", "Expected no --policies")),
    ],
)
def test_invalid_flag_error_shows_value_and_allowed_values(
    flags: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *flags)
    for part in parts:
        assert part in line


def test_csv_with_other_columns_refers_to_prepare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clicks.csv").write_text("clicked,user\n1,u1\n")
    line = refused(capsys, f"--data={tmp_path / 'clicks.csv'}")
    assert "clicked,user" in line and "slipstream-prepare --schema" in line


def test_control_with_different_settings_is_refused(
    run_train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_train("--data=generated:1000", "--batch_size=500", "--dim=2", name="base")
    match = f"--match={tmp_path / 'base' / 'metrics.json'}"
    line = refused(capsys, "--control=stop", match, "--batch_size=7")
    assert "--batch_size=7" in line and "500" in line
    other = tmp_path / "other.json"
    other.write_text("{}")
    line = refused(capsys, "--control=stop", f"--match={other}")
    assert "has no settings" in line


def test_unwritable_output_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for flag in ("--output", "--watch --tensorboard"):
        line = refused(capsys, *SMALL, *f"{flag}={tmp_path / 'file'}".split())
        assert flag.split()[-1] in line and "Expected a folder" in line
    for path, reason in (
        (tmp_path, "the path is a folder"),
        (tmp_path / "file" / "t.json", "exists"),
    ):
        line = refused(capsys, *SMALL, f"--trace={path}")
        assert f"--trace={path}: " in line and reason in line and "Expected a file in" in line


def test_export_below_file_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    line = refused(capsys, *SMALL, f"--export={tmp_path / 'file' / 'new' / '1'}")
    assert "--export" in line and f"{tmp_path / 'file'} is not a folder" in line


def test_failed_export_keeps_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("No argument of this name")

    monkeypatch.setattr("slipstream_tf.cli.session.saved_model", fail)
    flags = (
        "--data=generated:1800", "--model=deepfm", "--mlp=8", "--dim=3", "--batch_size=500",
        f"--export={tmp_path / 'served'}", f"--output={tmp_path / 'run'}",
    )  # fmt: skip
    line = refused(capsys, *flags, code=1)
    assert "--export" in line and "No argument of this name" in line
    record = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert 0 < record["test"]["auc"] < 1


def test_diverging_run_prints_cause_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--data=generated:2000", "--rows_learning_rate=1e30", f"--output={tmp_path}")
    line = refused(capsys, *flags, code=1)
    assert "gradient" in line and "table 'c1'" in line and "finite" in line
    assert not (tmp_path / "metrics.json").exists()


def test_dry_run_trains_plainly_and_prints_commands(
    run_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = (*SMALL, *BY_DRIFT, "--window_steps=4")
    plain = run_train(*SMALL, name="plain")
    capsys.readouterr()
    settings = tmp_path / "dry.json"
    settings.write_text('{"dry_run": true}')
    record = run_train(*flags, f"--settings={settings}", name="dry_run")
    text = capsys.readouterr().out
    assert record["test"] == plain["test"] and record["examples"]["skipped"] == 0
    assert plain["dry_run"] is None
    examples, rows = record["dry_run"]["savings"]
    assert (examples["what"], rows["what"]) == ("examples", "gradient rows")
    assert 0 < examples["saved"] < examples["offered"] < 18_000
    assert 0 <= examples["min_cost"] < examples["max_cost"] and "+-" in examples["basis"]
    assert 0 < rows["bytes_saved"] < rows["bytes_offered"]
    rates = 0.05  # The default distance, in units of the learning rate.
    assert rows["max_cost"] == pytest.approx(rates * 0.012)
    assert f"- {examples['saved']:,} of {examples['offered']:,} examples (" in text
    assert "at an estimated cost of" in text and f"pass {SKIPS} instead of --dry_run" in text
    lines = [line.strip() for line in text.splitlines() if line.startswith("  slipstream-train")]
    assert len(lines) == 4
    # The commands run unchanged and select the policies of the dry run.
    run_skip, run_defer, run_random, _ = (shlex.split(line)[1:] for line in lines)
    assert "--skip_alpha=0.6" in run_skip and "--skip_alpha=0.6" not in run_defer
    flag_set = train.make_flags()
    resolve(*flag_set.parse(run_defer), lambda _: GENERATED, flag_set)
    assert run_program(train.make_flags(), train.main, run_skip) == 0
    done = json.loads((tmp_path / "skip_examples" / "metrics.json").read_text())
    predicted_losses, fraction = examples["saved"], done["examples"]["skipped"]
    assert 0.5 * predicted_losses < fraction < 1.5 * predicted_losses
    random = resolve(*flag_set.parse(run_random), lambda _: GENERATED, flag_set)
    assert random.control == "random" and len(random.random_fractions) > 1


def test_dry_run_of_model_that_has_not_learned_is_refused(
    run_train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    table = {"clicked": random.random(5_000) < 0.3, "user": random.integers(0, 500, 5_000)}
    data = prepared(tmp_path, table, ["user"], [])
    capsys.readouterr()
    flags = (f"--data={data}", "--dim=4", "--batch_size=64", "--window_steps=6", "--dry_run")
    record = run_train(*flags)
    text = capsys.readouterr().out
    assert record["not_learned"].startswith("The model has not learned: the test ")
    assert record["dry_run"] == {
        "savings": [], "exchange": None, "refusal": record["not_learned"],
    }  # fmt: skip
    assert record["report"].startswith("Dry run: savings are not estimated. The model has not")
    assert record["not_learned"] in text and "- pass another --model than " in text
    assert "instead of --dry_run" not in text


def test_help_groups_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    flag_set = train.make_flags()
    assert run_program(flag_set, train.main, ["--helpfull"]) == 0
    text = capsys.readouterr().out
    values, _ = flag_set.parse([])
    for name in values:
        assert f"  --{name}" in text
    for group in ("Data and output:", "Model:", "Training:", "Policies:", "Controls:"):
        assert group in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("name", "header_lines"), [("criteo_first10k.tsv", 0), ("avazu_first9k.csv", 1)]
)
def test_training_reads_every_line_of_samples(
    name: str, header_lines: int, run_train: Train
) -> None:
    path = sample(name)
    lines = len(path.read_bytes().splitlines()) - header_lines
    assert lines > 8_000
    record = run_train(f"--data={path}", "--dim=4", "--mlp=8", "--batch_size=256")
    inputs = record["examples"]
    assert inputs["trained"] == inputs["seen"] == inputs["trained"] + inputs["skipped"]
    assert inputs["bad_lines"] == record["test_bad_lines"] == 0
    assert inputs["seen"] + record["test"]["examples"] == lines


def test_prepared_list_column_trains(run_train: Train, tmp_path: Path) -> None:
    rows = 10_000
    table = {
        "clicked": [i % 3 == 0 for i in range(rows)],
        "user": [i % 50 for i in range(rows)],
        "read": [[i % 7, i % 11][: i % 3] for i in range(rows)],
        "age": [float(i % 80) for i in range(rows)],
    }
    data = prepared(tmp_path, table, ["user", "read"], ["age"])
    record = run_train(
        f"--data={data}", "--dim=4", "--mlp=4", "--policies=skip_examples", "--batch_size=128",
        "--max_examples=3999", "--epochs=2", "--skip_score=row_drift", "--window_steps=4",
    )  # fmt: skip
    assert record["examples"]["seen"] == 3_999
    assert record["rows"] == {"user": 50, "read": 11}
    assert record["row_lookups"] is None


def test_columns_share_table(run_train: Train, tmp_path: Path) -> None:
    rows = 2_000
    table = {
        "clicked": [i % 3 == 0 for i in range(rows)],
        "item": [i % 50 for i in range(rows)],
        "seen": [[i % 7, 60 + i % 11] for i in range(rows)],
        "user": [i % 20 for i in range(rows)],
    }
    keys = ["item", {"column": "seen", "table": "item"}, {"column": "user", "table": "users"}]
    data = prepared(tmp_path, table, keys, [])
    record = run_train(f"--data={data}", "--dim=4", "--mlp=4", "--batch_size=128", "--model=dcn")
    assert record["rows"] == {"item": 61, "users": 20}
    assert {use.name: use.rows for use in read_uses(str(data))} == {"item": 61, "users": 20}
    hot = json.loads((data / "statistics.json").read_text())["hot"]
    assert (hot["keys"], hot["lookup_share"], hot["input_share"]) == (81, 1, 1)


def test_bad_line_is_counted(run_train: Train, tmp_path: Path) -> None:
    path = tmp_path / "lines.tsv"
    good = "\t".join(["1", *(str(i) for i in range(13)), *(f"{i:08x}" for i in range(26))])
    lines = [good.replace("1", "0", 1) if i % 3 else good for i in range(2_000)]
    lines[4] = "1\t2\t3"
    path.write_text("\n".join(lines) + "\n")
    flags = (f"--data={path}", "--dim=2", "--mlp=4", "--batch_size=256")
    record = run_train(*flags)
    assert record["examples"]["bad_lines"] == 1
    assert record["examples"]["seen"] + record["test"]["examples"] == 1_999
