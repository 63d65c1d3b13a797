"""Gradients of a minibatch's parts, combined so that a sum of all follows from those of some workers."""
