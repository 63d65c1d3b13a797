"""One training step over several devices as one TensorFlow function, whose transfers a plan orders."""
