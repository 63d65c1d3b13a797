"""One training step over a grid of devices, whose wide layers are divided by outputs and whose rows by devices."""
