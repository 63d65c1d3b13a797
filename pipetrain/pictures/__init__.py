"""What objects show of themselves: the ground of every drawing, tables as HTML, rows for pandas and CSV files.

What is drawn of a noun is beside that noun: ``plan/pictures.py``, ``trace/timeline.py``. Nothing here knows plans or
traces, and only ``figure.py`` imports matplotlib.
"""
