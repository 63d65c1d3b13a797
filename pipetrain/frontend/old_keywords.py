"""Keyword arguments of ``PipelineModel`` as they were in 0.1, which have their own places now."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pipetrain.frontend.options import Options
from pipetrain.schemes.options import DEFAULT_POLICY, EVERY_OPTION, AnyScheme, keywords, with_options, written
from pipetrain.schemes.scheme import Scheme
from pipetrain.schemes.table import AUTO
from pipetrain.schemes.text_form import chosen


def taken_over(scheme: AnyScheme | None, given: Mapping[str, Any]) -> AnyScheme:
    """The scheme with the options given by keyword, as in 0.1; a warning shows the new line.

    Without a scheme it is ``auto``; where options of 0.1's default are given, this default, ``spectrain``.

    Raises TypeError for keywords that never were any, ValueError and TypeError as ``with_options`` does.
    """
    unknown = next((name for name in given if name not in EVERY_OPTION), None)
    if unknown is not None:
        near = get_close_matches(unknown, (*Options._fields, "name", *EVERY_OPTION), 1)
        raise TypeError(
            f"PipelineModel.__init__() got an unexpected keyword argument {unknown!r}"
            + "".join(f". Did you mean: {each!r}?" for each in near)
        )
    if scheme is None:
        scheme = "spectrain" if any(name in DEFAULT_POLICY for name in given) else AUTO
    if not given:
        return scheme
    found = with_options(chosen(scheme) if isinstance(scheme, str) and scheme != AUTO else scheme, **given)
    warnings.warn(
        f"Options of a scheme are given to the scheme now. Received: {keywords(given)}. Try scheme={_written(found)}.",
        FutureWarning,
        stacklevel=3,
    )
    return found


def taken_over_trace(given: dict[str, Any]) -> Any:
    """Whether a trace is to be kept, by the keyword ``trace`` as in 0.1, which is taken out; with a warning."""
    if "trace" not in given:
        return True
    warnings.warn("Received: trace. It is a property now. Try pm.is_traced = False.", FutureWarning, stacklevel=3)
    return given.pop("trace")


def _written(scheme: AnyScheme) -> str:
    if isinstance(scheme, Scheme):
        return f"Scheme({scheme.name!r}, ..., spikes={scheme.spikes}, rescale_steps={scheme.rescale_steps})"
    return written(scheme)
