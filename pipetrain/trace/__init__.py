"""What happened, or would happen: spans of actions, transfers, and why stages waited. Real runs and simulated ones give
the same records. Nothing here decides or draws.
"""
