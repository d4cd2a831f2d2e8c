"""Draws docs/recurrence-light.svg and docs/recurrence-dark.svg.

They show segments, memory, and what one query depends on.

python docs/figures/recurrence.py
"""

from pathlib import Path

from themes import THEMES

L, SEGMENTS, LAYERS = 4, 4, 3  # The memory of a segment is the segment before it.
CELL, GAP, LEFT, TOP = 30, 16, 118, 46  # Pixels; a gap is between segments.


def column(position: int) -> int:
    """Returns the left edge of a token's column, in pixels."""
    return LEFT + position * CELL + position // L * GAP


def row(layer: int) -> int:
    """Returns the upper edge of a layer's row, in pixels; layer 0 is the embeddings."""
    return TOP + (LAYERS - layer) * (CELL + 14)


def svg(ink: str, faint: str, line: str, segment: str, memory: str) -> str:
    """Returns the picture in the colours of a theme."""
    length, current = L * SEGMENTS, SEGMENTS - 1
    parts = []

    def text(
        x: float, y: float, words: str, *, anchor: str = "middle", color: str = ink, size: int = 13
    ) -> None:
        parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}" '
            f'font-size="{size}">{words}</text>'
        )

    for number in range(SEGMENTS):
        label = ("segment t" if number == current else f"t \u2212 {current - number}") + (
            ", memory" * (number == current - 1)
        )
        text(column(number * L) + L * CELL / 2, TOP - 14, label)
    for layer in range(LAYERS + 1):
        text(LEFT - 12, row(layer) + 20, f"layer {layer}" if layer else "embeddings", anchor="end")
        # What the query in the last place of the top layer depends on: each layer reaches one
        # memory further.
        reached = (
            range(max(0, current - LAYERS + layer) * L, length)
            if layer < LAYERS
            else range(length - 1, length)
        )
        for position in range(length):
            color = (
                faint
                if position not in reached
                else segment
                if position // L == current
                else memory
            )
            parts.append(
                f'<rect x="{column(position) + 2}" y="{row(layer) + 2}" width="{CELL - 4}" '
                f'height="{CELL - 4}" rx="5" fill="{color}"/>'
            )
    top = row(LAYERS) + CELL - 2
    for position in range((current - 1) * L, length):  # The keys of the query.
        below = row(LAYERS - 1) + 2
        parts.append(
            f'<line x1="{column(length - 1) + CELL / 2}" y1="{top}" '
            f'x2="{column(position) + CELL / 2}" y2="{below}" stroke="{line}" stroke-width="1.2"/>'
        )
    x = column(length - 1) + CELL + 12
    text(x, row(LAYERS) + 20, "one query", anchor="start")
    text(x, row(LAYERS - 1) + 20, "its keys", anchor="start")
    foot = row(0) + CELL + 26
    for x, color, words in (
        (LEFT, segment, "computed now, with gradients"),
        (LEFT + 236, memory, "past segments, read through the memory (no gradient)"),
    ):
        parts.append(
            f'<rect x="{x}" y="{foot - 12}" width="14" height="14" rx="3" fill="{color}"/>'
        )
        text(x + 22, foot, words, anchor="start")
    width, height = column(length - 1) + CELL + 100, foot + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    """Writes both files."""
    for name, colors in THEMES.items():
        (Path(__file__).parents[1] / f"recurrence-{name}.svg").write_text(svg(**colors))


if __name__ == "__main__":
    main()
