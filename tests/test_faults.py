"""Workers that die, hang or come back; training goes on from its checkpoint, or says what was lost."""

from __future__ import annotations
