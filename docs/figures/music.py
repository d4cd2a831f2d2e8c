"""Draws docs/music.png: two generated pieces as piano rolls, the second with a shorter memory.

    python docs/figures/music.py  # Reads docs/music.mid and docs/music-short-memory.mid.

docs/music.md has the commands that generated both files. Bars 9 to 16 are drawn below bars 1 to 8.
A bar that repeats the bar above has a colored background. Needs miditok and matplotlib (`plots`).
"""

import runpy
from pathlib import Path
from typing import Any

from symusic import Score

from txl_jax import plots

DOCS = Path(__file__).parent.parent
PICTURE = DOCS / "music.png"
PIECES = {
    "Memory of 256 tokens (10 bars)": "music.mid",
    "Memory of 128 tokens (5 bars)": "music-short-memory.mid",
}
BARS_PER_LINE = 8
LINES = 2
# Colors by Okabe and Ito, which people with any color vision can tell apart.
COLORS = {"violin": "#d55e00", "piano": "#0072b2"}
REPEATED = "#bfe3d5"


def main() -> None:
    """Draws both pieces."""
    example = runpy.run_path(str(DOCS / "examples" / "music.py"))
    drawing = plots.figure(6.4, width=8.4)
    panels = drawing.subplots(2 * LINES, 1)
    for number, (name, file) in enumerate(PIECES.items()):
        score = Score(DOCS / file)
        bars = example["bars_of"](score)
        lines = panels[LINES * number : LINES * (number + 1)]
        lowest, highest = pitch_range(bars)
        for line, plot in enumerate(lines):
            draw_line(plot, bars, BARS_PER_LINE * line, program_violin=example["VIOLIN"])
            plot.set(ylim=(lowest - 2, highest + 2))
        repeated = example["repeated_bars"]([score])
        lines[0].set_title(
            f"{name}: {8 * repeated:.0f} of bars 9 to 16 repeat the bar 8 bars before",
            fontsize=10,
            loc="left",
        )
    panels[-1].set_xlabel("bar")
    for instrument, color in COLORS.items():
        panels[0].plot([], [], color=color, linewidth=4, label=instrument)
    panels[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9)
    plots.save(drawing, PICTURE)


def pitch_range(bars: list[Any]) -> tuple[int, int]:
    """Returns the lowest and the highest MIDI pitch of the bars that are drawn."""
    pitches = [pitch for bar in bars[: LINES * BARS_PER_LINE] for _, pitch, _, _ in bar]
    return min(pitches), max(pitches)


def draw_line(plot: Any, bars: list[Any], first: int, *, program_violin: int) -> None:
    """Draws 8 bars, from the bar with the number `first` (from 0) on."""
    units_per_bar = 32  # Times of notes are in 1/8 of a beat.
    for number, bar in enumerate(bars[first : first + BARS_PER_LINE]):
        if first and bar == bars[number]:
            plot.axvspan(number, number + 1, color=REPEATED, linewidth=0, zorder=-1)
        for program, pitch, start, duration in bar:
            color = COLORS["violin" if program == program_violin else "piano"]
            left = number + start / units_per_bar
            # Two notes of the same pitch have a gap between them.
            length = duration / units_per_bar - 0.02
            plot.barh(pitch, length, left=left, height=0.9, color=color)
    plot.set(xlim=(0, BARS_PER_LINE), ylabel="pitch")
    plot.set_xticks(
        [number + 0.5 for number in range(BARS_PER_LINE)],
        labels=[str(first + number + 1) for number in range(BARS_PER_LINE)],
    )
    plot.tick_params(axis="x", length=0)
    for border in range(1, BARS_PER_LINE):
        plot.axvline(border, color="#cccccc", linewidth=0.8, zorder=0)
    plot.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
