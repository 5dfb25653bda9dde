"""A page, pictures and CSV files from the records of runs. Pure Python and matplotlib.

runs -> panels -> drawing, csv_files; runs -> summary; all of them -> page.
"""
