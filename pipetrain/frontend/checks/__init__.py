"""Refusals: what would go wrong later is named before training starts. There is a module for each kind of thing."""
