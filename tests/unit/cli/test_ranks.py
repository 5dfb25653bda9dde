"""Tests of `cli.program` and `cli.pipeline` with simulated ranks: data shares and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from train_programs import prepared

from slipstream_tf._utils.agreement import gather_json
from slipstream_tf.cli import demo, train
from slipstream_tf.cli.flag_set import RUN_ERROR, USAGE_ERROR, RunError, UsageError
from slipstream_tf.cli.pipeline import batches_of_rank, inputs_of_rank, slice_of_rank
from slipstream_tf.cli.program import AgreedError, agreed, run_program
from slipstream_tf.distributed import SingleProcess


class FakeRank(SingleProcess):
    """Simulates one rank; the other ranks gather the given values."""

    def __init__(self, rank: int, size: int, others: list[Any] | None = None) -> None:
        self.rank, self.size, self._others = rank, size, others or []

    def gather(self, tensor: Any, kind: Any, name: str) -> tf.Tensor:
        lines = [json.dumps(value).encode() + b"\n" for value in self._others]
        parts = [tf.constant(np.frombuffer(line, np.uint8)) for line in lines]
        parts.insert(self.rank, tensor)
        return tf.concat(parts, 0)


def batches(inputs: int, size: int) -> tf.data.Dataset:
    ids = np.arange(inputs, dtype=np.int64)
    return tf.data.Dataset.from_tensor_slices(({"id": ids, "keys": ids[:, None]}, ids)).batch(size)


class OtherRank(FakeRank):
    """Simulates rank 0 of two; the other rank gathers a value by the name of the collective."""

    def __init__(self, by_name: dict[str, Any]) -> None:
        super().__init__(0, 2)
        self._by_name = by_name

    def gather(self, tensor: Any, kind: Any, name: str) -> tf.Tensor:
        self._others = [self._by_name[name]]
        return super().gather(tensor, kind, name)


def test_ranks_with_different_local_data_are_refused(tmp_path: Path) -> None:
    from slipstream_tf.cli import data
    from slipstream_tf.cli.checkpoints import checkpoint_settings, describe
    from slipstream_tf.cli.session import Trainer
    from slipstream_tf.cli.settings import resolve
    from slipstream_tf.telemetry.run_record import PhaseClock

    rows = {"clicked": [1, 0] * 50, "user": list(range(100))}
    folder = prepared(tmp_path, rows, ["user"], [])
    values, given = train.make_flags().parse([f"--data={folder}", "--model=dcn"])
    settings = resolve(values, given, data.facts_of, train.make_flags())
    parts = data.open_parts(settings)
    own = describe(settings, parts.train.spec, 2)
    (file,) = own["data"]["files"]
    assert re.fullmatch(r"[\w.]+, CRC-32 \d+", file)
    changed = {"files": [file.rpartition(" ")[0] + " 0"], "manifest": "0"}
    other = {"settings": own["settings"], "data": {**own["data"], **changed}}
    comm = OtherRank(
        {
            "slipstream.run": json.dumps(other, sort_keys=True, default=repr),
            "slipstream.agreed.run": [USAGE_ERROR, ""],
        }
    )
    saving = checkpoint_settings(values, given)
    trainer = Trainer(settings, parts, PhaseClock(), comm, saving)
    name, where = file.partition(",")[0], re.escape(str(folder))
    expected = (
        rf"on rank 1: `files\[0\]` of --data={where} is '{name}, CRC-32 0', but it is '{name}"
    )
    with pytest.raises(AgreedError, match=expected):
        trainer.open()


@pytest.mark.parametrize("inputs", [1, 7, 8, 30, 31, 36])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rank_parts_contain_every_example_once(inputs: int, size: int) -> None:
    taken: list[int] = []
    for rank in range(size):
        comm = FakeRank(rank, size)
        own = [n for _, label in batches_of_rank(batches(inputs, 4), comm) for n in label.numpy()]
        assert len(own) == inputs_of_rank(inputs, 4, comm)
        taken += own
    assert sorted(taken) == list(range(inputs))


@pytest.mark.parametrize("inputs", [1, 7, 8, 30, 36])
@pytest.mark.parametrize("size", [2, 3])
def test_step_parts_contain_every_example_once_with_fraction(inputs: int, size: int) -> None:
    steps = []
    for rank in range(size):
        comm = FakeRank(rank, size)
        parts = list(slice_of_rank(batches(inputs, 4 * size), 4, comm))
        assert sum(len(label) for _, label in parts) == inputs_of_rank(inputs, 4, comm)
        steps.append(parts)
    taken: list[int] = []
    for parts in zip(*steps, strict=True):
        sizes = [len(label) for _, label in parts]
        for (features, label), own in zip(parts, sizes, strict=True):
            assert features["id"].numpy().tolist() == label.numpy().tolist()
            fraction = np.float32(own * size / sum(sizes))
            assert features["fraction_of_step"].numpy().tolist() == [fraction] * own
            taken += label.numpy().tolist()
    assert taken == list(range(inputs))


def test_gather_json_accepts_values_of_different_length() -> None:
    comm = FakeRank(1, 3, [{"a": 1}, "a longer\ntext"])
    assert gather_json(comm, [], "x") == [{"a": 1}, [], "a longer\ntext"]
    assert gather_json(SingleProcess(), {"a": 1}, "x") == [{"a": 1}]


@pytest.mark.parametrize(
    ("own", "other", "code", "text"),
    [
        (UsageError("no"), [USAGE_ERROR, "no"], USAGE_ERROR, "no"),
        (UsageError("no"), [0, ""], USAGE_ERROR, "rank 0: no"),
        (None, [RUN_ERROR, "torn"], RUN_ERROR, "rank 1: torn"),
        (RunError("a"), [USAGE_ERROR, "b"], RUN_ERROR, "rank 0: a"),
    ],
)
def test_error_on_one_rank_raises_on_all_ranks(
    own: Exception | None, other: list[Any], code: int, text: str
) -> None:
    with pytest.raises(AgreedError) as raised, agreed(FakeRank(0, 2, [other]), "x"):
        if own is not None:
            raise own
    assert (raised.value.code, str(raised.value)) == (code, text)


def test_single_process_errors_pass_through() -> None:
    with agreed(FakeRank(0, 2, [[0, ""]]), "x"):
        pass
    with pytest.raises(UsageError, match="own"), agreed(SingleProcess(), "x"):
        raise UsageError("own")


@pytest.mark.parametrize("flag", ["--wire_dtype=bfloat16", "--placement=replicated"])
def test_rank_flags_are_refused_in_single_process(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program(train.make_flags(), train.main, ["--data=generated", flag]) == USAGE_ERROR
    line = capsys.readouterr().err
    assert flag.split("=")[0] in line and "horovodrun or mpirun" in line


def test_control_requires_same_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matched = tmp_path / "metrics.json"
    settings = {"data": "generated:1000", "model": "dlrm"}
    record = {"settings": settings, "examples": {"trained": 9}, "windows": [], "ranks": {"size": 2}}
    matched.write_text(json.dumps(record))
    flags = ["--control=stop", f"--match={matched}"]
    assert run_program(train.make_flags(), train.main, flags) == USAGE_ERROR
    assert "with 1 rank(s): the matched run had 2" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_demo_refuses_to_run_as_rank(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", str(rank))
    with pytest.raises(SystemExit) as ended:
        demo.entry_point([])
    assert ended.value.code == USAGE_ERROR
    assert ("HOROVOD_RANK" in capsys.readouterr().err) == (rank == 0)
