"""TensorFlow: a Keras model becomes a chain of blocks, and stages of it pure forward and backward functions."""
