"""What a training run is when it is written down.

Its files, its arrays, its place in the data, and one ``fit`` from its beginning to its end.
"""
