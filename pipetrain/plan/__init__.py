"""Planning: from measured profiles and a description of the devices, the fastest cut of a model that fits the memory.
Nothing here measures, and nothing imports TensorFlow.
"""
