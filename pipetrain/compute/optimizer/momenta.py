"""The momenta of Keras' optimizers, and how they are stretched."""

from __future__ import annotations

from typing import Any

import keras

from pipetrain.compute.keras_private import is_own
from pipetrain.schemes.policies import OneTargetPolicy
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.staleness_corrections import stretched

# The settings of Keras' optimizers that say for how long a gradient counts. Others have none, or none that is known.
SUMS = {"SGD": ("momentum",), "RMSprop": ("momentum",)}
AVERAGES = {  # Muon's momentum is a sum, of which it takes the direction alone
    **dict.fromkeys(("Adam", "AdamW", "Adamax", "Nadam", "Lamb"), ("beta_1",)),
    "Muon": ("momentum", "adam_beta_1"),
}


def momenta(optimizer: keras.optimizers.Optimizer) -> dict[str, float]:
    """The momenta of an optimizer by the names of its settings; none for one that has none which is known."""
    kind = type(optimizer)
    names = (SUMS | AVERAGES).get(kind.__name__, ()) if is_own(kind) else ()
    return {name: float(getattr(optimizer, name)) for name in names if getattr(optimizer, name)}


def stretched_settings(optimizer: keras.optimizers.Optimizer, factor: float) -> tuple[dict[str, Any], float]:
    """The settings that are different where momentum is stretched, and by what the learning rate is multiplied.

    Decoupled weight decay, which Keras multiplies by the learning rate, is to stay what it is.
    """
    longer = {name: stretched(mu, factor) for name, mu in momenta(optimizer).items()}
    if factor == 1 or not longer:
        return {}, 1.0
    if type(optimizer).__name__ not in SUMS:
        return longer, 1.0
    return longer | ({"weight_decay": optimizer.weight_decay / factor} if optimizer.weight_decay else {}), factor


def with_known_momentum(scheme: Scheme, optimizer: keras.optimizers.Optimizer) -> Scheme:
    """The scheme with its ``stretch_momentum="auto"`` decided: True for an optimizer whose momentum is known."""
    if not scheme.stretches or scheme.policy != OneTargetPolicy("auto"):
        return scheme
    return scheme._replace(policy=OneTargetPolicy(bool(momenta(optimizer))))


def told(optimizer: keras.optimizers.Optimizer, factor: float) -> str:
    """For people, in a line: what is stretched."""
    settings, scaled = stretched_settings(optimizer, factor)
    longer = [f"{name}={mu:g} becomes {settings[name]:.4g}" for name, mu in momenta(optimizer).items()]
    rate = f", and its learning rate is multiplied by {scaled:.4g}" if scaled != 1 else ""
    return f"{type(optimizer).__name__}'s {' and '.join(longer)}{rate}"
