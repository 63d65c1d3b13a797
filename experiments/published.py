"""When a figure found here agrees with the one that a source publishes."""

from __future__ import annotations

WITHIN = 0.25  # of the published figure, on all pages of results


def agrees(ours: float, published: float) -> bool:
    """Whether ours is within 25% of the published figure as it stands."""
    return abs(ours - published) <= WITHIN * abs(published)


def verdict(ours: float, published: float) -> str:
    """The same for a table."""
    return "yes" if agrees(ours, published) else "no"
