"""Repository rule that exposes a Python interpreter and its installed TensorFlow.

The interpreter is PYTHON_BIN_PATH, or python3 on PATH.
"""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    # external/ holds the sources of TensorFlow's own build, never included.
    hdrs = glob(
        ["include/**"],
        exclude = ["include/external/**"],
    ),
    includes = ["include"],
)

cc_import(
    name = "framework",
    shared_library = "lib/{lib}",
)
"""

def find_python(ctx):
    """Returns the Python interpreter: PYTHON_BIN_PATH, or python3 on PATH."""
    python = ctx.os.environ.get("PYTHON_BIN_PATH") or ctx.which("python3")
    if not python:
        fail("No python3 on PATH: set PYTHON_BIN_PATH to the Python that has TensorFlow.")
    return str(python)

def ask(ctx, script):
    """Runs a script of //build_support and returns its KEY=VALUE output lines as a dict."""
    python = find_python(ctx)
    result = ctx.execute([python, str(ctx.path(script))], timeout = 300)
    if result.return_code != 0:
        fail("%s failed with %s:\n%s" % (script, python, result.stderr))
    answers = {}
    for line in result.stdout.splitlines():
        if "=" in line:
            key, _, value = line.partition("=")
            answers[key] = value
    return answers

def _tf_configure_impl(ctx):
    tf = ask(ctx, Label("//build_support:find_tf.py"))
    ctx.symlink(tf["include_dir"], "include")
    ctx.symlink(tf["lib_dir"] + "/" + tf["lib_name"], "lib/" + tf["lib_name"])
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)
    ctx.file("defs.bzl", "TF_VERSION = %r\nTF_COPTS = %r\nPYTHON = %r\n" % (
        tf["version"],
        tf["copts"].split(" "),
        find_python(ctx),
    ))
    ctx.file("BUILD", _BUILD.format(lib = tf["lib_name"]))

tf_configure = repository_rule(
    implementation = _tf_configure_impl,
    environ = ["PATH", "PYTHON_BIN_PATH", "VIRTUAL_ENV"],
    local = True,
)
