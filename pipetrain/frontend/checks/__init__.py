"""Refusals: errors before training starts for what would fail later. There is a module for each kind of object."""
