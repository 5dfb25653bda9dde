"""Repository rule that builds GoogleTest from its sources on this machine.

The sources come from the package googletest of Debian and Ubuntu, or from GTEST_ROOT (a checkout of
google/googletest). Without sources, only test targets fail, with a message that names the package.
"""

_DEFAULT_ROOT = "/usr/src/googletest"

_MISSING = """\
def _missing_impl(ctx):
    fail("GoogleTest's sources are not in {root}: run 'apt-get install googletest', " +
         "or set GTEST_ROOT to a checkout of google/googletest.")

missing = rule(implementation = _missing_impl)
"""

_MISSING_BUILD = """\
load(":missing.bzl", "missing")

missing(
    name = "gtest_main",
    visibility = ["//visibility:public"],
)
"""

_BUILD = """\
cc_library(
    name = "gtest_main",
    srcs = [
        "src/gtest-all.cc",
        "src/gtest_main.cc",
    ],
    hdrs = glob(["include/gtest/**/*.h"]),
    # src/gtest-all.cc includes the other sources as "src/x.cc".
    copts = ["-std=c++17"],
    includes = [
        ".",
        "include",
    ],
    linkopts = ["-lpthread"],
    textual_hdrs = glob(
        [
            "src/*.cc",
            "src/*.h",
        ],
        exclude = [
            "src/gtest-all.cc",
            "src/gtest_main.cc",
        ],
    ),
    visibility = ["//visibility:public"],
)
"""

def _gtest_configure_impl(ctx):
    root = ctx.os.environ.get("GTEST_ROOT") or _DEFAULT_ROOT
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)
    if not ctx.path(root + "/googletest/src/gtest-all.cc").exists:
        ctx.file("missing.bzl", _MISSING.format(root = root))
        ctx.file("BUILD", _MISSING_BUILD)
        return
    ctx.symlink(root + "/googletest/include", "include")
    ctx.symlink(root + "/googletest/src", "src")
    ctx.file("BUILD", _BUILD)

gtest_configure = repository_rule(
    implementation = _gtest_configure_impl,
    environ = ["GTEST_ROOT"],
    local = True,
)
