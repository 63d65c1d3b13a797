"""Keras' ``fit`` on top of a strategy: input data, metrics, stages on devices, and the choice of the strategy.

**The path of a minibatch.** ``FitMixin.fit`` makes a ``FitSession``, lets the strategy ``begin`` it, and calls Keras'
own ``fit``, which asks the strategy's train function for the logs of one minibatch after another. For a pipeline that
function is ``PipelineFit.step``. Its ``Window`` reads minibatches through ``InputData`` and posts them to the
``Pipeline`` until as many are in flight as its stages need to be busy. The threads of the stages, each in its order,
pass activations down and gradients up, and each stage updates its own weights. The last stage reports losses and
predictions, of which the collector makes the minibatch's result; ``step`` takes the oldest result, lets
``TrackedMetrics`` update Keras' metrics and count the update, and returns the logs. ``drain``, at the end of an epoch
and before anything reads the model, waits for what is in flight and writes the weights back into the model. Another
``Strategy``, such as ``DataParallelStrategy``, gives Keras another train function; ``strategies`` has the choice.

Here belongs what knows Keras' loop. What a checkpoint holds is in ``checkpoint``, the threads are in ``run``.
"""
