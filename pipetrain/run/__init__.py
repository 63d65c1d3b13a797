"""The execution of a training step, again and again: runners, which are given minibatches and give their results.

Most call functions over all devices; others have a thread for each device, which makes its actions in the order of its
schedule, or a tree of threads for coded gradients. Nothing here chooses the order of actions, and nothing depends on
Keras' ``fit``.
"""
