"""Draws the pictures of docs/concepts.md, each as docs/concepts-NAME-light.svg and -dark.svg.

    python docs/figures/concepts.py

They are narrow, so that their words can be read on a telephone. What attends to what is computed by
the library, so that the pictures show what it does.
"""

import csv
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from themes import THEMES

from experiments.bench.timing import EXPONENT, SHIFT
from txl_jax import Visibility
from txl_jax.memory import documents

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 520  # Pixels.
# Further colors, of clusters and of words on cells.
MORE_COLORS = {
    "light": {
        "tail": "#0f9d8a",
        "on_segment": "#ffffff",
        "on_memory": "#1f2933",
        "on_faint": "#52606d",
    },
    "dark": {
        "tail": "#4cc9b0",
        "on_segment": "#10162f",
        "on_memory": "#1f2933",
        "on_faint": "#b8c2cc",
    },
}


class Canvas:
    """A picture in the colours of a theme, to which shapes are added from the top to the bottom."""

    def __init__(self, colors: dict[str, str]):
        self.colors = colors
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        color: str = "ink",
        size: int = 15,
        bold: bool = False,
    ) -> None:
        """Writes words whose baseline is at y."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{self.colors[color]}" '
            f'font-size="{size}"{weight}>{words}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: str,
        words: str = "",
        *,
        size: int = 15,
        radius: int = 4,
    ) -> None:
        """Draws a filled box, and words in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
            f'fill="{self.colors[color]}"/>'
        )
        if words:
            middle = y + height / 2 + size * 0.36
            self.text(x + width / 2, middle, words, anchor="middle", color=f"on_{color}", size=size)

    def frame(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Draws the outline of a box."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="none" '
            f'stroke="{self.colors[color]}" stroke-width="2.5"/>'
        )

    def shape(self, points: list[tuple[float, float]], color: str) -> None:
        """Fills a polygon, half transparent."""
        corners = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polygon points="{corners}" fill="{self.colors[color]}" opacity="0.35"/>'
        )

    def legend(self, x: float, y: float, color: str, words: str) -> None:
        """Draws a small box with the words that explain its colour."""
        self.box(x, y - 12, 14, 14, color, radius=3)
        self.text(x + 22, y, words)

    def svg(self, height: float) -> str:
        """Returns the file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}" font-family="system-ui, sans-serif">\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def draw_memory(canvas: Canvas) -> float:
    """Draws a text that is read in training and in evaluation, one row per step.

    Returns:
      The height of the picture.
    """
    y = 22.0
    y = _reading(canvas, y, "Training: segments of 4, memory of 4", segment_len=4, mem_len=4)
    y = _reading(canvas, y + 34, "Evaluation: segments of 2, memory of 8", segment_len=2, mem_len=8)
    canvas.legend(84, y + 32, "segment", "segment: computed in this step")
    canvas.legend(84, y + 56, "memory", "memory: states of past steps, read only")
    canvas.legend(84, y + 80, "faint", "not attended to in this step")
    return y + 94


def _reading(canvas: Canvas, y: float, title: str, *, segment_len: int, mem_len: int) -> float:
    """Draws the steps in which 16 tokens are read. Returns the lower edge."""
    n_token = 16
    left = 84
    cell = 26
    row = 24
    canvas.text(left, y, title, bold=True)
    top = y + 14
    for step in range(n_token // segment_len):
        row_top = top + row * step
        canvas.text(left - 12, row_top + 17, f"step {step + 1}", anchor="end")
        start = step * segment_len
        for token in range(n_token):
            color = "faint"
            if start <= token < start + segment_len:
                color = "segment"
            elif start - mem_len <= token < start:
                color = "memory"
            canvas.box(left + token * cell + 1, row_top + 2, cell - 3, row - 5, color)
    return top + row * (n_token // segment_len)


def draw_mask(canvas: Canvas) -> float:
    """Draws which keys each query attends to, and at which distances.

    Returns:
      The height of the picture.
    """
    y = 22.0
    y = _mask(canvas, y, "Plain: later queries have more keys", window=None, clamp_len=None)
    y = _mask(canvas, y + 36, "same_length: each query has 4 keys", window=4, clamp_len=None)
    y = _mask(canvas, y + 36, "clamp_len 3: larger distances count as 3", window=None, clamp_len=3)
    canvas.legend(88, y + 30, "memory", "key in the memory")
    canvas.legend(268, y + 30, "segment", "key in the segment")
    canvas.text(88, y + 54, "Numbers: distance from query to key")
    canvas.box(88, y + 64, 18, 18, "memory")
    canvas.frame(90, y + 66, 14, 14, "on_memory")
    canvas.text(114, y + 78, "clamped distance")
    return y + 90


def _mask(
    canvas: Canvas, y: float, title: str, *, window: int | None, clamp_len: int | None
) -> float:
    """Draws the pairs of four queries and eight keys. Returns the lower edge."""
    length = 4
    left = 88
    cell = 42
    row = 30
    memory_len = jnp.full(1, length, jnp.int32)
    visibility = Visibility(memory_len, length, length, window=window)
    mask_LxK = np.asarray(visibility.mask()[0])
    # Distances are sorted from K - 1 down to 0.
    distances_K = np.asarray(visibility.distances(clamp_len=clamp_len))
    right = left + visibility.n_keys * cell + 16

    canvas.text(left, y, title, bold=True)
    top = y + 14
    for query in range(length):
        row_top = top + row * query
        canvas.text(left - 12, row_top + 20, f"query {query + 1}", anchor="end")
        for key in range(visibility.n_keys):
            x = left + key * cell
            color = "memory"
            if key >= length:
                # A gap is between memory and segment.
                x += 6
                color = "segment"

            if not mask_LxK[query, key]:
                canvas.box(x + 1, row_top + 1, cell - 3, row - 3, "faint")
                continue
            distance = length + query - key
            clamped = distances_K[visibility.n_keys - 1 - distance]
            canvas.box(x + 1, row_top + 1, cell - 3, row - 3, color, str(clamped))
            if clamped != distance:
                canvas.frame(x + 3.5, row_top + 3.5, cell - 8, row - 8, "on_memory")
        n_key = int(mask_LxK[query].sum())
        canvas.text(right, row_top + 20, f"{n_key} keys")
    return top + row * length


def draw_softmax(canvas: Canvas) -> float:
    """Draws the clusters of WikiText-103's vocabulary: words, tokens, and sizes.

    Returns:
      The height of the picture.
    """
    cutoffs = [0, 20_000, 40_000, 200_000, 267_735]
    names = ["head", "tail 1", "tail 2", "tail 3"]
    colors = ["segment", "memory", "line", "tail"]
    left = 10
    full = 500  # Width of the bars.
    total = cutoffs[-1]
    # Words by rank, as frequent as in the benchmarks (Zipf-Mandelbrot).
    frequency = (np.arange(1, total + 1) + SHIFT) ** -EXPONENT
    cumulative = np.concatenate([[0], np.cumsum(frequency) / frequency.sum()])

    def words_to_x(cutoff: int) -> float:
        return left + full * cutoff / total

    def tokens_to_x(cutoff: int) -> float:
        return left + full * float(cumulative[cutoff])

    canvas.text(left, 22, "Vocabulary: 267,735 words, most frequent first", bold=True)
    canvas.text(left, 170, "The same words, by how often they occur in a text")
    clusters = list(itertools.pairwise(cutoffs))  # (first word, first word of the next cluster)
    for number, (first, last) in enumerate(clusters):
        color = colors[number]

        # The upper bar is divided by words, the lower one by tokens.
        upper_left = words_to_x(first)
        upper_right = words_to_x(last)
        lower_left = tokens_to_x(first)
        lower_right = tokens_to_x(last)
        corners = [(upper_left, 68), (upper_right, 68), (lower_right, 118), (lower_left, 118)]
        canvas.shape(corners, color)
        canvas.box(upper_left, 36, upper_right - upper_left - 1, 32, color, radius=2)
        canvas.box(lower_left, 118, lower_right - lower_left - 1, 32, color, radius=2)
    share = cumulative[cutoffs[1]]
    canvas.text(tokens_to_x(0) + 12, 139, f"head: {share:.0%}", color="on_segment")

    canvas.text(left, 216, "Clusters, and the size of a word's vector (div_val 4)", bold=True)
    y = 232
    for number, (first, last) in enumerate(clusters):
        words = f"{names[number]}: {last - first:,} words"
        if number == 0:
            words += " + one entry per tail"
        size = 1024 // 4**number
        # The smallest size, 16, would be hard to see.
        canvas.box(left, y, max(size / 1024 * full, 6), 24, colors[number], radius=2)
        canvas.text(left, y + 43, f"{words}, size {size:,}")
        y += 58
    return y + 6


def draw_documents(canvas: Canvas) -> float:
    """Draws the keys of one query in a segment with three documents.

    Returns:
      The height of the picture.
    """
    words = ["A", "A", "A", "end", "B", "B", "end", "C", "C", "C"]
    end_token = 1
    tokens = jnp.asarray([[end_token if word == "end" else 0 for word in words]])
    query = 5  # The second B.
    y = 22.0
    left = 10
    cell = 50
    panels = [
        ("By default, documents run into each other", None),
        ("With data.reset_at, each starts afresh", end_token),
    ]
    for title, token in panels:
        length = len(words)
        no_memory = jnp.zeros(1, jnp.int32)
        starts = documents(tokens, token)
        if starts is None:
            visibility = Visibility(no_memory, length, 0)
        else:
            visibility = Visibility(no_memory, length, 0, document_start=starts.start)
        is_key = np.asarray(visibility.mask()[0, query])
        canvas.text(left, y, title, bold=True)
        for position, word in enumerate(words):
            color = "memory" if is_key[position] else "faint"
            canvas.box(left + position * cell + 1, y + 14, cell - 4, 34, color, word)
        canvas.frame(left + query * cell + 4, y + 17, cell - 10, 28, "on_memory")
        y += 88
    canvas.legend(left, y - 6, "memory", "token that the framed query attends to")
    return y + 8


def draw_tokens(canvas: Canvas) -> float:
    """Draws three words for "to read" as characters and as bytes, with their bits.

    Returns:
      The height of the picture.
    """
    y = 22.0
    left = 10
    cell = 36  # A byte.
    for name, word in (("English", "read"), ("Russian", "читать"), ("Chinese", "阅读")):
        n_byte = len(word.encode())
        per_character = 2 * n_byte / len(word)
        title = f"{name}: {len(word)} characters, {n_byte} bytes"
        canvas.text(left, y, title, bold=True)
        x = float(left)
        for character in word:
            encoded = character.encode()
            width = cell * len(encoded)
            canvas.box(x + 1, y + 12, width - 3, 30, "segment", character, size=18)
            for number, byte in enumerate(encoded):
                place = x + number * cell
                canvas.box(place + 1, y + 44, cell - 3, 26, "memory", f"{byte:x}")
            x += width
        # A wide word leaves no place on its right.
        canvas.text(left, y + 91, f"2 bits per byte = {per_character:g} bits per character")
        y += 132
    return y - 28


def draw_reach(canvas: Canvas) -> float:
    """Draws how well a probe names a topic, by the distance to the only word that tells it.

    Returns:
      The height of the picture.
    """
    distances = (0, 128, 512, 1024, 1152)
    accuracies = _accuracies(distances)
    left = 60
    bottom = 232
    height = 160  # An accuracy of 1.
    group = 88  # From one pair of bars to the next.
    bar = 34
    canvas.text(10, 22, "Accuracy of the topic, 2 layers x memory of 512", bold=True)
    for value in (0, 0.5, 1):
        y = bottom - value * height
        canvas.text(left - 10, y + 5, f"{value:.0%}", anchor="end")
        canvas.box(left, y - 0.5, group * len(distances), 1, "line", radius=0)
    for number, distance in enumerate(distances):
        x = left + number * group + 10
        with_memory, without = accuracies[distance]
        canvas.box(x, bottom - with_memory * height, bar, with_memory * height, "memory", radius=2)
        canvas.box(x + bar + 2, bottom - without * height, bar, without * height, "line", radius=2)
        canvas.text(x + bar, bottom + 20, f"{distance:,}", anchor="middle")
    canvas.text(left, bottom + 44, "tokens since the only word that names the topic")
    canvas.legend(left, bottom + 72, "memory", "with memory")
    canvas.legend(left + 160, bottom + 72, "line", "without")
    return bottom + 86


def _accuracies(distances: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    """Reads benchmarks/singles.csv.

    Returns:
      The accuracies with and without memory, by distance.
    """
    value_of = {}
    with (ROOT / "benchmarks" / "singles.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if "document_embeddings.py" in row["command"]:
                value_of[row["measure"]] = float(row["value"])

    results = {}
    for distance in distances:
        with_memory = value_of[f"accuracy of a probe, {distance} tokens after the topic"]
        without = value_of[f"the same without memory, {distance} tokens"]
        results[distance] = (with_memory, without)
    return results


PICTURES: dict[str, Callable[[Canvas], float]] = {
    "memory": draw_memory,
    "mask": draw_mask,
    "softmax": draw_softmax,
    "documents": draw_documents,
    "tokens": draw_tokens,
    "reach": draw_reach,
}


def draw(folder: Path) -> None:
    """Writes all pictures, in both themes."""
    for name, draw_picture in PICTURES.items():
        for theme, shared_colors in THEMES.items():
            colors = shared_colors | MORE_COLORS[theme]
            canvas = Canvas(colors)
            height = draw_picture(canvas)
            path = folder / f"concepts-{name}-{theme}.svg"
            path.write_text(canvas.svg(height), encoding="utf-8")


if __name__ == "__main__":
    folder = ROOT / "docs"
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    draw(folder)
