"""What TensorFlow computes: how a Keras model becomes a chain of blocks (``graph``), how blocks become functions of one
stage that take their weights as arguments (``functions``), how gradients change weights (``optimizer``), how what all
devices do becomes one function (``program``, ``transfers``, ``grid``), and what blocks cost (``profiling``).

Nothing here depends on threads or on Keras' ``fit``.
"""
