"""A discrete-event simulation of training with the same schedules as real runs, which gives the same kind of trace.
Nothing here imports TensorFlow.
"""
