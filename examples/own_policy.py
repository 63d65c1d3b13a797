"""A weight policy of your own: it predicts half as far as SpecTrain's forward, and not at all in the backward."""

from pipetrain.schemes import Read, Reader, Scheme
from pipetrain.schemes.table import ASYNCHRONOUS


class HalfWay:
    """F(i) reads version v_F, predicted half the updates ahead by which B(i) comes later; B(i) reads the newest."""

    predicts = True

    def forward(self, reader: Reader) -> Read:
        """The weights of F: the version that it finds, and how many updates ahead."""
        found = reader.newest()
        return Read(found, (reader.minibatch - found) // 2)

    def backward(self, reader: Reader) -> Read:
        """The weights of B: the version that it finds."""
        return Read(reader.minibatch)


half_way = Scheme("half-way", ASYNCHRONOUS, HalfWay(), "asynchronous, predicted half as far")
# pipetrain.PipelineModel(model, stages=4, scheme=half_way)
