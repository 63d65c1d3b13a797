"""One optimizer for each stage: clones of the compiled one, their slots, updates and predictions."""
