"""Records of runs: spans of actions, transfers, and why stages waited. Real runs and simulated ones give the same
records.
"""
