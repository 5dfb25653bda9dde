"""What to run after a run in shadow mode: the commands that switch skipping on. Pure.

In: the flags of the run. Out: command lines that `slipstream-train` takes, and words around them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from slipstream_tf.cli.settings import FLAGS_THAT_JUDGE_KEYS, Settings
from slipstream_tf.cli.train_flags import ENGINE_FLAGS
from slipstream_tf.telemetry.run_record import RECORD

_SAVES = {"inputs": "inputs", "defer": "gradient rows"}


def commands(flags: Mapping[str, Any], settings: Settings, ranks: int) -> dict[str, str]:
    """Returns the command lines by what they are for.

    Args:
        flags: those that stood on the command line, with their values.
        settings: of the run, which was in shadow mode.
        ranks: of the job.

    Returns:
        Skip mode, or "random" and "stop" for the controls of one that leaves out inputs -> command.
    """
    flags = {name: value for name, value in flags.items() if name != "shadow"}
    modes = [flags["skip"]] if "skip" in flags else list(_SAVES)
    found = {}
    for mode in modes:
        chosen = {**_that_matter(flags, mode, settings), "skip": mode}
        if mode == "inputs" and settings.engine.get("score") == "remembered_loss":
            chosen["score"] = "remembered_loss"
        chosen["output"] = _beside(flags.get("output"), mode)
        found[mode] = _line(chosen, ranks)
        if mode not in ("defer", "gradients"):
            match = os.path.join(chosen["output"], RECORD)
            for control in ("random", "stop"):
                output = _beside(flags.get("output"), control)
                found[control] = _line(
                    {"control": control, "match": match, "output": output}, ranks
                )
    return found


def words(flags: Mapping[str, Any], settings: Settings, ranks: int) -> str:
    """Returns the lines that end a run in shadow mode; arguments as of `commands`."""
    found = commands(flags, settings, ranks)
    controls = [found.pop(name) for name in ("random", "stop") if name in found]
    lines = []
    for mode, command in found.items():
        what = f"--skip={mode} in place of --shadow"
        if "skip" in flags:
            what = "nothing, and leave --shadow out"
        elif mode == "inputs" and "--score=" in command:
            what = f"--skip={mode} --score=remembered_loss in place of --shadow"
        saves = f" ({_SAVES[mode]})" if "skip" not in flags else ""
        lines += [f"To switch on{saves}, add {what}:", f"  {command}"]
    if controls:
        lines.append("Then run what leaves out as many inputs at random, or trains on as many and")
        lines.append("stops: skipping by keys must do better than both to be worth anything.")
        lines += [f"  {command}" for command in controls]
    lines.append("One seed is a hint: repeat all of them with other values of --seed.")
    return "\n".join(lines)


def _that_matter(flags: Mapping[str, Any], mode: str, settings: Settings) -> dict[str, Any]:
    """The flags without those that the mode would refuse as doing nothing."""
    chosen = dict(settings.engine)
    chosen.pop("shadow", None)
    kept = {}
    for name, value in flags.items():
        flag = ENGINE_FLAGS.get(name)
        if flag is not None and not flag.need.is_met(mode, chosen):
            continue
        by_movement = chosen.get("defer_trigger", "movement") == "movement"
        if mode == "defer" and by_movement and name in (*FLAGS_THAT_JUDGE_KEYS, "hot_budget_mb"):
            continue
        kept[name] = value
    return kept


def _beside(output: str | None, name: str) -> str:
    """A folder beside that of the run in shadow mode, and another one."""
    if output is None:
        return os.path.join("runs", name)
    folder, own = os.path.split(os.path.normpath(output))
    return os.path.join(folder, f"{name}-on" if name == own else name)


def _line(flags: Mapping[str, Any], ranks: int) -> str:
    launcher = ["horovodrun", "-np", str(ranks)] if ranks > 1 else []
    return shlex.join([*launcher, "slipstream-train", *(_flag(*item) for item in flags.items())])


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, (tuple, list)):
        return f"--{name}={','.join(map(str, value))}"
    return f"--{name}={value}"
