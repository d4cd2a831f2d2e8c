"""Draws docs/skew.png: scores by distance, moved into place by the relative shift.

The picture shows both causal attention and attention to both sides.

    python docs/figures/skew.py

The cells are moved by the library's own functions, so that the picture shows what it does. Needs
matplotlib (`plots`).
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from txl_jax import Visibility
from txl_jax.ops.attention.distances import relative_shift, skew

L = 4  # Queries.

# Colors.
HIDDEN = "#e8e8e8"  # Scores that are not used.
INK = "#1f2933"
TILE = "#c2185b"

# The tile that is marked.
FIRST_QUERY = 2
FIRST_KEY = 1
N_QUERY = 2
N_KEY = 3


def columns_by_key(visibility: Visibility) -> np.ndarray:
    """Returns the column of the scores by distance that each pair reads: int [L, K]."""
    # The library moves the columns' numbers as it moves scores.
    column_LxP = jnp.broadcast_to(jnp.arange(visibility.n_positions), (L, visibility.n_positions))
    if visibility.causal:
        return np.asarray(relative_shift(column_LxP))
    return np.asarray(skew(column_LxP, visibility.n_keys))


def draw_cell(
    axes: Axes,
    row: int,
    column: int,
    distance: int,
    largest: int,
    *,
    is_used: bool,
    is_in_tile: bool,
) -> None:
    """Draws one score, colored by its distance.

    Args:
      axes: Where to draw.
      row: Number of the query.
      column: Number of the column.
      distance: Distance from the query to the score's key.
      largest: Largest distance of the picture.
      is_used: Whether the query attends to the key. If not, the cell is grey.
      is_in_tile: Whether the marked tile has the score.
    """
    # Shades begin slightly off the middle of the color map, which is white.
    shade = colormaps["PuOr"](0.5 + 0.42 * (distance + 0.6) / (largest + 0.6))
    color = shade if is_used else HIDDEN
    axes.add_patch(
        Rectangle((column, row), 1, 1, facecolor=color, edgecolor="white", linewidth=1.5)
    )
    if is_used:
        is_dark = np.mean(shade[:3]) < 0.62
        axes.text(
            column + 0.5,
            row + 0.52,
            str(distance),
            color="white" if is_dark else INK,
            weight="bold" if is_in_tile else "normal",
            ha="center",
            va="center",
            fontsize=11,
        )


def is_in_tile(query: int, key: int) -> bool:
    """Returns whether a pair is in the tile that is marked."""
    is_query = FIRST_QUERY <= query < FIRST_QUERY + N_QUERY
    is_key = FIRST_KEY <= key < FIRST_KEY + N_KEY
    return is_query and is_key


def draw_frame(axes: Axes, row: int, column: int, n_row: int, n_column: int) -> None:
    """Draws the frame of a tile."""
    inset = 0.05
    axes.add_patch(
        Rectangle(
            (column + inset, row + inset),
            width=n_column - 2 * inset,
            height=n_row - 2 * inset,
            fill=False,
            edgecolor=TILE,
            linewidth=2.5,
            zorder=3,
        )
    )


def label(axes: Axes, *, title: str, columns: list[str], below: str) -> None:
    """Writes the names of rows and columns."""
    axes.set_title(title, fontsize=11, color=INK, pad=22)
    axes.set(xlim=(0, len(columns)), ylim=(L, 0), aspect="equal")
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.set_yticks(np.arange(L) + 0.5, [f"query {i}" for i in range(L)])
    axes.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=9, colors=INK)
    axes.set_xlabel(below, fontsize=9, color=INK, labelpad=8)
    axes.spines[:].set_visible(False)


def draw_pair(left: Axes, right: Axes, visibility: Visibility, *, name: str) -> None:
    """Draws the scores of one kind of attention by distance, to the left, and by key."""
    distances = np.asarray(visibility.distances())  # Of the P columns.
    column_LxK = columns_by_key(visibility)
    visible_LxK = np.asarray(visibility.mask()[0])
    largest = int(np.max(np.abs(distances)))

    for i in range(L):
        # Keys that the query attends to, by their column to the left. Other entries of
        # `column_LxK` mean nothing.
        key_of: dict[int, int] = {}
        for j in np.flatnonzero(visible_LxK[i]).tolist():
            key_of[int(column_LxK[i, j])] = j

        for p, distance in enumerate(distances.tolist()):
            is_used = p in key_of
            draw_cell(
                left,
                i,
                p,
                distance,
                largest,
                is_used=is_used,
                is_in_tile=is_used and is_in_tile(i, key_of[p]),
            )

        for j in range(visibility.n_keys):
            distance = visibility.mem_len + i - j
            is_used = bool(visible_LxK[i, j])
            if is_used:
                assert distance == distances[column_LxK[i, j]]
            draw_cell(
                right,
                i,
                j,
                distance,
                largest,
                is_used=is_used,
                is_in_tile=is_in_tile(i, j),
            )

    first_column = L - N_QUERY - FIRST_QUERY + FIRST_KEY
    draw_frame(left, FIRST_QUERY, first_column, N_QUERY, N_QUERY + N_KEY - 1)
    draw_frame(right, FIRST_QUERY, FIRST_KEY, N_QUERY, N_KEY)
    frame = f"frame: the {N_QUERY} + {N_KEY} - 1 columns that the tile needs"
    label(
        left,
        title=f"{name}: (q + v) · r, one column per distance",
        columns=[str(distance) for distance in distances],
        below=f"{frame}; bold: what it takes",
    )
    memory = [f"mem {j}" for j in range(visibility.mem_len)]
    label(
        right,
        title=f"row i moved left by {L - 1} - i: one column per key",
        columns=memory + [f"key {j}" for j in range(L)],
        below=f"frame: a tile of {N_QUERY} queries and {N_KEY} keys; grey: not used",
    )


def draw(path: Path) -> None:
    """Writes the picture."""
    figure = Figure(figsize=(11, 6.6), dpi=110, facecolor="white")
    upper, lower = figure.subplots(2, 2, width_ratios=(1, 1))

    memory_len = jnp.full(1, 3, jnp.int32)
    causal = Visibility(memory_len, L, 3)
    draw_pair(upper[0], upper[1], causal, name=f"causal, L {L}, M 3")

    no_memory = jnp.zeros(1, jnp.int32)
    bidirectional = Visibility(no_memory, L, 0, causal=False)
    draw_pair(lower[0], lower[1], bidirectional, name=f"bidirectional, L {L}")

    figure.tight_layout(w_pad=4, h_pad=3)
    figure.savefig(path)


if __name__ == "__main__":
    picture = Path(__file__).parents[1] / "skew.png"
    if len(sys.argv) > 1:
        picture = Path(sys.argv[1])
    draw(picture)
