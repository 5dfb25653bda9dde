"""The programs: `train` (one run), `demo` (it and its controls), `doctor` (what is there).

`flag_set` parses, `settings` resolves, `presets` has the defaults per data set, `session` runs;
`checks` looks for what the doctor reports, `findings` judges it.
"""
