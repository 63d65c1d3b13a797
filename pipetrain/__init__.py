"""Pipeline-parallel training for Keras and TensorFlow: SpecTrain, PipeDream, GPipe."""

from pipetrain.compute.profiler import profile
from pipetrain.model import PipelineModel
from pipetrain.plan.partition import Partition, partition
from pipetrain.plan.profile import Profile
from pipetrain.plan.trace import Trace
from pipetrain.run.devices import set_cpu_devices

__all__ = ["Partition", "PipelineModel", "Profile", "Trace", "partition", "profile", "set_cpu_devices"]
__version__ = "0.1.0"
