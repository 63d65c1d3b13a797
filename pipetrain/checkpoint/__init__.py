"""The state of a training run and its files.

Checkpoint files, arrays, the position in the data, callbacks' state. Who goes on from them is in ``frontend``.
"""
