"""The programs: `train` (one run), `demo` (it and its controls), `doctor` (what is there).

`flag_set` parses, `program` runs a program to its exit code, alone or as a rank. `settings`
resolves the `train_flags` with their defaults per data set. `session` trains: it reads examples
from `pipeline`, builds tables, model and engine with `build`, measures with `callbacks`, saves with
`checkpoints`, and adds up with `totals`. `doctor` runs each of the `checks` in a child process.
"""
