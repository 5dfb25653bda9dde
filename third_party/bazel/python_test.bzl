"""Defines python_test, a test that runs in the Python with the configured TensorFlow.

Bazel's py_test is not used, because it starts a command `python`, which Debian and Ubuntu do not
have (only python3), and because Bazel 8 removed it.
"""

load("@local_tf//:defs.bzl", "PYTHON")

def _python_test_impl(ctx):
    program = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(
        program,
        "#!/bin/sh\nexec '%s' '%s' \"$@\"\n" % (PYTHON, ctx.file.src.short_path),
        is_executable = True,
    )
    return [DefaultInfo(
        executable = program,
        runfiles = ctx.runfiles(files = [ctx.file.src] + ctx.files.data),
    )]

python_test = rule(
    implementation = _python_test_impl,
    attrs = {
        "data": attr.label_list(allow_files = True),
        "src": attr.label(
            allow_single_file = [".py"],
            mandatory = True,
        ),
    },
    test = True,
)
