"""The programs: `train` (one run), `demo` (it and its controls), `doctor` (what is there).

`flag_set` parses, `program` runs a program to its exit code, alone or as a rank. `settings`
resolves the `train_flags` with the `presets` per data set. `session` trains: it takes examples from
`pipeline`, makes what `build` says, watches with `callbacks`, saves with `checkpoints`, and adds up
with `totals`. `doctor` looks in the children of `probe`, `findings` says what that means.
"""
