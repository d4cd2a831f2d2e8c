"""Draws docs/recurrence-light.svg and docs/recurrence-dark.svg.

    python docs/figures/recurrence.py

They show segments, memory, and what one query depends on: the query of the last token in the top
layer.
"""

from pathlib import Path

from themes import THEMES

L = 4  # Tokens in a segment. The memory of a segment is the segment before it.
SEGMENTS = 4
LAYERS = 3
CURRENT = SEGMENTS - 1  # Number of the segment that is computed now.
POSITIONS = L * SEGMENTS

# Pixels.
CELL = 30
GAP = 16  # Between segments.
LEFT = 118
TOP = 46


def column(position: int) -> int:
    """Returns the left edge of a token's column, in pixels."""
    return LEFT + position * CELL + position // L * GAP


def row(layer: int) -> int:
    """Returns the upper edge of a layer's row, in pixels. Layer 0 is the embeddings."""
    return TOP + (LAYERS - layer) * (CELL + 14)


def first_reached(layer: int) -> int:
    """Returns the first position of a layer that the query depends on. All later ones follow."""
    if layer == LAYERS:
        return POSITIONS - 1
    # Each layer reaches one memory further.
    segment = max(0, CURRENT - LAYERS + layer)
    return segment * L


def segment_name(number: int) -> str:
    """Returns the words above a segment."""
    if number == CURRENT:
        return "segment t"
    name = f"t \u2212 {CURRENT - number}"
    if number == CURRENT - 1:
        name += ", memory"
    return name


def text(x: float, y: float, words: str, *, anchor: str, color: str) -> str:
    """Returns words whose baseline is at y."""
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}" font-size="13">{words}</text>'
    )


def box(x: float, y: float, *, size: int, radius: int, color: str) -> str:
    """Returns a filled square."""
    return f'<rect x="{x}" y="{y}" width="{size}" height="{size}" rx="{radius}" fill="{color}"/>'


def svg(ink: str, faint: str, line: str, segment: str, memory: str) -> str:
    """Returns the picture in the colors of a theme."""
    parts = []
    for number in range(SEGMENTS):
        middle = column(number * L) + L * CELL / 2
        parts.append(text(middle, TOP - 14, segment_name(number), anchor="middle", color=ink))

    for layer in range(LAYERS + 1):
        name = "embeddings"
        if layer > 0:
            name = f"layer {layer}"
        parts.append(text(LEFT - 12, row(layer) + 20, name, anchor="end", color=ink))
        for position in range(POSITIONS):
            color = memory
            if position < first_reached(layer):
                color = faint
            elif position // L == CURRENT:
                color = segment
            x = column(position) + 2
            parts.append(box(x, row(layer) + 2, size=CELL - 4, radius=5, color=color))

    # Lines from the query down to its keys.
    query_x = column(POSITIONS - 1) + CELL / 2
    query_y = row(LAYERS) + CELL - 2
    key_y = row(LAYERS - 1) + 2
    for position in range(first_reached(LAYERS - 1), POSITIONS):
        key_x = column(position) + CELL / 2
        parts.append(
            f'<line x1="{query_x}" y1="{query_y}" x2="{key_x}" y2="{key_y}" stroke="{line}" '
            f'stroke-width="1.2"/>'
        )
    right = column(POSITIONS - 1) + CELL + 12
    parts.append(text(right, row(LAYERS) + 20, "one query", anchor="start", color=ink))
    parts.append(text(right, row(LAYERS - 1) + 20, "its keys", anchor="start", color=ink))

    # The legend.
    foot = row(0) + CELL + 26
    legend = (
        (LEFT, segment, "computed now, with gradients"),
        (LEFT + 236, memory, "past segments, read through the memory (no gradient)"),
    )
    for x, color, words in legend:
        parts.append(box(x, foot - 12, size=14, radius=3, color=color))
        parts.append(text(x + 22, foot, words, anchor="start", color=ink))

    width = column(POSITIONS - 1) + CELL + 100
    height = foot + 14
    shapes = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif">\n{shapes}\n</svg>\n'
    )


def main() -> None:
    """Writes both files."""
    docs = Path(__file__).parents[1]
    for name, colors in THEMES.items():
        (docs / f"recurrence-{name}.svg").write_text(svg(**colors))


if __name__ == "__main__":
    main()
