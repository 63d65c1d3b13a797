"""The text that explains a plan to people, with what it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipetrain.plan.choice import Choice
    from pipetrain.plan.stages import Partition


class Explanation(str):
    """The text of ``PipelineModel.explain``, which a notebook shows as tables.

    Attributes:
        choice: the ways to train.
        cut: how the model is cut, None where it is not.
        note: a remark below, may be empty.
    """

    choice: Choice
    cut: Partition | None
    note: str

    def __new__(cls, text: str, choice: Choice, cut: Partition | None = None, note: str = "") -> Explanation:
        """A string with these attributes."""
        made = super().__new__(cls, text)
        made.choice, made.cut, made.note = choice, cut, note
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return str(self), self.choice, self.cut, self.note

    def _repr_html_(self) -> str:
        cut = self.cut.to_html(self.choice.one_s) if self.cut else ""
        return cut + self.choice.to_html(self.note)
