"""One self-contained HTML page of the figures: images inlined, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.paper.plots import Drawn, Figure, Row

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5a6675; --page: #f6f7f9;
  --card: #ffffff; --line: #dfe3e8; --accent: #2563c9; --good: #1f7a4d; --bad: #b3361f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #a3adba; --page: #14181e;
  --card: #1d232b; --line: #333c47; --accent: #7fb0ff; --good: #63c795; --bad: #f08a72; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.25rem; margin: 0 0 .6rem; }
.soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.1rem 1.2rem; margin: 1.3rem 0; overflow-wrap: anywhere; }
nav a { display: inline-block; margin: .15rem .9rem .15rem 0; }
a { color: var(--accent); }
figure { margin: 1rem 0 0; }
.wide { overflow-x: auto; background: #fff; border-radius: 8px; border: 1px solid var(--line); }
.wide img { display: block; max-width: 100%; min-width: 600px; height: auto; margin: 0 auto; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .4rem; }
dl { display: grid; grid-template-columns: 6.5rem 1fr; gap: .3rem .8rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; }
dd ul { margin: 0; padding-left: 1.1rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; }
td.n { text-align: right; white-space: nowrap; }
.scroll { overflow-x: auto; }
details { margin-top: .9rem; } summary { cursor: pointer; color: var(--accent); }
.yes { color: var(--good); font-weight: 600; } .no { color: var(--bad); font-weight: 600; }
@media (max-width: 600px) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; }
  section { padding: .9rem; } }
"""


def page(figures: Iterable[tuple[Figure, Drawn]], facts: Mapping[str, Any]) -> str:
    """The page. facts: date, version, lines of text about the run."""
    found = list(figures)
    aims = [aim for _, drawn in found for aim in drawn.aims]
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>pipeinfer: the paper's experiments</title><style>{_STYLE}</style></head>",
        "<body><main><h1>pipeinfer: the paper's experiments</h1>",
        f'<p class="soft">{_text(facts["date"])}, sources {_text(facts["version"])}</p>',
        *(f"<p>{_text(line)}</p>" for line in facts["lines"]),
        "<nav>", *(f'<a href="#{f.name}">{_text(f.title)}</a>' for f, _ in found), "</nav>",
    ]
    if aims:
        parts += ["<section><h2>Aims</h2>", '<div class="scroll"><table>',
                  "<tr><th>aim</th><th>measured</th><th>met</th></tr>"]
        parts += [f"<tr><td>{_text(what)}</td><td>{_text(value)}</td><td class=\""
                  f"{'yes' if met else 'no'}\">{'yes' if met else 'no'}</td></tr>"
                  for what, value, met in aims]
        parts.append("</table></div></section>")
    for figure, drawn in found:
        parts += _section(figure, drawn)
    parts.append("</main></body></html>")
    return "\n".join(parts)


def _section(figure: Figure, drawn: Drawn) -> list[str]:
    parts = [f'<section id="{figure.name}"><h2>{_text(figure.title)}</h2><dl>',
             f"<dt>the paper</dt><dd>{_text(figure.paper)}</dd>",
             "<dt>measured</dt><dd><ul>", *(f"<li>{_text(m)}</li>" for m in drawn.measured),
             "</ul></dd></dl>"]
    for path, caption in drawn.pictures:
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        parts.append(f'<figure><div class="wide"><img alt="{_text(caption)}" '
                     f'src="data:image/png;base64,{data}"></div>'
                     f"<figcaption>{_text(caption)}</figcaption></figure>")
    return [*parts, *_table(drawn.rows), "</section>"]


def _table(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [f"<details><summary>{len(rows)} numbers</summary>", '<div class="scroll"><table>',
             "<tr><th>case</th><th>policy</th><th>metric</th><th>mean</th><th>spread</th>"
             "<th>n</th></tr>"]
    for row in rows:
        spread = f"{row.spread:.4g}" if row.n > 1 else ""
        lines.append(f"<tr><td>{_text(row.case)}</td><td>{_text(row.policy)}</td>"
                     f"<td>{_text(row.metric)}</td><td class=\"n\">{row.mean:.4g}</td>"
                     f'<td class="n">{spread}</td><td class="n">{row.n}</td></tr>')
    return [*lines, "</table></div></details>"]


def _text(value: object) -> str:
    return html.escape(str(value))
