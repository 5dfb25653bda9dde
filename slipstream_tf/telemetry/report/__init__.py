"""A page, pictures and CSV files from the records of runs. Pure Python and matplotlib.

runs -> plots (panels) -> drawing; runs -> summary; all of them -> page and CSV files.
"""
