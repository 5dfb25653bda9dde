"""Tests of `agent`: the environment variables of launchers."""

from __future__ import annotations

import pytest

from slipstream_tf._utils import agent

PREFIXES = ("HOROVOD", "OMPI_COMM_WORLD", "PMI", "PMIX")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in PREFIXES:
        for name in ("RANK", "SIZE", "LOCAL_SIZE"):
            monkeypatch.delenv(f"{prefix}_{name}", raising=False)


def test_single_process_is_on_one_host() -> None:
    assert agent.rank() is None and agent.is_on_one_host()


@pytest.mark.parametrize("prefix", ["HOROVOD", "OMPI_COMM_WORLD"])
@pytest.mark.parametrize(("local", "size", "expected"), [("2", "2", True), ("2", "4", False)])
def test_ranks_on_one_host_are_detected(
    monkeypatch: pytest.MonkeyPatch, prefix: str, local: str, size: str, expected: bool
) -> None:
    monkeypatch.setenv(f"{prefix}_RANK", "1")
    assert agent.rank() == 1
    assert not agent.is_on_one_host()  # The world size is not set.
    monkeypatch.setenv(f"{prefix}_SIZE", size)
    monkeypatch.setenv(f"{prefix}_LOCAL_SIZE", local)
    assert agent.is_on_one_host() == expected


def test_elastic_launcher_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    assert not agent.is_elastic()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert agent.is_elastic()
