"""slipstream-doctor in new processes: in this environment, and with parts missing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import slipstream_tf
from slipstream_tf.cli import doctor
from slipstream_tf.cli.checks import BROKEN, MISSING, OK
from slipstream_tf.ops import _loader

NAMES = [
    *("packages", "TensorFlow", "Keras", "op library", "Horovod", "SOK", "matplotlib", "GPUs"),
]
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
HOME = Path(slipstream_tf.__file__).resolve().parents[1]
# Importing TensorFlow may take a minute on a busy machine, which must not count as a finding.
PATIENT = "--time_limit=300"
Report = dict[str, dict[str, Any]]


def run_doctor(
    *flags: str, path: list[str] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the program with the given `sys.path` and additional environment variables."""
    path = sys.path if path is None else path
    code = (
        f"import sys; sys.path[:] = {path!r}; "
        "from slipstream_tf.cli.doctor import entry_point; entry_point()"
    )
    kept = {name: value for name, value in os.environ.items() if name != _loader.OVERRIDE}
    return subprocess.run(
        [sys.executable, "-c", code, *flags],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def report_of(result: subprocess.CompletedProcess[str]) -> Report:
    """Returns name -> finding, from the JSON output."""
    report = json.loads(result.stdout)
    assert report["schema"] == doctor.SCHEMA
    assert report["works"] is (result.returncode == 0)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert list(found) == NAMES
    return found


def path_without(folder: Path, *hidden: str) -> list[str]:
    """Returns a `sys.path` without some packages and their metadata.

    Packages are hidden if their lower-case name starts with one of `hidden`.
    """
    path, packages = [], []
    for entry in sys.path:
        (packages if Path(entry).name in PACKAGE_FOLDERS else path).append(entry)
    for source in packages:
        for item in Path(source).iterdir():
            link = folder / item.name
            if not item.name.lower().startswith(hidden) and not link.exists():
                link.symlink_to(item)
    home = [str(HOME)] if HOME.name not in PACKAGE_FOLDERS else []
    return [*home, *path, str(folder)]


@pytest.fixture(scope="module", name="here")
def fixture_here() -> Report:
    """Returns the report on this environment, in which training works."""
    result = run_doctor("--json", PATIENT)
    assert result.returncode == 0, result.stdout + result.stderr
    return report_of(result)


def test_required_parts_work(here: Report) -> None:
    needed = ("packages", "TensorFlow", "Keras", "op library")
    assert {finding["is_needed"] for name, finding in here.items() if name in needed} == {True}
    assert {here[name]["state"] for name in needed} == {OK}
    assert here["TensorFlow"]["detail"].startswith(tf.__version__)
    built = _loader.build_info()
    library = f"TensorFlow {built.tensorflow}, {'with' if built.cuda else 'without'} CUDA kernels"
    assert library in here["op library"]["detail"]


def test_optional_parts_are_reported_as_installed(here: Report) -> None:
    for name, module in (("Horovod", "horovod"), ("SOK", "sparse_operation_kit")):
        is_present = importlib.util.find_spec(module) is not None
        assert (here[name]["state"] == MISSING) is not is_present
        assert not here[name]["is_needed"]
    assert here["Horovod"]["state"] != OK or "Gloo" in here["Horovod"]["detail"]
    assert here["GPUs"]["detail"].startswith("none") is not bool(
        tf.config.list_physical_devices("GPU")
    )
    for finding in here.values():
        assert finding["state"] != BROKEN or finding["fix"]


@pytest.mark.slow
def test_doctor_passes_other_parts_without_horovod(tmp_path: Path) -> None:
    result = run_doctor(PATIENT, path=path_without(tmp_path, "horovod"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^  missing   Horovod +not installed", result.stdout, re.MULTILINE)
    assert re.search(r"-> make horovod, or python build_support/install_horovod\.py", result.stdout)
    assert result.stdout.endswith("\nTraining in a single process works.\n")
    assert result.stderr == ""


def test_doctor_reports_wrong_op_library_and_crashing_horovod(tmp_path: Path) -> None:
    built = _loader.build_info()
    major, minor, patch = built.tensorflow.split(".")
    other = f"{major}.{int(minor) - 1:0{len(minor)}}.{patch}"
    content = Path(built.path).read_bytes()
    old, new = (f"slipstream-build:tf={v};".encode() for v in (built.tensorflow, other))
    assert content.count(old) == 1
    library = tmp_path / "other.so"
    library.write_bytes(content.replace(old, new))
    package = tmp_path / "path" / "horovod"
    package.mkdir(parents=True)
    crash = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    (package / "__init__.py").write_text(crash)
    result = run_doctor(
        "--json",
        PATIENT,
        path=[str(package.parent), *sys.path],
        SLIPSTREAM_OPS_LIBRARY=str(library),
    )
    assert result.returncode == 1
    report = report_of(result)
    found = report["op library"]
    assert found["state"] == BROKEN and found["fix"] == "unset SLIPSTREAM_OPS_LIBRARY"
    assert f"built for TensorFlow {other}" in found["detail"]
    assert report["Keras"]["state"] == OK
    horovod = report["Horovod"]
    assert horovod["state"] == BROKEN and "make horovod" in horovod["fix"]
    assert "crashed with SIGSEGV" in horovod["detail"]
    (line,) = result.stderr.splitlines()
    assert "op library" in line and "Horovod" not in line


def test_report_is_complete_without_tensorflow(tmp_path: Path) -> None:
    result = run_doctor(path=path_without(tmp_path, "tensorflow", "tf_nightly"))
    assert result.returncode == 1
    text = result.stdout
    assert re.search(r"^  missing   TensorFlow +not installed$", text, re.MULTILINE)
    assert "'tensorflow-cpu==2.21.*'" in text
    for name in NAMES[2:]:
        assert re.search(f"^  unchecked {name} +requires TensorFlow", text, re.MULTILINE)
    assert "Repair the first part first" in result.stderr
    assert "Traceback" not in text + result.stderr


@pytest.mark.slow
def test_wrong_backend_is_reported_for_keras_only() -> None:
    result = run_doctor("--json", PATIENT, KERAS_BACKEND="no_such_backend")
    assert result.returncode == 1
    report = report_of(result)
    keras = report["Keras"]
    assert keras["state"] == BROKEN and keras["fix"] == "export KERAS_BACKEND=tensorflow"
    assert report["TensorFlow"]["state"] == report["op library"]["state"] == OK
    assert report["Horovod"]["state"] in (OK, MISSING)


def test_hanging_tensorflow_import_times_out(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("import time\ntime.sleep(300)\n")
    result = run_doctor("--json", "--time_limit=5", path=[str(tmp_path), *sys.path])
    assert result.returncode == 1
    found = report_of(result)["TensorFlow"]
    assert found["state"] == BROKEN
    assert "did not finish within 5 seconds" in found["detail"]
