"""A weight policy of your own: it predicts half as far as SpecTrain's forward, and not at all in the backward.

``python examples/own_policy.py`` prints what it reads; programs take it as ``--scheme examples/own_policy.py:HalfWay``.
"""

from pipetrain.schemes import Read, Reader, Scheme
from pipetrain.schemes.table import ASYNCHRONOUS


class HalfWay:
    """F(i) reads version v_F, predicted half the updates ahead by which B(i) comes later; B(i) reads the newest."""

    predicts = True

    def forward(self, reader: Reader) -> Read:
        """The weights of F: the version that it finds, and how many updates ahead."""
        found = reader.newest()
        return Read(found, (reader.current() - found) // 2)

    def backward(self, reader: Reader) -> Read:
        """The weights of B: the version that it finds."""
        return Read(reader.current())


half_way = Scheme("half-way", ASYNCHRONOUS, HalfWay(), "asynchronous, predicted half as far")
# pipetrain.PipelineModel(model, stages=4, scheme=half_way)

if __name__ == "__main__":  # what minibatch 20 reads in each of four stages
    for stage in range(4):
        reader = half_way.reader(20, stage, stages=4, microbatches=1)
        forward, backward = half_way.policy.forward(reader), half_way.policy.backward(reader)
        print(f"stage {stage}: F20 reads version {forward.version} + {forward.horizon}, B20 version {backward.version}")
