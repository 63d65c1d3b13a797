"""Experiments: training jobs on real data, run from the repository."""

from importlib.util import find_spec

missing = [name for name in ("matplotlib", "tensorflow_datasets") if find_spec(name) is None]
if missing:
    raise ModuleNotFoundError(
        f"Experiments need packages that the library does not. Missing: {', '.join(missing)}. "
        'Try pip install "pipetrain[experiments]", or pip install ".[experiments]" in a clone.'
    )
