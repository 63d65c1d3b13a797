"""A Keras model as a chain of blocks: its layer calls, where it may be cut, and a segment of it as a layer."""
