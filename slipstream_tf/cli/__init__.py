"""Command line programs: train, demo, doctor, plan, prepare and report.

`flag_set` parses flags. `program` runs a program as a single process or as a rank and maps errors
to exit codes. `settings` merges the `train_flags` with the defaults of each data set. `session`
runs the training: it reads batches from `pipeline`, builds tables, model and engine with `build`,
measures with `callbacks`, saves with `checkpoints`, and sums counts over ranks with `totals`.
`doctor` runs each of the `checks` in a child process.
"""
