"""Figures, drawn from the files that runs leave."""

from importlib.util import find_spec

missing = [name for name in ("matplotlib",) if find_spec(name) is None]
if missing:
    raise ModuleNotFoundError(
        f"Figures need packages that the library does not. Missing: {', '.join(missing)}. "
        'Try pip install "pipetrain[plot]", or pip install ".[plot]" in a clone.'
    )
