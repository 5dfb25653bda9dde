"""cli.findings: from what the probes told to states and the commands that mend."""

from __future__ import annotations

import pytest

from slipstream_tf.cli import findings
from slipstream_tf.cli.probe import Outcome
from slipstream_tf.ops._loader import BuildInfo

HOROVOD = {
    "version": "0.28.1",
    "gloo": True,
    "mpi": False,
    "nccl": False,
    "tensorflow": "2.21.0",
    "built_for": "2.21.0",
    "is_built_for_this": True,
}


def test_python():
    assert findings.check_python("3.11.7", True).state == "ok"
    old = findings.check_python("3.9.1", False)
    assert old.state == "broken" and "3.10" in old.detail and "venv" in old.fix


def test_packages():
    found = findings.check_packages(Outcome({"numpy": "2.0", "tqdm": "4.1"}))
    assert (found.state, found.detail) == ("ok", "numpy 2.0, tqdm 4.1")
    crashed = findings.check_packages(Outcome({"numpy": "2.0"}, "crashed during 'import pyarrow'"))
    assert crashed.state == "broken" and "pyarrow" in crashed.detail and crashed.is_needed
    absent = findings.check_packages(Outcome({}, "No module named 'tqdm'", "tqdm"))
    assert absent.state == "missing" and absent.fix.startswith("pip install .")


def test_tensorflow():
    found = findings.check_tensorflow(Outcome({"version": "2.21.0"}), ["tensorflow-cpu"])
    assert (found.state, found.detail, found.fix) == ("ok", "2.21.0 (tensorflow-cpu)", "")
    later = Outcome({"version": "2.30.0", "is_tested": False})
    assert "tested with 2.16 to 2.21" in findings.check_tensorflow(later, []).detail
    gpu_crash = Outcome({"version": "2.21.0"}, "crashed with SIGSEGV during 'listing GPUs'")
    assert findings.check_tensorflow(gpu_crash, []).state == "ok"
    gpus = findings.check_gpus(gpu_crash, [])
    assert gpus.state == "unchecked" and "SIGSEGV" in gpus.detail
    absent = Outcome({}, "No module named 'tensorflow'", "tensorflow")
    missing = findings.check_tensorflow(absent, [])
    assert missing.state == "missing" and "pip install 'tensorflow-cpu" in missing.fix
    crashed = findings.check_tensorflow(Outcome({}, "crashed with SIGILL"), ["tensorflow"])
    assert crashed.state == "broken" and "--force-reinstall" in crashed.fix and crashed.is_needed


def test_keras():
    found = findings.check_keras(Outcome({"version": "3.15.1", "backend": "tensorflow"}), "jax")
    assert (found.state, found.detail) == ("ok", "3.15.1 on tensorflow")
    old = findings.check_keras(Outcome({}, "found keras 2.15"), "tensorflow")
    assert old.state == "broken" and "keras>=3" in old.fix
    other = findings.check_keras(Outcome({}, "No module named 'jax'", "jax"), "jax")
    assert other.state == "broken" and other.fix == "export KERAS_BACKEND=tensorflow"


def test_op_library():
    info = BuildInfo("x.so", "2.21.0", cuda=False, cxx11_abi=True)
    found = findings.check_stamp(info, "", None)
    assert (found.state, found.detail) == (
        "ok",
        "built for TensorFlow 2.21.0, C++11 ABI 1, without CUDA kernels",
    )
    assert found.facts == {
        "path": "x.so", "tensorflow": "2.21.0", "cuda": False, "cxx11_abi": True,
    }  # fmt: skip
    assert "SLIPSTREAM_OPS_LIBRARY" in findings.check_stamp(info, "", "x.so").detail
    absent = findings.check_stamp(None, "cannot be read", None)
    assert absent.state == "broken" and absent.fix.startswith("pip install .")
    assert findings.check_stamp(None, "", "x.so").fix == "unset SLIPSTREAM_OPS_LIBRARY"
    facts = {"kernels": {"CPU": ["A", "B"], "GPU": ["A", "C"]}, "tensorflow": "2.21.0"}
    loaded = findings.check_loading(Outcome(facts), None, True)
    assert (loaded.state, loaded.detail) == ("ok", "3 ops with TensorFlow 2.21.0")
    failed = Outcome({}, "built for another")
    assert "--force-reinstall" in findings.check_loading(failed, None, True).fix
    assert findings.check_loading(failed, None, False).fix.startswith("apt-get install g++")
    assert findings.check_loading(failed, "x.so", True).fix.startswith("unset")


def test_kernels_are_missed_only_where_there_is_a_gpu():
    on_cpu = {"CPU": ["A", "B"]}
    both = findings.check_kernels(True, {**on_cpu, "GPU": ["A"]}, ["H"])
    assert (both.state, both.detail) == ("ok", "2 ops on CPU, 1 ops on GPU")
    assert both.facts["kernels"]["GPU"] == ["A"]
    missing = findings.check_kernels(False, on_cpu, ["H"])
    assert missing.state == "missing" and "SLIPSTREAM_WITH_CUDA=1" in missing.fix
    assert missing.detail == "2 ops on CPU; none on GPU; there is a GPU"
    none = findings.check_kernels(False, None, [])
    assert (none.state, none.fix) == ("ok", "") and none.detail.startswith("none on GPU")


def test_a_package_that_one_program_needs():
    assert findings.check_tool("matplotlib", "3.9", "only the report needs it", "x").state == "ok"
    absent = findings.check_tool("matplotlib", None, "only the report needs it", "get it")
    assert (absent.state, absent.fix, absent.is_needed) == ("missing", "get it", False)
    assert absent.detail == "only the report needs it"


def test_horovod():
    found = findings.check_horovod(Outcome(HOROVOD))
    assert found.state == "ok" and not found.is_needed
    assert found.detail == "0.28.1, built for TensorFlow 2.21.0; controllers: Gloo; without NCCL"
    both = findings.check_horovod(Outcome({**HOROVOD, "mpi": True, "built_for": None}))
    assert both.detail.endswith("controllers: Gloo, MPI; without NCCL")
    on_gpus = findings.check_horovod(Outcome({**HOROVOD, "nccl": True}))
    assert on_gpus.detail.endswith("; with NCCL")
    none = findings.check_horovod(Outcome({**HOROVOD, "gloo": False}))
    assert none.state == "broken"
    facts = {**HOROVOD, "built_for": "2.20.0", "is_built_for_this": False}
    other = findings.check_horovod(Outcome(facts))
    assert other.state == "broken" and "2.20.0, but 2.21.0 is installed" in other.detail
    crashed = findings.check_horovod(Outcome({"version": "0.28.1"}, "undefined symbol"))
    assert crashed.state == "broken" and "0.28.1, does not work: undefined" in crashed.detail
    part = findings.check_horovod(Outcome({}, "No module named 'yaml'", "yaml"))
    assert part.state == "broken"
    absent = findings.check_horovod(Outcome({}, "-", "horovod"))
    assert absent.state == "missing"
    for finding in (none, other, crashed, part, absent):
        assert "make horovod" in finding.fix and "install_horovod.py" in finding.fix


def test_launchers():
    assert findings.check_horovodrun("/bin/horovodrun", None).state == "ok"
    beside = findings.check_horovodrun(None, "/venv/bin")
    assert beside.state == "missing" and beside.fix == 'export PATH="/venv/bin:$PATH"'
    assert "make horovod" in findings.check_horovodrun(None, None).fix
    assert findings.check_tool("mpirun", "4.1", "", "").state == "ok"
    assert findings.check_tool("mpirun", None, "gone", "get it").fix == "get it"


def test_sok_needs_a_gpu():
    absent = Outcome({}, "-", "sparse_operation_kit")
    assert findings.check_sok(absent, []).fix == ""
    assert "needs a GPU" in findings.check_sok(absent, []).detail
    assert findings.check_sok(absent, ["H"]).fix.startswith("pip install merlin-sok")
    assert findings.check_sok(Outcome({}, "libcudart"), []).state == "broken"
    assert findings.check_sok(Outcome({"version": "2.0", "limit": ""}), ["H"]).detail == "2.0"
    limited = Outcome({"version": "2.0", "limit": "Python 3.12 took it out"})
    assert findings.check_sok(limited, ["H"]).detail == "2.0; Python 3.12 took it out"


def test_sok_tables_are_optional():
    fine = findings.check_sok_self_test("SOK store", Outcome({"seconds": 0.5}), ["H"])
    assert (fine.state, fine.is_needed) == ("ok", False)
    broken = findings.check_sok_self_test("SOK store", Outcome({}, "no HKV"), ["H"])
    assert broken.state == "broken" and broken.fix.startswith("pip install merlin-sok")
    without_gpu = findings.check_sok_self_test("SOK store", Outcome({}, "no HKV"), [])
    assert without_gpu.fix == "" and "no GPU" in without_gpu.detail


def test_the_cuda_of_tensorflow():
    with_cuda = Outcome({"version": "2.21.0", "cuda": "12.5"})
    assert findings.check_tensorflow_cuda(with_cuda, True).detail.endswith("with CUDA 12.5")
    without = Outcome({"version": "2.21.0", "cuda": None})
    assert findings.check_tensorflow_cuda(without, False).fix == ""
    assert "and-cuda" in findings.check_tensorflow_cuda(without, True).fix
    assert findings.check_tensorflow_cuda(Outcome({}, "crashed"), False).state == "unchecked"


def test_gpus():
    assert findings.check_gpus(Outcome({"gpus": ["H", "H"]}), []).detail == "2: H, H"
    unseen = findings.check_gpus(Outcome({"gpus": []}), ["GPU 0: H"])
    assert unseen.state == "missing" and "tensorflow[and-cuda]" in unseen.fix
    none = findings.check_gpus(Outcome({"gpus": []}), [])
    assert none.state == "missing" and none.fix == ""
    assert "TensorFlow" in findings.check_gpus(Outcome({}, "crashed"), []).detail


@pytest.mark.parametrize("state", [findings.MISSING, findings.BROKEN, findings.UNCHECKED])
def test_only_what_is_needed_counts(state: str):
    needed = findings.Finding("a", state, "", is_needed=True)
    option = findings.Finding("b", state, "")
    fine = findings.Finding("c", findings.OK, "", is_needed=True)
    sections = [findings.Section("x", "X", (option, fine)), findings.Section("y", "Y", (needed,))]
    assert findings.needed_but_not_ok(sections) == ["a"]
    assert findings.needed_but_not_ok(sections[:1]) == []
