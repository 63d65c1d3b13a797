"""Experiments: training jobs on real data, run from the repository."""
