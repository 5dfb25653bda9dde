"""Tests of `memory`: the kernel's reports, and budgets that exceed them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from absl import logging

import slipstream_tf as slip
from slipstream_tf._utils import memory
from slipstream_tf.data.preparation import Options
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.ops.classifier import InputClassifier
from slipstream_tf.tables.native import NativeStore

GIB = 1 << 30


def kernel(root: Path, cgroup: str = "", **files: object) -> Path:
    """Fakes a machine with 8 GiB of memory and 1 GiB swap.

    3 GiB are free in total.
    """
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    kib = {"MemTotal": 8 << 20, "MemFree": 1 << 20, "MemAvailable": 2 << 20}
    kib |= {"SwapTotal": 1 << 20, "SwapFree": 1 << 20}
    (proc / "meminfo").write_text("".join(f"{n}:  {v} kB\n" for n, v in kib.items()))
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return root


def test_machine_without_limits_has_physical_memory(tmp_path: Path) -> None:
    assert memory.read(kernel(tmp_path)) == memory.Memory(9 * GIB, 3 * GIB, "the machine")


def test_cgroup_v2_limits_of_parents_apply(tmp_path: Path) -> None:
    root = kernel(
        tmp_path,
        "0::/job/step\n",
        job__step__memory_DOT_max="max",
        job__memory_DOT_max=4 * GIB,
        job__memory_DOT_current=int(3.5 * GIB),
        job__memory_DOT_stat=f"anon 1\ninactive_file {GIB}\n",
    )
    found = memory.read(root)
    assert found is not None and (found.total, found.available) == (5 * GIB, int(2.5 * GIB))
    assert found.owner.endswith("cgroup/job")


def test_cgroup_v1_limit_in_container_applies(tmp_path: Path) -> None:
    # The container sees only its mount, without the path of its group.
    root = kernel(
        tmp_path,
        "5:cpu:/docker/a\n4:memory:/docker/a\n",
        memory__memory_DOT_limit_in_bytes=2 * GIB,
        memory__memory_DOT_usage_in_bytes=GIB,
    )
    found = memory.read(root)
    assert found is not None and (found.total, found.available) == (3 * GIB, 2 * GIB)


def test_cgroup_without_limit_is_ignored(tmp_path: Path) -> None:
    root = kernel(tmp_path, "4:memory:/\n", memory__memory_DOT_limit_in_bytes=0x7FFFFFFFFFFFF000)
    assert memory.read(root) == memory.Memory(9 * GIB, 3 * GIB, "the machine")


def test_memory_is_unknown_on_other_systems(tmp_path: Path) -> None:
    assert memory.read(tmp_path) is None


@pytest.fixture(name="small")
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    there = memory.Memory(8 * GIB, 2 * GIB, "the machine")
    monkeypatch.setattr(memory, "read", lambda: there)


@pytest.mark.usefixtures("small")
def test_capacity_beyond_memory_error_shows_computation() -> None:
    table = slip.Table("user", dim=16, retention=slip.Retention(100000000, eviction="lru"))
    with pytest.raises(ValueError) as raised:
        NativeStore([table], slip.optimizers.Adagrad(0.1))
    for part in (
        "`capacity`: 100000000 for table 'user'",
        "(100000000 rows x (64 values + 64 slots + 20 index + 8 last use) bytes) is 14.5 GiB",
        "the machine has 8.0 GiB",
        "Expected at most 55063",
    ):
        assert part in str(raised.value)


@pytest.mark.usefixtures("small")
def test_capacities_that_exceed_memory_in_total_raise() -> None:
    tables = [slip.Table(name, dim=16, retention=slip.Retention(40000000)) for name in ("a", "b")]
    NativeStore(tables[:1], slip.optimizers.Adagrad(0.1))
    with pytest.raises(ValueError, match="80000000 for 2 tables together"):
        NativeStore(tables, slip.optimizers.Adagrad(0.1))


@pytest.mark.usefixtures("small")
def test_capacity_close_to_memory_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warned.append(text % values))
    NativeStore(
        [slip.Table("a", dim=16, retention=slip.Retention(1 << 20))], slip.optimizers.Adagrad(0.1)
    )
    NativeStore([slip.Table("a", dim=16)], slip.optimizers.Adagrad(0.1))
    assert not warned
    NativeStore(
        [slip.Table("a", dim=16, retention=slip.Retention(30000000))], slip.optimizers.Adagrad(0.1)
    )
    assert len(warned) == 1 and "the machine has 2.0 GiB available now" in warned[0]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("`memory`", {"hot_set": slip.HotSet(9 * GIB)}),
        ("`memory`", {"policies": slip.DeferGradients(memory="9GiB")}),
        ("`table_memory['user']`", {"hot_set": slip.HotSet(table_memory={"user": 9 * GIB})}),
    ],
)
def test_engine_budgets_beyond_memory_raise(name: str, settings: dict[str, Any]) -> None:
    layer = EmbeddingCollection([slip.Table("user", dim=4)], slip.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"is 9\.0 GiB, and the machine has 8\.0 GiB") as raised:
        slip.Slipstream(layer, **settings)
    assert name in str(raised.value)


@pytest.mark.usefixtures("small")
def test_pilot_and_replica_budgets_beyond_memory_raise() -> None:
    with pytest.raises(ValueError, match=r"`pilot_memory_bytes`.*the machine has 8.0 GiB"):
        InputClassifier(["user"], pilot="fm", pilot_memory_bytes=9 * GIB)
    comm = slip.distributed.init()
    tables = [slip.Table("user", dim=4)]
    with pytest.raises(ValueError, match=r"`cache_bytes`.*the machine has 8.0 GiB"):
        slip.distributed.ShardedStore(tables, slip.optimizers.SGD(0.1), comm, cache_bytes=9 * GIB)


@pytest.mark.usefixtures("small")
def test_count_budget_of_preparation_beyond_memory_raises() -> None:
    with pytest.raises(ValueError, match=r"`count_bytes`.*the machine has 8.0 GiB"):
        Options(count_bytes=9 * GIB)
