"""One stage on one device, in TensorFlow: how a Keras model becomes a chain of blocks (``graph``), how blocks become
functions that take their weights as arguments (``functions``), how gradients change weights (``optimizer``), and what
all of it costs (``profiling``). Nothing here knows of threads or of other stages.
"""
