"""Repository rule that exposes a local CUDA toolkit, or stubs without one."""

load(":tf_configure.bzl", "ask")

_STUB_BUILD = """\
package(default_visibility = ["//visibility:public"])

cc_library(name = "headers")

cc_library(name = "cudart")
"""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include"],
)

cc_library(
    name = "cudart",
    srcs = ["lib/libcudart_static.a"],
    linkopts = [
        "-ldl",
        "-lpthread",
        "-lrt",
    ],
    deps = [":headers"],
)
"""

def _cuda_configure_impl(ctx):
    cuda = ask(ctx, Label("//build_support:find_cuda.py"))
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)
    ctx.file("defs.bzl", "NVCC = %r\n" % cuda.get("nvcc", ""))
    if not cuda:
        ctx.file("BUILD", _STUB_BUILD)
        return
    ctx.symlink(cuda["include_dir"], "include")
    ctx.symlink(cuda["lib_dir"] + "/libcudart_static.a", "lib/libcudart_static.a")
    ctx.file("BUILD", _BUILD)

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    environ = ["CUDA_HOME", "PATH", "PYTHON_BIN_PATH"],
    local = True,
)
