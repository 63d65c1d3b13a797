"""Orders of synchronous schedules, a family a module: of which device has which stages, and when a gradient is made.

Their functions give an ``Order`` or a ``Schedule`` of ``schemes.schedules``; the simplest orders are there. In the
docstrings p is the number of devices, m that of microbatches of a minibatch and v that of stages on a device.
"""
