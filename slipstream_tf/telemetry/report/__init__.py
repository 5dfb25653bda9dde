"""Writes an HTML page, plots and CSV files that compare recorded runs.

`runs` reads the records, `plots` extracts the data of each panel, `drawing` draws panels with
matplotlib, and `writing` writes all files.
"""
