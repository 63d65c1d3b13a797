"""Which way to train is best: measured profiles, the devices, and from both the cut of a model that is fastest and fits
the memory. Arithmetic alone: nothing here measures, and nothing knows TensorFlow.
"""
