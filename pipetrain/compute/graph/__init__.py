"""A Keras model as a chain of blocks: what its layers are, where it may be cut, and a segment of it as a layer."""
