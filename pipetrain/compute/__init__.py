"""One stage on one device, in TensorFlow: how a Keras model becomes a chain of blocks (``graph``), how blocks become
functions that take their weights as arguments (``functions``), how gradients change weights (``optimizer``), and how
its cost is measured (``profiling``). Nothing here depends on threads or other stages.
"""
