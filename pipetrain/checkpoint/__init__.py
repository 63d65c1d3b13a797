"""The state of a training run and its files.

Checkpoint files, arrays, the position in the data, and one ``fit`` from its beginning to its end.
"""
