"""Defines nvcc_library, which compiles .cu.cc files with nvcc into a cc_library."""

load("@local_cuda//:defs.bzl", "NVCC")

def _nvcc_object_impl(ctx):
    if not NVCC:
        fail("%s needs the CUDA toolkit: set CUDA_HOME, or build without --config=cuda" % ctx.label)
    out = ctx.actions.declare_file(ctx.label.name + ".o")
    args = ctx.actions.args()
    args.add_all(["-c", "-x", "cu", "-I."])
    args.add_all(ctx.attr.copts)
    args.add(ctx.file.src)
    args.add("-o", out)
    ctx.actions.run(
        executable = NVCC,
        arguments = [args],
        inputs = [ctx.file.src] + ctx.files.hdrs,
        outputs = [out],
        mnemonic = "NvccCompile",
        progress_message = "Compiling CUDA %s" % ctx.file.src.short_path,
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([out]))]

_nvcc_object = rule(
    implementation = _nvcc_object_impl,
    attrs = {
        "copts": attr.string_list(),
        "hdrs": attr.label_list(allow_files = True),
        "src": attr.label(
            allow_single_file = [".cc"],
            mandatory = True,
        ),
    },
)

def nvcc_library(name, srcs, hdrs, included_hdrs = [], deps = [], copts = [], **kwargs):
    """Defines a library of CUDA launchers.

    Only targets that are built with --config=cuda may depend on it.

    Args:
      name: Name of the library.
      srcs: .cu.cc files. Each is compiled to one object.
      hdrs: Headers of the library.
      included_hdrs: Headers of `deps` that the sources include.
      deps: cc_library targets to link.
      copts: Flags for nvcc.
      **kwargs: Passed to the cc_library.
    """
    objects = []
    for src in srcs:
        obj = "%s_%s" % (name, src.replace("/", "_").replace(".", "_"))
        _nvcc_object(
            name = obj,
            src = src,
            hdrs = hdrs + included_hdrs,
            copts = copts,
            tags = ["manual"],
        )
        objects.append(":" + obj)
    native.cc_library(
        name = name,
        srcs = objects,
        hdrs = hdrs,
        deps = deps + ["@local_cuda//:cudart"],
        linkstatic = 1,
        tags = ["manual"],
        **kwargs
    )
