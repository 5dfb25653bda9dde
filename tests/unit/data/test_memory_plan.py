"""Tests of `slipstream-plan`: required memory, feasible plans and printed settings."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

import slipstream_tf as slip
from slipstream_tf.cli import plan, prepare
from slipstream_tf.cli.program import run_program
from slipstream_tf.data.memory_plan import FieldUse, plan_hkv, plan_memory, read_uses
from slipstream_tf.data.statistics import COUNTS
from slipstream_tf.tables.sok import hkv

FEW = FieldUse("few", 4, 100, np.array([70, 20, 9, 1]))
MANY = FieldUse("many", 1000, 600, np.array([200, 100] + [1] * 100))


def test_served_fraction_counts_most_used_keys():
    assert [FEW.served(n) for n in (0, 1, 2, 4, 9)] == [0.0, 0.7, 0.9, 1.0, 1.0]
    # The lookups of uncounted keys are spread evenly over these keys.
    left = 600 - 400
    assert MANY.served(102) == pytest.approx(400 / 600)
    assert MANY.served(102 + 449) == pytest.approx((400 + left / 2) / 600)


@pytest.mark.parametrize(
    ("memory", "dtypes"),
    [
        (1004 * (128 + 24), ("float32", "float32")),
        (1004 * (128 + 24) - 1, ("bfloat16", "float32")),
        (1004 * (64 + 24), ("bfloat16", "bfloat16")),
    ],
)
def test_row_dtype_is_widest_that_fits(memory, dtypes):
    found = plan_memory([FEW, MANY], 16, 16, memory, None)
    for table in found.tables:
        assert (table.storage.dtype, table.storage.slot_dtype) == dtypes
        assert table.served == 1.0
    assert found.ranks == 1
    assert found.memory_bytes <= memory


def test_hkv_tables_fit_and_divide_gpu_memory():
    many = FieldUse("many", 12_500_000, 600, np.array([200]))
    found = plan_hkv([FEW, many], 64, 1, "12GB")
    assert found["few"] == {"init_capacity": 8, "max_capacity": 8, "max_hbm_for_vectors": 1}
    # Each key takes 17 bytes in the row table and in the slot table. About 5 GiB per table remain
    # for vectors, which are assigned in whole GiB.
    assert found["many"]["max_capacity"] == 1 << 25
    assert 2 <= found["many"]["max_hbm_for_vectors"] <= 4
    taken = [hkv.memory(settings, 64, 1).gpu for settings in found.values()]
    assert sum(taken) <= 12e9
    with pytest.raises(ValueError, match=r"`gpu_memory`: '1GB'.*all keys must be in GPU memory"):
        plan_hkv([FEW, many], 64, 1, "1GB")


def test_rows_beyond_memory_are_spilled(tmp_path):
    memory = 1004 * 24 + 100 * 90
    found = plan_memory([FEW, MANY], 16, 16, memory, str(tmp_path))
    few, many = found.tables
    # The most frequent keys of all tables are in memory, including all four keys of `few`.
    assert few.rows_in_memory == 4
    assert few.storage.spill is None
    assert 50 < many.rows_in_memory < 102
    assert many.storage.spill == str(tmp_path)
    assert many.storage.memory == many.rows_in_memory * many.row_bytes
    assert found.memory_bytes <= memory
    assert found.served == pytest.approx((100 + 600 * many.served) / 700)
    assert found.disk_bytes > 0
    assert found.ranks == 3
    without = plan_memory([FEW, MANY], 16, 16, memory, None)
    assert without.ranks == 3
    assert without.tables[1].storage.spill is None


def test_memory_smaller_than_index_raises(tmp_path):
    with pytest.raises(ValueError, match=r"`memory`: 24199 .*at least 24,200 bytes.*index"):
        plan_memory([FEW, MANY], 16, 16, 24_199, str(tmp_path))
    plan_memory([FEW, MANY], 16, 16, 24_200, str(tmp_path))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    generator = np.random.default_rng(0)
    lines = ["clicked,user,ad"]
    for _ in range(4000):
        user, ad = generator.zipf(1.3) % 5000, generator.integers(0, 300)
        lines.append(f"{generator.integers(0, 2)},u{user},a{ad}")
    (folder / "clicks.csv").write_text("\n".join(lines), encoding="utf-8")
    schema = {"label": "clicked", "keys": ["user", "ad"]}
    (folder / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    output = str(folder / "data")
    arguments = [str(folder / "clicks.csv"), f"--schema={folder}/schema.json"]
    assert run_program(prepare.make_flags(), prepare.main, [*arguments, f"--output={output}"]) == 0
    return output


def test_statistics_are_read(prepared):
    counts = pq.read_table(f"{prepared}/{COUNTS}")
    for use in read_uses(prepared):
        assert use.lookups == use.counts.sum()
        assert use.rows == use.counts.size
        assert (np.diff(use.counts) <= 0).all()
    assert sum(use.rows for use in read_uses(prepared)) == len(counts)


def test_program_prints_valid_tables(prepared, tmp_path, capsys):
    # Memory for the index and one hundred rows.
    memory = sum(use.rows for use in read_uses(prepared)) * 24 + 100 * 60
    arguments = [f"--data={prepared}", f"--memory={memory}", f"--spill={tmp_path}", "--dim=8"]
    assert run_program(plan.make_flags(), plan.main, arguments) == 0
    text = capsys.readouterr().out
    code = text[text.index("tables = [") :]
    scope = {"slip": slip}
    exec(code, scope)
    layer = slip.keras.EmbeddingCollection(scope["tables"], slip.optimizers.Adagrad(0.1))
    assert [table.name for table in layer.tables] == ["user", "ad"]
    assert any(table.storage.spill for table in layer.tables)
    assert run_program(plan.make_flags(), plan.main, [*arguments, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["memory_bytes"] <= memory
    assert 0 < reported["served"] < 1
    assert reported["step"]["misses"] > 0
    in_memory = plan_memory(read_uses(prepared), 8, 8, memory, None)
    advice = "exceed --memory. Pass --spill"
    assert advice in plan.text_of(in_memory, reported["step"], 8) and advice not in text


def test_program_names_missing_flag_or_data(prepared, tmp_path, capsys):
    assert run_program(plan.make_flags(), plan.main, [f"--data={prepared}"]) == 2
    assert "--memory" in capsys.readouterr().err
    arguments = [f"--data={tmp_path}", "--memory=1GB"]
    assert run_program(plan.make_flags(), plan.main, arguments) == 2
    assert "Run slipstream-prepare first" in capsys.readouterr().err
