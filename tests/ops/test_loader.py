"""The op library's build stamp, and the errors of `slipstream_tf.ops._loader`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
import tensorflow as tf

from slipstream_tf.ops import _loader


@pytest.fixture
def copied_library(tmp_path):
    """Returns a function that copies the library with a changed stamp.

    The new text replaces the old one and must have the same length.
    """

    def copy(old: bytes = b"", new: bytes = b"") -> str:
        path = tmp_path / "_slipstream_ops.so"
        shutil.copyfile(_loader.library_path(), path)
        if old:
            content = path.read_bytes()
            assert len(old) == len(new) and content.count(old) == 1
            path.write_bytes(content.replace(old, new))
        return str(path)

    return copy


def stamp_with(version: str) -> bytes:
    return b"slipstream-build:tf=" + version.encode() + b";"


def test_stamp_matches_installed_tensorflow():
    info = _loader.build_info()
    assert info.path == _loader.library_path()
    assert re.match(r"\d+\.\d+\.\d+", tf.__version__).group() == info.tensorflow
    assert isinstance(info.cuda, bool)
    assert info.cxx11_abi is bool(tf.sysconfig.CXX11_ABI_FLAG)


def test_different_abi_raises_import_error(copied_library):
    built = int(_loader.build_info().cxx11_abi)
    texts = [f"cxx11abi={abi};".encode() for abi in (built, 1 - built)]
    path = copied_library(*texts)
    with pytest.raises(ImportError, match=rf"_CXX11_ABI={1 - built}, but the .* with {built} "):
        _loader._load(path)


def test_library_is_loaded_once():
    results = []
    threads = [threading.Thread(target=lambda: results.append(_loader.library())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(result is results[0] for result in results)
    assert callable(results[0].slipstream_row_drift)


def test_different_minor_release_raises_import_error(copied_library):
    built = _loader.build_info().tensorflow
    major, minor, patch = built.split(".")
    other = f"{major}.{int(minor) - 1:0{len(minor)}}.{patch}"
    path = copied_library(stamp_with(built), stamp_with(other))
    assert _loader.build_info(path).tensorflow == other
    with pytest.raises(ImportError) as caught:
        _loader._load(path)
    message = str(caught.value)
    assert f"built for TensorFlow {other}" in message
    assert f"TensorFlow {tf.__version__} is installed" in message
    assert "pip install --force-reinstall --no-deps ." in message


def test_different_patch_release_is_accepted(copied_library):
    """Runs in a child, because a process cannot load ops twice."""
    built = _loader.build_info().tensorflow
    major, minor, patch = built.split(".")
    other = f"{major}.{minor}.{(int(patch[-1]) + 1) % 10}"
    path = copied_library(stamp_with(built), stamp_with(other))
    program = "from slipstream_tf.ops import _loader; _loader.library().slipstream_row_drift"
    environment = {**os.environ, _loader.OVERRIDE: path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    folder = os.path.dirname(os.path.dirname(os.path.dirname(_loader.__file__)))
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=folder, check=True)


def test_missing_library_raises(monkeypatch, tmp_path):
    monkeypatch.delenv(_loader.OVERRIDE, raising=False)
    monkeypatch.setattr(_loader, "_INSTALLED", str(tmp_path / "_slipstream_ops.so"))
    with pytest.raises(ImportError, match=r"No such file.*'pip install \.'"):
        _loader.build_info()
    with pytest.raises(ImportError, match=r"No such file.*'pip install \.'"):
        _loader._load(_loader.library_path())


def test_environment_variable_overrides_library_path(monkeypatch, tmp_path, copied_library):
    path = copied_library()
    monkeypatch.setenv(_loader.OVERRIDE, path)
    assert _loader.build_info().path == path
    monkeypatch.setenv(_loader.OVERRIDE, str(tmp_path / "nowhere.so"))
    with pytest.raises(ImportError, match=r"nowhere\.so .*SLIPSTREAM_OPS_LIBRARY has this path"):
        _loader.build_info()


@pytest.mark.parametrize("content", [b"", b"\x7fELF no stamp in here"])
def test_library_without_stamp_raises(tmp_path, content):
    path = tmp_path / "other.so"
    path.write_bytes(content)
    with pytest.raises(ImportError, match=r"no build stamp.*--force-reinstall"):
        _loader.build_info(str(path))


def test_damaged_library_raises(tmp_path):
    path = tmp_path / "damaged.so"
    built = _loader.build_info()
    rest = f"cuda=0;cxx11abi={int(built.cxx11_abi)};".encode()
    path.write_bytes(b"\x7fELF " + stamp_with(built.tensorflow) + rest)
    with pytest.raises(ImportError, match=r"cannot be loaded with TensorFlow"):
        _loader._load(str(path))


def test_nothing_is_loaded_before_the_first_op():
    program = "from slipstream_tf.ops import _loader, drift\nassert _loader._library is None\n"
    folder = os.path.dirname(os.path.dirname(os.path.dirname(_loader.__file__)))
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=folder, check=True)


class TestWheelLibraries:
    """A wheel contains one library per supported minor release of TensorFlow."""

    @pytest.fixture
    def of_wheel(self, tmp_path, monkeypatch):
        """Returns a function that adds a library for a release.

        No other library is installed.
        """
        monkeypatch.delenv(_loader.OVERRIDE, raising=False)
        library = _loader.library_path()
        monkeypatch.setattr(_loader, "_INSTALLED", str(tmp_path / "_slipstream_ops.so"))

        def make(major, minor):
            path = tmp_path / f"_slipstream_ops_tf{major}_{minor}.so"
            shutil.copyfile(library, path)
            return str(path)

        return make

    def test_library_for_installed_tensorflow_is_loaded(self, of_wheel):
        own = of_wheel(*_loader._minor(tf.__version__))
        of_wheel(2, 9)
        of_wheel(99, 0)
        assert _loader.library_path() == own

    def test_library_is_found_without_importing_tensorflow(self, of_wheel, monkeypatch):
        own = of_wheel(2, 9)
        newest = of_wheel(2, 10)
        monkeypatch.setitem(sys.modules, "tensorflow", None)
        assert _loader.library_path("2.9.3") == own
        assert _loader.library_path("0") == newest

    def test_unsupported_tensorflow_error_lists_supported_releases(self, of_wheel, monkeypatch):
        of_wheel(2, 9)
        newest = of_wheel(2, 10)
        monkeypatch.setattr(tf, "__version__", "2.11.0")
        assert _loader.library_path() == newest
        reported = r"supports TensorFlow 2\.9, 2\.10, but TensorFlow 2\.11\.0 is installed"
        with pytest.raises(ImportError, match=reported):
            _loader._load(newest)
