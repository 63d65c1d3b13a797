"""The execution of a pipeline in one process.

Threads that walk the orders of ``schemes``, what they send each other, and what they report. Nothing here decides what
to do, and nothing knows Keras' ``fit``.
"""
