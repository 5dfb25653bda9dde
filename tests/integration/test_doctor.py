"""slipstream-doctor in processes of its own: as it is here, and where something is missing."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import slipstream_tf
from slipstream_tf.cli import doctor
from slipstream_tf.cli.findings import BROKEN, MISSING, OK, Finding, Section
from slipstream_tf.cli.program import run_program
from slipstream_tf.ops import _loader

SECTIONS = [
    "python",
    "tensorflow",
    "keras",
    "op_library",
    "self_tests",
    "horovod",
    "sok",
    "cuda",
    "compiler",
]
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
HOME = Path(slipstream_tf.__file__).resolve().parents[1]
# A busy machine is no finding: TensorFlow alone may take a minute to import there.
PATIENT = "--time_limit=300"
Report = dict[str, dict[str, dict[str, Any]]]


def run_doctor(
    *flags: str, path: list[str] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the program with another `sys.path` and with variables beside those of this process."""
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
    """Section -> name -> finding, from the JSON form."""
    report = json.loads(result.stdout)
    assert report["schema"] == doctor.SCHEMA and list(report["sections"]) == SECTIONS
    assert report["works"] is (result.returncode == 0)
    return {
        key: {finding["name"]: finding for finding in found}
        for key, found in report["sections"].items()
    }


def path_without(folder: Path, *hidden: str) -> list[str]:
    """A `sys.path` on which packages and their metadata whose names start like these are not."""
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
    """The report on this environment, in which training works."""
    result = run_doctor("--json", PATIENT)
    assert result.returncode == 0, result.stdout + result.stderr
    return report_of(result)


def test_all_that_is_needed_is_found_here(here: Report) -> None:
    for section in ("python", "tensorflow", "keras", "self_tests"):
        assert {finding["state"] for finding in here[section].values()} == {OK}
    has_sok = importlib.util.find_spec("sparse_operation_kit") is not None
    stores = {**doctor.SELF_TESTS, **(doctor.SOK_SELF_TEST if has_sok else {})}
    assert set(here["self_tests"]) == set(stores)
    assert here["tensorflow"]["TensorFlow"]["facts"]["version"] == tf.__version__
    built = _loader.build_info()
    stamp = here["op_library"]["build stamp"]
    assert stamp["state"] == OK
    assert stamp["facts"] == dataclasses.asdict(built)
    assert built.cxx11_abi is bool(tf.sysconfig.CXX11_ABI_FLAG)
    assert f"C++11 ABI {int(built.cxx11_abi)}" in stamp["detail"]
    kernels = here["op_library"]["kernels"]["facts"]["kernels"]
    assert "SlipstreamApplyGradients" in kernels["CPU"] and len(kernels["CPU"]) > 10
    assert ("GPU" in kernels) is built.cuda
    assert here["cuda"]["CUDA build"]["facts"]["cuda"] == (
        tf.sysconfig.get_build_info().get("cuda_version")
    )


def test_self_tests_are_short(here: Report) -> None:
    for finding in here["self_tests"].values():
        assert 0 < finding["facts"]["seconds"] < 5


def test_options_are_told_as_they_are_here(here: Report) -> None:
    has_horovod = importlib.util.find_spec("horovod") is not None
    horovod = here["horovod"]["Horovod"]
    assert horovod["state"] == (OK if has_horovod else MISSING)
    assert not has_horovod or horovod["facts"]["gloo"]
    has_mpirun = shutil.which("mpirun") is not None
    assert here["horovod"]["mpirun"]["state"] == (OK if has_mpirun else MISSING)
    assert len(here["cuda"]["GPUs"]["facts"]["tensorflow"]) == len(
        tf.config.list_physical_devices("GPU")
    )
    for section in ("horovod", "sok", "cuda", "compiler"):
        assert not any(finding["is_needed"] for finding in here[section].values())
    for section in here.values():
        for finding in section.values():
            assert finding["state"] != BROKEN or finding["fix"]


@pytest.mark.slow
def test_without_horovod_everything_else_works(tmp_path: Path) -> None:
    result = run_doctor(PATIENT, path=path_without(tmp_path, "horovod"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^  missing   Horovod +not installed", result.stdout, re.MULTILINE)
    assert re.search(r"-> make horovod, or python build_support/install_horovod\.py", result.stdout)
    assert "All that training in one process needs works. Optional" in result.stdout
    # Paths are not broken, however long.
    assert all(len(line) <= 100 for line in result.stdout.splitlines() if "/" not in line)
    assert result.stderr == ""


def test_a_library_for_another_tensorflow_and_a_horovod_that_crashes(tmp_path: Path) -> None:
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
    assert f"TensorFlow {other}" in report["op_library"]["build stamp"]["detail"]
    loading = report["op_library"]["loading"]
    assert loading["state"] == BROKEN and loading["fix"] == "unset SLIPSTREAM_OPS_LIBRARY"
    assert f"built for TensorFlow {other}" in loading["detail"]
    assert {finding["state"] for finding in report["self_tests"].values()} == {"unchecked"}
    assert report["keras"]["Keras"]["state"] == OK
    horovod = report["horovod"]["Horovod"]
    assert horovod["state"] == BROKEN and "make horovod" in horovod["fix"]
    assert "crashed with SIGSEGV during 'import horovod'" in horovod["detail"]
    (line,) = result.stderr.splitlines()
    assert "loading" in line and "Horovod" not in line


def test_without_tensorflow_the_report_is_whole(tmp_path: Path) -> None:
    path = path_without(tmp_path, "tensorflow", "tf_nightly")
    missing = str(tmp_path / "nowhere.so")
    result = run_doctor(path=path, SLIPSTREAM_OPS_LIBRARY=missing)
    assert result.returncode == 1
    text = result.stdout
    assert re.search(r"^  missing   TensorFlow +not installed$", text, re.MULTILINE)
    assert "-> pip install 'tensorflow-cpu==2.21.*'" in text
    assert re.search(r"^  unchecked Keras +needs TensorFlow", text, re.MULTILINE)
    assert re.search(r"^  broken    build stamp +slipstream_tf's op library cannot", text, re.M)
    assert "-> unset SLIPSTREAM_OPS_LIBRARY" in text
    for title in ("Python", "Self-tests", "Horovod", "SOK", "CUDA", "Compiler"):
        assert f"\n\n{title}\n" in text
    assert "Mend these first" in text
    assert "Traceback" not in text + result.stderr


@pytest.mark.slow
def test_a_wrong_backend_is_a_finding_of_keras_alone() -> None:
    result = run_doctor("--json", PATIENT, KERAS_BACKEND="no_such_backend")
    assert result.returncode == 1
    report = report_of(result)
    keras = report["keras"]["Keras"]
    assert keras["state"] == BROKEN and keras["fix"] == "export KERAS_BACKEND=tensorflow"
    assert report["tensorflow"]["TensorFlow"]["state"] == OK
    assert {finding["state"] for finding in report["self_tests"].values()} == {OK}
    assert report["horovod"]["Horovod"]["state"] in (OK, MISSING)


def test_a_tensorflow_that_hangs_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("import time\ntime.sleep(300)\n")
    result = run_doctor("--json", "--time_limit=5", path=[str(tmp_path), *sys.path])
    assert result.returncode == 1
    found = report_of(result)["tensorflow"]["TensorFlow"]
    assert found["state"] == BROKEN
    assert "no answer within 5 seconds" in found["detail"]


@pytest.mark.parametrize(
    ("is_needed", "state", "code"), [(True, BROKEN, 1), (False, BROKEN, 0), (True, OK, 0)]
)
def test_exit_code(
    is_needed: bool,
    state: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finding = Finding("thing", state, "a detail", "a command", is_needed, {"version": "1"})

    def examine(limit: float) -> Iterator[Section]:
        assert limit == 60
        yield Section("part", "Part", (finding,))

    monkeypatch.setattr(doctor, "examine", examine)
    flags = doctor.make_flags()
    assert run_program(flags, doctor.main, []) == code
    text, errors = capsys.readouterr()
    assert "\nPart\n" in text and "thing" in text and "-> a command" in text
    assert ("does not work here: thing" in errors) is bool(code)
    assert run_program(flags, doctor.main, ["--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is (code == 0)
    (found,) = report["sections"]["part"]
    assert found["fix"] == "a command" and found["facts"] == {"version": "1"}


@pytest.mark.parametrize("flag", ["--jsn", "--time_limit=0"])
def test_a_bad_flag_is_a_usage_error(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(doctor.make_flags(), doctor.main, [flag]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
