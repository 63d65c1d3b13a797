"""Runs that were stopped before their end, and what they go on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from experiments.records import CHECKPOINTS, OWN, Settings, Summary, microbatches_for, options_of
from pipetrain.checkpoint.store import steps_done
from pipetrain.schemes.options import DEFAULT_POLICY
from pipetrain.schemes.table import PIPELINES


def newest(runs: Path) -> Path:
    """The run without an end that was begun, or gone on with, last. Raises ValueError if there is none."""
    begun = [path for path in runs.glob("*/*/config.json") if summary(path.parent) is None]
    if not begun:
        raise ValueError(f"There is no run to go on with. Received: --resume, nothing in {str(runs)!r}. Try a new one.")
    return max(begun, key=lambda path: path.stat().st_mtime_ns).parent.parent


def summary(folder: Path) -> Summary | None:
    """What a scheme's run came to; None if it has not ended."""
    try:
        return Summary(**json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


def is_unfinished(folder: Path) -> bool:
    """Whether a scheme's run left a checkpoint and did not end."""
    return summary(folder) is None and any((folder / CHECKPOINTS).glob("step-*.npz"))


def settings(
    output: Path, schemes: Sequence[str], changes: Mapping[str, Any], files: Mapping[str, str | None] | None = None
) -> dict[str, Settings]:
    """Settings of the runs in a folder, or of these schemes, with changes; each by the scheme whose checkpoints it has.

    A scheme that has not been run there goes on from the checkpoint of the one that has. Raises ValueError where that
    is not to be told.
    """
    known = {path.parent.name: recorded(path) for path in sorted(output.glob("*/config.json"))}
    if not known:
        raise ValueError(
            f"There is no run to go on with. Received: --resume {str(output)!r}, which holds none. "
            "Try the --output of a run."
        )
    chosen = {}
    for scheme in schemes or known:
        source = scheme
        if scheme not in known:
            others = [name for name in known if is_unfinished(output / name)]
            if len(others) != 1 or len(schemes) != 1:
                raise ValueError(
                    f"Another scheme goes on from the one run that is there. Received: --scheme {scheme}, "
                    f"{str(output)!r} with {', '.join(others) or 'no unfinished run'}. Try one of these schemes."
                )
            source = others[0]
        file = (files or {}).get(scheme) if schemes else known[source].file
        changed = replace(known[source], **{**changes, "scheme": scheme, "file": file})
        left_out = options_of(changed.way, {name: getattr(changed, name) for name in (*DEFAULT_POLICY, *OWN)})
        # Refused if none of those asked has them.
        asked = [scheme, *(schemes or known if changes.get("microbatches") else PIPELINES)]
        asked = [changed.way if each == scheme else each for each in asked]
        left_out["microbatches"] = microbatches_for(changed.way, asked, changed.microbatches, changed.horizon)
        if left_out["servers"] and "servers" not in changes:  # some workers may be lost
            left_out["servers"] = min(left_out["servers"], changed.stages)
        chosen[source] = replace(changed, **left_out)
        done = steps_done(output / source / CHECKPOINTS) or 0
        if done > changed.steps:
            raise ValueError(
                f"More steps are done already. Received: --steps {changed.steps}, {done} steps of {scheme}. "
                f"Try at least {done}."
            )
    return chosen


def adopt(output: Path, source: str, scheme: str) -> None:
    """Let a scheme go on from another one's checkpoints."""
    if source != scheme:
        shutil.copytree(output / source / CHECKPOINTS, output / scheme / CHECKPOINTS, dirs_exist_ok=True)


def recorded(path: Path) -> Settings:
    """The settings in a run's ``config.json``. Raises ValueError where they cannot be read."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        return Settings(**{field.name: given[field.name] for field in fields(Settings) if field.name in given})
    except (TypeError, ValueError) as error:
        raise ValueError(f"Not a run's settings: {error}. Received: {str(path)!r}. Try another folder.") from error
