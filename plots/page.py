"""One HTML page that needs nothing but itself: text, tables and pictures, readable on a phone, by day and by night."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --page: #fdfdfb; --faint: #5a5a5a; --line: #d5d5d0; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e4; --page: #16181b; --faint: #a9abad; --line: #3b3e42; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--page); color: var(--text);
       font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.3rem; line-height: 1.25; margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
.aside { color: var(--faint); }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; min-width: 5rem; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; margin: 0; }
dt { color: var(--faint); }
dd { margin: 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 1rem 2rem; }
.figures > .wide { grid-column: 1 / -1; }
figure { margin: 1rem 0; min-width: 0; }
figure img { display: block; width: 100%; max-width: 32rem; height: auto; background: white; border-radius: 4px;
             padding: 4px; }
.wide img { max-width: 100%; }
figure .large { min-width: 46rem; }
figcaption { margin-top: 0.5rem; max-width: 46rem; }
.sideways { display: none; }
@media (max-width: 46rem) {
  .sideways { display: block; font-size: 0.85rem; }
  dl { grid-template-columns: minmax(0, 2fr) 3fr; }
  th, td { padding: 0.3rem 0.45rem; }
}
"""
FITTING = 3  # columns: as many fit on a phone
SIDEWAYS = '<div class="aside sideways">Scroll it sideways.</div>'


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page, whose parts are HTML."""
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    """A heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, aside: bool = False) -> str:
    """A paragraph."""
    return f"<p{' class=aside' if aside else ''}>{escape(text)}</p>"


def bullets(lines: Sequence[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in pairs)}</dl>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls sideways where the page is too narrow for it. Cells ``**so**`` are bold."""
    body = "".join(f"<tr>{''.join(f'<td>{_bold(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{inside}</div>{SIDEWAYS if len(header) > FITTING else ""}'


def picture(path: Path, alt: str, caption: str, narrow: Path | None = None, wide: bool = False) -> str:
    """A figure with its caption; ``narrow`` is shown on phones instead, a ``wide`` one scrolls sideways there."""
    image = f'<img src="{inline(path)}" alt="{escape(alt)}"{" class=large" if wide else ""}>'
    if narrow is not None:
        image = f'<picture><source media="(max-width: 46rem)" srcset="{inline(narrow)}">{image}</picture>'
    if wide:
        image = f'<div class="scroll" tabindex="0">{image}</div>{SIDEWAYS}'
    kind = ' class="wide"' if wide or narrow is not None else ""
    return f"<figure{kind}>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def figures(each: Iterable[str]) -> str:
    """Figures, side by side where there is room."""
    return f'<div class="figures">{"".join(each)}</div>'


def inline(path: Path) -> str:
    """A picture as a part of the page: the drawing or the image beside it, whichever is smaller."""
    kinds = {path.with_suffix(".svg"): "svg+xml", path.with_suffix(".png"): "png"}
    smaller = min((each for each in kinds if each.exists()), key=lambda each: each.stat().st_size)
    return f"data:image/{kinds[smaller]};base64,{base64.b64encode(smaller.read_bytes()).decode('ascii')}"


def _bold(cell: str) -> str:
    if len(cell) > 4 and cell.startswith("**") and cell.endswith("**"):
        return f"<strong>{escape(cell[2:-2])}</strong>"
    return escape(cell)
