"""Estimates the savings of policies in a dry run, with a report.

Run: python examples/dry_run_report.py [FOLDER [DATA]]

FOLDER receives the run and its report, by default "runs". DATA is a value of --data of
slipstream-train, by default generated examples. The report needs matplotlib.

The example prints the table of results, the estimated savings with their cost in AUC, the commands
that switch the policies on, and the path of the report. The same from the command line:

    slipstream-train --data=DATA --dry_run --output=FOLDER/dry_run
    slipstream-report FOLDER/dry_run --output=FOLDER/report
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

from slipstream_tf.telemetry.report.runs import read_runs
from slipstream_tf.telemetry.report.writing import write_report


def main() -> None:
    """Runs slipstream-train in a child process, then reads its record."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs"
    data = sys.argv[2] if len(sys.argv) > 2 else "generated:60000"
    run = pathlib.Path(folder) / "dry_run"
    train = [sys.executable, "-m", "slipstream_tf.cli.train"]
    subprocess.run([*train, f"--data={data}", "--dry_run", f"--output={run}"], check=True)

    runs = read_runs([str(run)])
    for saving in runs[0].value("dry_run", "savings"):
        cost = saving["max_cost"]
        limit = "unknown" if cost is None else f"at most {cost:.4f} AUC"
        print(f"{saving['what']}: {saving['fraction']:.1%} saved, estimated cost {limit}")
    page = write_report(runs, str(pathlib.Path(folder) / "report"))
    print(f"report: {page}")


if __name__ == "__main__":
    main()
