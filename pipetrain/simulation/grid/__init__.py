"""A grid of devices in simulated time: parts of wide layers, rows of all others, and what they send each other."""
