"""Measurements, as ratios from interleaved runs; see README.md."""
