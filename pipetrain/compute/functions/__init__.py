"""The forward and the backward of a stage as TensorFlow functions that take their weights as arguments."""
