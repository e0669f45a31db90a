# SPDX-License-Identifier: Apache-2.0
"""Verified trees as one HTML page: an inline SVG a round, nothing loaded from outside.

Depth runs from left to right. Every leaf has a line of its own and a parent stands at
the height of its first child, so the draft's first choices form straight lines.
"""

from __future__ import annotations

from html import escape
from string import Template

from vllm_dflash.cli.tree_text import TokenText, summarise, visible
from vllm_dflash.metrics.tree_dump import TreeRound

_COLUMN = 132
_ROW = 34
_BOX_WIDTH = 104
_BOX_HEIGHT = 24
_MARGIN = 12
# Characters of a label: beside a percentage, and alone.
_MAX_LABEL = 9
_MAX_LONE_LABEL = 13


def render_page(
    rounds: list[TreeRound], token_text: TokenText, *, title: str, facts: str
) -> str:
    """Return the page of one request's rounds.

    Args:
        rounds: In order, at least one.
        token_text: Text of a token id.
        title: The heading; the request or the prompt.
        facts: A line below it: models, sizes.
    """
    sections = []
    for index, item in enumerate(rounds):
        sections.append(
            f'<section class="round" data-round="{index}"'
            f"{'' if index == 0 else ' hidden'}>"
            f"{_headline(item, index, len(rounds), token_text)}"
            f'<div class="tree">{render_svg(item, token_text)}</div></section>'
        )
    spans = [
        f'<span class="emitted" data-round="{index}">'
        f"{escape(''.join(token_text(token) for token in item.emitted))}</span>"
        for index, item in enumerate(rounds)
    ]
    return Template(_PAGE).substitute(
        title=escape(title),
        facts=escape(facts),
        summary=escape(summarise(rounds)),
        last=len(rounds) - 1,
        sections="\n".join(sections),
        text="".join(spans),
    )


def _headline(
    item: TreeRound, index: int, num_rounds: int, token_text: TokenText
) -> str:
    accepted = len(item.path) - 1
    return (
        f"<h2>Round {index + 1} <small>of {num_rounds}</small></h2>"
        f"<p>Position {item.position}: {len(item.tokens) - 1} nodes, "
        f"<b>{accepted} accepted</b>, then the target's own token "
        f"<code>{escape(visible(token_text(item.bonus)))}</code>.</p>"
    )


def render_svg(item: TreeRound, token_text: TokenText) -> str:
    """Return the tree of a round as an SVG element."""
    places = place_nodes(item)
    bonus_at = (places[item.path[-1]][0] + 1, _free_row(item, places))
    depth = max(max(x for x, _ in places), bonus_at[0])
    rows = max(max(y for _, y in places), bonus_at[1]) + 1
    width, height = _x(depth) + _BOX_WIDTH + _MARGIN, rows * _ROW + _MARGIN
    accepted = set(item.path)
    edges, boxes = [], []
    for node in range(len(item.tokens)):
        kind = "root" if node == 0 else "accepted" if node in accepted else "other"
        probability = item.probability(node)
        if node:
            edges.append(_edge(places[item.parents[node]], places[node], kind))
        text = token_text(item.tokens[node])
        boxes.append(_box(places[node], kind, text, item.tokens[node], probability))
    edges.append(_edge(places[item.path[-1]], bonus_at, "bonus"))
    boxes.append(_box(bonus_at, "bonus", token_text(item.bonus), item.bonus, None))
    # Accepted edges last, on top of the others.
    edges.sort(key=lambda edge: "other" not in edge)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">'
        f"{''.join(edges)}{''.join(boxes)}</svg>"
    )


def place_nodes(item: TreeRound) -> list[tuple[int, int]]:
    """Return (column, row) of each node: no two share a place."""
    places = [(0, 0)] * len(item.tokens)
    next_row = 0
    pending = [0]
    while pending:
        node = pending.pop()
        column = places[item.parents[node]][0] + 1 if node else 0
        places[node] = (column, next_row)
        children = item.children(node)
        if not children:
            next_row += 1
        pending += reversed(children)
    return places


def _free_row(item: TreeRound, places: list[tuple[int, int]]) -> int:
    """Return a row for the target's own token, near its parent and on no node."""
    column, row = places[item.path[-1]]
    if not item.children(item.path[-1]):
        return row
    taken = {y for x, y in places if x == column + 1}
    return next(y for y in range(row, len(places) + 1) if y not in taken)


def _x(column: int) -> int:
    return _MARGIN + column * _COLUMN


def _y(row: int) -> int:
    return _MARGIN // 2 + row * _ROW + _ROW // 2


def _edge(start: tuple[int, int], end: tuple[int, int], kind: str) -> str:
    x1, y1 = _x(start[0]) + _BOX_WIDTH, _y(start[1])
    x2, y2 = _x(end[0]), _y(end[1])
    middle = (x1 + x2) // 2
    return (
        f'<path class="edge {kind}" '
        f'd="M{x1} {y1}C{middle} {y1} {middle} {y2} {x2} {y2}"/>'
    )


def _box(
    place: tuple[int, int],
    kind: str,
    text: str,
    token: int,
    probability: float | None,
) -> str:
    x, y = _x(place[0]), _y(place[1]) - _BOX_HEIGHT // 2
    label = visible(text)
    limit = _MAX_LONE_LABEL if probability is None else _MAX_LABEL
    if len(label) > limit:
        label = label[: limit - 1] + "…"
    parts = [f'<g class="node {kind}"><title>{escape(visible(text))}']
    parts.append(f" (token {token}")
    if probability is not None:
        parts.append(f", draft {probability:.1%}")
    parts.append(
        f')</title><rect x="{x}" y="{y}" width="{_BOX_WIDTH}" '
        f'height="{_BOX_HEIGHT}" rx="6"/>'
    )
    if probability is not None:
        bar = max(1, round(probability * (_BOX_WIDTH - 12)))
        parts.append(
            f'<rect class="bar" x="{x + 6}" y="{y + _BOX_HEIGHT - 4}" '
            f'width="{bar}" height="2"/>'
        )
        parts.append(
            f'<text class="p" x="{x + _BOX_WIDTH - 6}" y="{y + 15}">'
            f"{probability:.0%}</text>"
        )
    parts.append(f'<text x="{x + 7}" y="{y + 15}">{escape(label)}</text></g>')
    return "".join(parts)


# Template: a dollar sign that is no field is written twice.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --bg: #fbfbfa; --fg: #1d2330; --soft: #687083; --line: #d5d8df;
  --card: #ffffff; --ok: #12805c; --ok-bg: #def5ea; --bonus: #9a5b00;
  --bonus-bg: #fdf0d5; --root-bg: #e7ecf7; }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) {
  --bg: #14171d; --fg: #e6e8ec; --soft: #9098a8; --line: #363c48; --card: #1c2028;
  --ok: #4fd1a1; --ok-bg: #143a2e; --bonus: #f0b860; --bonus-bg: #3d2f14;
  --root-bg: #262d3b; } }
:root[data-theme=dark] { --bg: #14171d; --fg: #e6e8ec; --soft: #9098a8;
  --line: #363c48; --card: #1c2028; --ok: #4fd1a1; --ok-bg: #143a2e;
  --bonus: #f0b860; --bonus-bg: #3d2f14; --root-bg: #262d3b; }
body { margin: 0; padding: 24px; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0; }
small, .soft { color: var(--soft); font-weight: normal; }
p { margin: 4px 0 12px; }
.controls { display: flex; gap: 8px; align-items: center; margin: 16px 0; }
button { font: inherit; color: var(--fg); background: var(--card); cursor: pointer;
  border: 1px solid var(--line); border-radius: 6px; padding: 4px 12px; }
input[type=range] { flex: 1; max-width: 420px; accent-color: var(--ok); }
.text { white-space: pre-wrap; background: var(--card); padding: 12px 14px;
  border: 1px solid var(--line); border-radius: 8px; max-height: 11em;
  overflow: auto; }
.emitted { cursor: pointer; border-radius: 3px; color: var(--soft); }
.emitted.seen { color: var(--fg); }
.emitted.now { background: var(--ok-bg); color: var(--ok); }
.tree { overflow: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 8px; }
svg text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: var(--fg); }
svg text.p { font-size: 10px; fill: var(--soft); text-anchor: end; }
.node rect { fill: var(--card); stroke: var(--line); }
.node.other text { fill: var(--soft); }
.node.root rect { fill: var(--root-bg); }
.node.accepted rect { fill: var(--ok-bg); stroke: var(--ok); stroke-width: 1.5; }
.node.bonus rect { fill: var(--bonus-bg); stroke: var(--bonus);
  stroke-dasharray: 4 3; }
.node rect.bar { fill: var(--soft); stroke: none; }
.node.accepted rect.bar { fill: var(--ok); }
.edge { fill: none; stroke: var(--line); stroke-width: 1.2; }
.edge.accepted { stroke: var(--ok); stroke-width: 2.6; }
.edge.bonus { stroke: var(--bonus); stroke-width: 2; stroke-dasharray: 4 3; }
.key span { display: inline-block; padding: 0 8px; margin-right: 8px;
  border: 1px solid var(--line); border-radius: 5px; }
.key .a { background: var(--ok-bg); border-color: var(--ok); }
.key .b { background: var(--bonus-bg); border: 1px dashed var(--bonus); }
</style>
</head>
<body>
<h1>$title</h1>
<p class="soft">$facts<br>$summary.</p>
<div class="text">$text</div>
<div class="controls">
<button id="before" aria-label="previous round">&larr;</button>
<input id="at" type="range" min="0" max="$last" value="0" aria-label="round">
<button id="after" aria-label="next round">&rarr;</button>
<button id="theme">dark / light</button>
</div>
<p class="key"><span class="a">accepted</span><span>not accepted</span>
<span class="b">the target's own token</span>
<span class="soft">percent: the draft's probability; arrow keys step</span></p>
$sections
<script>
"use strict";
const at = document.getElementById("at");
function show(index) {
  index = Math.min(Math.max(index, 0), Number(at.max));
  at.value = index;
  for (const section of document.querySelectorAll(".round"))
    section.hidden = Number(section.dataset.round) !== index;
  for (const span of document.querySelectorAll(".emitted")) {
    span.classList.toggle("now", Number(span.dataset.round) === index);
    span.classList.toggle("seen", Number(span.dataset.round) < index);
  }
}
function step(by) { show(Number(at.value) + by); }
at.addEventListener("input", () => show(Number(at.value)));
document.getElementById("before").addEventListener("click", () => step(-1));
document.getElementById("after").addEventListener("click", () => step(1));
document.addEventListener("keydown", (event) => {
  if (event.target === at) return;
  if (event.key === "ArrowLeft") step(-1);
  if (event.key === "ArrowRight") step(1);
});
for (const span of document.querySelectorAll(".emitted"))
  span.addEventListener("click", () => show(Number(span.dataset.round)));
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
show(0);
</script>
</body>
</html>
"""
