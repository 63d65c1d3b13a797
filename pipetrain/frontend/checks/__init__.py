"""Refusals: what would go wrong later is named before training starts. Whatever it is that is refused has a module."""
