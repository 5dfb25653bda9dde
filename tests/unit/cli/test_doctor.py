"""Tests of `cli.doctor` and `cli.checks`: child process failures, findings and exit codes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from slipstream_tf.cli import checks, doctor, self_test
from slipstream_tf.cli.checks import BROKEN, MISSING, OK, UNCHECKED
from slipstream_tf.cli.doctor import Check, Finding
from slipstream_tf.cli.program import run_program
from slipstream_tf.ops import _loader

LIMIT = 30.0


@pytest.fixture(name="run_lines")
def fixture_run_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that runs Python lines as a check."""

    def run(lines: str, limit: float = LIMIT, **settings: str) -> Finding:
        body = "".join(f"    {line}\n" for line in lines.splitlines())
        (tmp_path / "only_here.py").write_text(f"def check():\n{body}")
        return Check("part", "only_here:check", "a command", **settings).run(limit)

    monkeypatch.syspath_prepend(str(tmp_path))
    return run


def test_passing_check_has_no_fix(run_lines):
    found = run_lines("import sys\nsys.stdout.write('noise')\nreturn 'version 1'")
    assert found == Finding("part", OK, "version 1", "", is_needed=True)


def test_child_process_receives_environment_of_check(run_lines):
    found = run_lines("import os\nreturn os.environ['ONLY_THERE']", environment={"ONLY_THERE": "x"})
    assert found.detail == "x"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("import no_such_module.part", "No module named 'no_such_module'"),
        ("raise ImportError('two\\n  lines')", "ImportError: two lines"),
        ("raise SystemExit('left')", "SystemExit: left"),
        ("raise ValueError('x' * 2000)", "xxx"),
        ("import os; os._exit(0)", "ended with exit code 0"),
        (
            "import os, sys; sys.stderr.write('F1 the reason\\nI0000 a log line\\n'); os._exit(3)",
            "ended with exit code 3: F1 the reason",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
    ],
)
def test_failing_check_is_broken(run_lines, lines: str, error: str):
    found = run_lines(lines)
    assert (found.state, found.fix) == (BROKEN, "a command")
    assert error in found.detail and len(found.detail) <= 600


def test_part_without_its_module_is_missing(run_lines):
    lines = "import no_such_module"
    found = run_lines(lines, module="no_such_module", purpose="reports need it")
    assert found == Finding("part", MISSING, "not installed; only reports need it", "a command")
    assert run_lines(lines, module="another_module").state == BROKEN


def test_check_can_name_other_fix(run_lines):
    found = run_lines(
        "from slipstream_tf.cli.checks import Problem\nraise Problem('old', 'renew it', 'missing')"
    )
    assert found == Finding("part", MISSING, "old", "renew it", is_needed=True)


def test_hanging_child_is_killed_with_surviving_grandchild(run_lines):
    start = time.monotonic()
    found = run_lines(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])\ntime.sleep(60)",
        limit=1.5,
    )
    assert time.monotonic() - start < 15
    assert found.detail.startswith("did not finish within 1.5 seconds")


def test_packages_check_lists_dependencies():
    names = [part.split()[0] for part in checks.packages().split(", ")]
    assert names == ["absl-py", "numpy", "pyarrow", "tqdm"]


def test_wrong_keras_backend_names_environment_variable(monkeypatch):
    def refuse():
        raise ImportError("runs on jax")

    assert checks.keras() == f"{keras.__version__} on tensorflow"
    monkeypatch.setattr(checks._compat, "require_keras", refuse)
    with pytest.raises(ImportError):
        checks.keras()
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(checks.Problem, match="runs on jax") as caught:
        checks.keras()
    assert caught.value.fix == "export KERAS_BACKEND=tensorflow"


def test_fix_of_op_library_depends_on_environment(monkeypatch):
    def refuse():
        raise ImportError("built for another")

    monkeypatch.setattr(_loader, "library", refuse)
    monkeypatch.delenv(_loader.OVERRIDE, raising=False)
    fixes = []
    for compiler in ("python3", "no-such-compiler"):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(checks.Problem, match="built for another") as caught:
            checks.op_library()
        fixes.append(caught.value.fix)
    assert fixes[0].startswith(_loader.REBUILD)
    assert fixes[1] == f"apt-get install g++, then {fixes[0]}"
    monkeypatch.setenv(_loader.OVERRIDE, _loader.library_path())
    with pytest.raises(checks.Problem) as caught:
        checks.op_library()
    assert caught.value.fix == f"unset {_loader.OVERRIDE}"


@pytest.fixture(name="horovod")
def fixture_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Fakes a Horovod for TensorFlow 2.21.0 that was built only with Gloo."""
    hvd = SimpleNamespace(gloo_built=lambda: 1, mpi_built=lambda: 0, nccl_built=lambda: 0)
    package = SimpleNamespace(
        __version__="0.28.1", __file__=str(tmp_path / "__init__.py"), __path__=[], tensorflow=hvd
    )
    monkeypatch.setitem(checks.importlib.sys.modules, "horovod", package)
    monkeypatch.setitem(checks.importlib.sys.modules, "horovod.tensorflow", hvd)
    tensorflow = SimpleNamespace(__version__="2.21.0")
    monkeypatch.setitem(checks.importlib.sys.modules, "tensorflow", tensorflow)
    return hvd


def test_horovod_check_reports_state(horovod: SimpleNamespace, tmp_path: Path):
    start = "0.28.1, built for TensorFlow 2.21.0; controllers: "
    assert checks.horovod() == f"{start}Gloo; without NCCL"
    horovod.mpi_built = horovod.nccl_built = lambda: 1
    assert checks.horovod() == f"{start}Gloo, MPI; with NCCL"
    horovod.gloo_built = horovod.mpi_built = lambda: 0
    with pytest.raises(checks.Problem, match="controllers: none") as caught:
        checks.horovod()
    assert "make horovod" in caught.value.fix
    (tmp_path / "metadata.json").write_text('{"tensorflow": "2.20.0"}')
    with pytest.raises(
        checks.Problem, match=r"2\.20\.0, but TensorFlow 2\.21\.0 is installed"
    ) as caught:
        checks.horovod()
    assert "install_horovod.py" in caught.value.fix


def test_unusable_gpus_are_reported_as_missing():
    assert checks.gpus_in_order([], [], False) == "none; training uses the CPU"
    not_run = "none; training uses the CPU; the CUDA kernels of the op library were not run"
    assert checks.gpus_in_order([], [], True) == not_run
    assert checks.gpus_in_order(["H", "H"], ["GPU 0", "GPU 1"], True) == "2: H, H"
    with pytest.raises(checks.Problem, match="detects no GPU, but the driver lists 1") as unseen:
        checks.gpus_in_order([], ["GPU 0: H"], False)
    assert unseen.value.state == MISSING and "tensorflow[and-cuda]" in unseen.value.fix
    with pytest.raises(checks.Problem, match="1: H; the op library has no CUDA kernels") as unused:
        checks.gpus_in_order(["H"], ["GPU 0: H"], False)
    assert unused.value.state == MISSING and "SLIPSTREAM_WITH_CUDA=1" in unused.value.fix


def test_kernel_is_compared_with_the_cpu(monkeypatch):
    checks.run_kernel("CPU:0")
    row_drift = self_test.row_drift

    def wrong_on_second_device(current, snapshot):
        calls.append(None)
        drifts = row_drift(current, snapshot)
        return drifts + tf.one_hot(7, len(current)) if len(calls) == 2 else drifts

    calls = []
    monkeypatch.setattr(self_test, "row_drift", wrong_on_second_device)
    with pytest.raises(checks.Problem, match=r"CPU:0.* 1 of 1000 row drifts differ") as caught:
        checks.run_kernel("CPU:0")
    assert caught.value.fix.startswith("report a bug") and caught.value.state == BROKEN


def test_kernel_that_fails_or_runs_elsewhere_is_reported(monkeypatch):
    row_drift = self_test.row_drift

    def old_driver(*_):
        raise tf.errors.InternalError(None, None, "CUDA driver version is insufficient")

    monkeypatch.setattr(self_test, "row_drift", old_driver)
    with pytest.raises(checks.Problem, match=r"InternalError on CPU:0: .*driver v") as caught:
        checks.run_kernel("CPU:0")
    assert "update the NVIDIA driver" in caught.value.fix
    assert "SLIPSTREAM_WITH_CUDA=1" in caught.value.fix and caught.value.state == BROKEN

    def ignores_device(*rows):
        with tf.device("CPU:0"):
            return row_drift(*rows)

    # TensorFlow runs an op without a kernel for the device on the CPU.
    monkeypatch.setattr(self_test, "row_drift", ignores_device)
    with pytest.raises(checks.Problem, match="no kernel for GPU:0; the op ran on a CPU") as other:
        checks.run_kernel("GPU:0")
    assert other.value.fix.startswith("report a bug")


@pytest.mark.parametrize("names", [[], ["H", "H"]])
def test_kernel_runs_on_each_gpu(monkeypatch, names: list[str]):
    ran = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: names)
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda name: {"device_name": name}
    )
    monkeypatch.setattr(checks, "driver_gpus", lambda: names)
    monkeypatch.setattr(_loader, "build_info", lambda: SimpleNamespace(cuda=True))
    monkeypatch.setattr(checks, "run_kernel", ran.append)
    detail = checks.gpus()
    assert ran == [f"GPU:{number}" for number in range(len(names))]
    assert ("a kernel returned correct results on each" in detail) is bool(names)
    assert ("were not run" in detail) is not bool(names)


@pytest.mark.parametrize(
    ("is_needed", "state", "code"),
    [
        (True, BROKEN, 1),
        (True, MISSING, 1),
        (True, UNCHECKED, 1),
        (False, BROKEN, 0),
        (True, OK, 0),
    ],
)
def test_exit_code_follows_findings(
    is_needed: bool,
    state: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def examine(limit: float) -> Iterator[Finding]:
        assert limit == 60
        yield Finding("thing", state, "a detail", "a command", is_needed)

    monkeypatch.setattr(doctor, "examine", examine)
    flags = doctor.make_flags()
    assert run_program(flags, doctor.main, []) == code
    text, errors = capsys.readouterr()
    assert "thing" in text and "-> a command" in text
    assert ("does not work here: thing" in errors) is bool(code)
    assert ("Training in a single process works." in text) is not bool(code)
    assert run_program(flags, doctor.main, ["--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is (code == 0)
    (found,) = report["findings"]
    assert (found["name"], found["state"], found["fix"]) == ("thing", state, "a command")


@pytest.mark.parametrize("flag", ["--jsn", "--time_limit=0"])
def test_invalid_flag_is_usage_error(flag: str, capsys: pytest.CaptureFixture[str]):
    assert run_program(doctor.make_flags(), doctor.main, [flag]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
