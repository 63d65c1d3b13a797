"""Keras' ``fit`` on top of a strategy: input data, metrics, stages on devices, and the choice of the strategy.

**The path of a minibatch.** ``KerasLoop.fit`` makes a ``FitSession``, lets the strategy ``begin`` it, and calls Keras'
own ``fit``, which asks the strategy's train function for the logs of one minibatch after another. For a strategy that
has a runner that function is ``RunnerFit.step``. Its ``Window`` reads minibatches through ``InputData`` and posts them
to the runner until as many are in flight as its stages need to be busy. The runner calls a function over all devices
for each minibatch, or for several; or the threads of the stages, each in its order, pass activations down and gradients
up. ``step`` takes the oldest result, lets ``TrackedMetrics`` update Keras' metrics and count the update, and returns
the logs. ``drain``, at the end of an epoch and before anything reads the model, waits for what is in flight and writes
the weights back into the model.

**Strategies.** ``RunnerStrategy`` is what all have in common whose stages a runner runs: ``PipelineStrategy``,
``TransferStrategy``, ``GridStrategy`` and ``CodedStrategy`` say what the stages are, and which runner. ``AutoStrategy``
chooses a way to train and hands on to its strategy. ``DataParallelStrategy`` gives Keras its own train function.
``strategies`` makes one from the arguments of ``PipelineModel``. A ``Planner`` decides on the ``Layout``: where the
model is cut, on which devices its stages are, and by which kernels.

Here belongs what knows Keras' loop. What a checkpoint holds is in ``checkpoint``, what runs stages in ``run``.
"""
