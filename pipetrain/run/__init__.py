"""The execution of a pipeline in one process.

Threads that execute the schedules of ``schemes``, what they send each other, and what they report. Nothing here chooses
the order of actions, and nothing depends on Keras' ``fit``.
"""
