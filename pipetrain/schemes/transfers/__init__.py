"""In which messages data parallelism sends weights and gradients, and in which order: pure functions, one paper a file.

A plan is data. Whoever carries it out, training or the simulator, decides nothing.
"""
