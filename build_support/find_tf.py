"""Prints properties of the installed TensorFlow, one KEY=VALUE per line.

The properties are the version, paths and flags for the build.
third_party/bazel/tf_configure.bzl and setup.py run this script, so that both builds use the same
headers, library and flags.
"""

from __future__ import annotations

import os
import re
import sys

OLDEST = (2, 16)


def find_tf() -> dict[str, str]:
    """Returns version, paths and flags of the installed TensorFlow.

    Raises:
        SystemExit: If TensorFlow is too old.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    version = re.match(r"(\d+)\.(\d+)\.(\d+)", tf.__version__)
    if version is None:
        raise SystemExit(f"Invalid TensorFlow version {tf.__version__!r}. Expected X.Y.Z.")
    major, minor, patch = version.groups()
    if (int(major), int(minor)) < OLDEST:
        raise SystemExit(
            f"TensorFlow {tf.__version__} is too old. Install 2.16 or newer: "
            "pip install 'tensorflow-cpu>=2.16,<2.22'"
        )
    libraries = [f[3:] for f in tf.sysconfig.get_link_flags() if f.startswith("-l:")]
    copts = [f for f in tf.sysconfig.get_compile_flags() if not f.startswith("-I")]
    # The public headers of 2.21 do not define TF_MAJOR_VERSION.
    copts += [
        f"-DSLIPSTREAM_TF_MAJOR={major}",
        f"-DSLIPSTREAM_TF_MINOR={minor}",
        f"-DSLIPSTREAM_TF_PATCH={patch}",
    ]
    return {
        "version": tf.__version__,
        "include_dir": tf.sysconfig.get_include(),
        "lib_dir": tf.sysconfig.get_lib(),
        "lib_name": libraries[0] if libraries else "libtensorflow_framework.so.2",
        "copts": " ".join(copts),
    }


if __name__ == "__main__":
    for key, value in sorted(find_tf().items()):
        sys.stdout.write(f"{key}={value}\n")
