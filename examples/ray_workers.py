"""Workers that Ray places, one on each node of its cluster, and a script's training on them.

    python examples/ray_workers.py

Ray starts an actor in every bundle of a placement group; each actor starts a worker, which ends with it. Without a
cluster of Ray's that runs already, it starts one on this machine, with two workers.
"""

import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class Worker:
    """Holds one worker, on a node that Ray chooses."""

    def serve(self) -> str:
        """Start it; its address."""
        host = ray.util.get_node_ip_address()
        command = [sys.executable, "-u", "-m", "pipetrain", "worker", "--address", host, "--port", "0", "--attended"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self.process.stdout.readline()  # Worker at HOST:PORT, ...
        return said.removeprefix("Worker at ").split(",")[0]


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
nodes = max(2, len(ray.nodes()))
group = placement_group([{"CPU": 1}] * nodes, strategy="SPREAD")
ray.get(group.ready())
placed = PlacementGroupSchedulingStrategy(placement_group=group)
workers = [Worker.options(num_cpus=1, scheduling_strategy=placed).remote() for _ in range(nodes)]
addresses = ray.get([each.serve.remote() for each in workers])

import pipetrain

pipetrain.connect(addresses)  # before any model is made

import keras
import numpy as np

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(2048, 32)).astype("float32")
y = x[:, :10].argmax(axis=1)
model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
pm = pipetrain.PipelineModel(model, scheme="all-reduce")
pm.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = pm.fit(x, y, batch_size=64, epochs=5, verbose=2).history
print(f"Trained on {', '.join(addresses)}: accuracy {history['accuracy'][-1]:.2f}.")
ray.shutdown()
