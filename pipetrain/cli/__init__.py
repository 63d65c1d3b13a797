"""``python -m pipetrain``: the commands, one module each."""
