"""What tests may know of the inside of a PipelineModel: what is placed where, what is held, what trains."""

from __future__ import annotations

from pipetrain.run.program_runner import ProgramRunner


def strategy(pm):
    """What trains the model: of a pipeline, of transfers, of a grid, ..."""
    return pm._strategy


def runner(pm):
    """What makes the steps of a fit."""
    return strategy(pm)._runner


def forget_functions(pm):
    """The functions of whole minibatches are traced anew, with whatever a test has replaced."""
    functions = getattr(runner(pm), "_functions", None)
    if isinstance(functions, dict):
        functions.clear()


def by_threads(patch):
    """From now on no function has all devices: each has a thread."""
    patch.setattr("pipetrain.frontend.pipeline_strategy.is_one_function", lambda *given, **settings: False)


def forwards_by_threads(patch):
    """From now on evaluations are by threads, too."""
    patch.setattr("pipetrain.frontend.evaluation.is_one_call", lambda stages: False)


def is_program(pm):
    """Whether minibatches are calls of functions over all devices."""
    return isinstance(runner(pm), ProgramRunner)


def planner(pm):
    """What decides on the layout of the stages."""
    return strategy(pm).planner


def layout(pm):
    """Which layers are in which stage, on which devices."""
    return planner(pm).layout


def microbatches(pm):
    return strategy(pm).microbatches


def replicas(pm):
    """Of each stage, its replicas."""
    return stages(pm).replicas


def stages(pm):
    """All stages that train: their first replicas, their optimizers' slots."""
    return strategy(pm)._stages


def weights(pm):
    """The copies of the weights that devices hold, where each has all layers."""
    return strategy(pm)._weights


def plan(pm):
    """Which variables are sent when."""
    return strategy(pm).plan


def evaluator(pm):
    """What ``evaluate`` and ``predict`` run."""
    return strategy(pm).evaluator


def evaluating_stages(pm):
    return evaluator(pm)._stages


def distribution(pm):
    """The strategy of TensorFlow that the compiled optimizer was made under."""
    return strategy(pm).distribution
