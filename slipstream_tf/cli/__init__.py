"""The programs: `train` (one run) and `demo` (a skipping run beside its controls).

`flag_set` parses, `settings` resolves, `presets` has the defaults per data set, `session` runs.
"""
