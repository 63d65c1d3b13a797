"""A program as one TensorFlow function over all devices: what its actions are made of, and the walk that traces it."""
