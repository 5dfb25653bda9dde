"""Runs the programs of this folder. Their docstrings describe the checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunSok = Callable[..., str]
BOTH: Any = pytest.mark.parametrize("ranks", [1, 2])
MOSTLY_TWO: Any = pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
# Cases of one launch, grouped because imports take most of the time.
LAYERS = {1: ["mask,adam"], 2: ["mask,adagrad", "mask,adam", "interval,adagrad", "movement,sgd"]}
MASKED = {
    1: ["v1,adagrad,all2all,graph", "legacy,adagrad,sparse,eager", "sok,sgd,all2all,estimated"],
    2: [
        "v1,adagrad,all2all,eager",
        "v1,adam,sparse,graph",
        "sok,sgd,all2all,eager",
        "legacy,adam,all2all,eager",
        "v1,sgd,all2all,static",
        "v1,adagrad,all2all,graph",
        "v1,sgd,all2all,estimated",
    ],
}
DEFERRED = {
    1: ["legacy,sgd,all2all,movement", "legacy,adagrad,all2all,movement"],
    2: [
        "v1,adagrad,all2all,defer",
        "v1,adagrad,all2all,movement",
        "v1,sgd,sparse,movement",
        "sok,sgd,all2all,movement",
    ],
}
WATCHED = {
    1: ["Adam,mask", "Adagrad,interval", "Momentum,interval", "sok.SGD,movement"],
    2: ["Adam,interval", "Adagrad,movement", "static,interval"],
}


def test_doctor_self_test_passes(run_sok: RunSok) -> None:
    run_sok("doctors_own.py", 1)


@MOSTLY_TWO
def test_documentation_blocks_run(run_sok: RunSok, ranks: int) -> None:
    run_sok("documented.py", ranks)


@pytest.mark.parametrize("is_keras_2", [False, True])
def test_documented_traps_exist(run_sok: RunSok, is_keras_2: bool) -> None:
    run_sok("traps.py", 1, is_keras_2=is_keras_2)


@BOTH
def test_sok_files_round_trip(run_sok: RunSok, ranks: int) -> None:
    run_sok("files.py", ranks, is_keras_2=True)


@BOTH
def test_sok_has_required_behavior(run_sok: RunSok, ranks: int) -> None:
    run_sok("itself.py", ranks, is_keras_2=True)


@pytest.mark.parametrize("ranks", LAYERS)
def test_layer_rows_equal_native_table_rows(run_sok: RunSok, ranks: int) -> None:
    run_sok("layer.py", ranks, *LAYERS[ranks])


@MOSTLY_TWO
def test_model_trains_on_sok_tables(run_sok: RunSok, ranks: int) -> None:
    run_sok("lifecycle.py", ranks)


@pytest.mark.parametrize("ranks", MASKED)
def test_masks_in_loop_equal_native_table_masks(run_sok: RunSok, ranks: int) -> None:
    run_sok("masking_loop.py", ranks, *MASKED[ranks], is_keras_2=True)


@pytest.mark.parametrize("ranks", DEFERRED)
def test_deferred_gradients_in_loop_equal_native_table(run_sok: RunSok, ranks: int) -> None:
    run_sok("masking_loop.py", ranks, *DEFERRED[ranks], is_keras_2=True)


def test_sok_traffic_is_counted(run_sok: RunSok) -> None:
    run_sok("traffic.py", 2)


@pytest.mark.parametrize("ranks", WATCHED)
def test_tracked_loop_resumes_from_checkpoint(run_sok: RunSok, ranks: int) -> None:
    run_sok("watched_tables.py", ranks, *WATCHED[ranks])


def test_tracked_loop_resumes_with_keras_2_optimizer(run_sok: RunSok) -> None:
    run_sok("watched_tables.py", 1, "legacy.Adam,mask", "legacy.Adagrad,movement", is_keras_2=True)


@MOSTLY_TWO
def test_store_tracks_sok_tables(run_sok: RunSok, ranks: int) -> None:
    run_sok("watching.py", ranks)
