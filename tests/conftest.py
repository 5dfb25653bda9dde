"""How pytest-xdist shares the tests among its processes (`make test` has two).

A file's tests stay together, and so do all that start ranks: these must reach their collectives
soon after each other, so that one job runs at a time.
"""

from __future__ import annotations

from typing import Any

import pytest

# What starts ranks, or measures time.
JOBS = ("tests/parallel/", "tests/integration/test_benchmarks.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives the scheduler; called by pytest-xdist where it is in use."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "jobs" if nodeid.startswith(JOBS) else nodeid.partition("::")[0]

    return Scheduler(config, log)
