"""Charts as HTML with inline SVG: lines stretch with the page, and texts keep their size."""

import dataclasses
import html
import json
from collections.abc import Iterator, Sequence

from txl_jax.run_report.axis import Axis

_SIDE = 1000  # Of the SVG's own square, which is stretched to the plot.
_MOST_POINTS = 400  # Of a line: more are narrower than a pixel.
NEUTRAL = -1  # The color of what is not named by itself.
COLORS = 8

Points = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
      name: beside the pointer, and in the legend; empty: drawn, and in neither.
      points: (x, y), by x.
      color: a number below `COLORS`, or `NEUTRAL`.
      style: "line", "thin", "dots" or "marked" (a line with a dot at each point).
      spread: half the height of the band around each point, or of the bar through it; empty: none.
    """

    name: str
    points: Points
    color: int = 0
    style: str = "line"
    spread: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
      title: with the unit of y.
      x_title: below the axis.
      source: the files and records that it is drawn from.
      bars: draws spreads as bars through the points instead of a band.
      small: drawn lower, for several beside each other.
      legend: whether the names are listed; else the colors are those of a chart above.
    """

    title: str
    x_title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    source: str
    bars: bool = False
    small: bool = False
    legend: bool = True

    def html(self) -> str:
        """Returns the chart as a figure."""
        named, title = [series for series in self.series if series.name], html.escape(self.title)
        return "\n".join(
            [
                f'<figure class="chart{" small" if self.small else ""}">',
                f"<figcaption>{title}</figcaption>",
                *self._legend(named),
                '<div class="plot">',
                f'<svg viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none" role="img" aria-label="{title}">',
                *self._grid(),
                *(line for series in self.series for line in self._draw(series)),
                "</svg>",
                *self._labels(),
                '<div class="cursor" hidden></div><div class="tip" hidden></div>',
                "</div>",
                f'<p class="x-title">{html.escape(self.x_title)}</p>',
                f'<p class="source">{html.escape(self.source)}</p>',
                f'<script type="application/json">{self._data(named)}</script>',
                "</figure>",
            ]
        )

    def _legend(self, named: Sequence[Series]) -> Iterator[str]:
        if not self.legend or (len(named) < 2 and len(named) == len(self.series)):
            return
        entries = {series.name: series.color for series in named}
        items = "".join(
            f'<li><i class="{_color(color)}"></i>{html.escape(name)}</li>' for name, color in entries.items()
        )
        yield f'<ul class="legend">{items}</ul>'

    def _grid(self) -> Iterator[str]:
        for value, _ in self.y.ticks():
            yield f'<path class="grid" d="M0 {self._y(value)}H{_SIDE}"/>'

    def _draw(self, series: Series) -> Iterator[str]:
        points = thinned(series.points)
        places = [(self._x(x), self._y(y)) for x, y in points]
        color = _color(series.color)
        if series.spread and not self.bars:
            above = [f"{x} {self._y(y + half)}" for (x, _), (_, y), half in self._with_spread(series)]
            below = [f"{x} {self._y(y - half)}" for (x, _), (_, y), half in self._with_spread(series)]
            yield f'<path class="band {color}" d="M{"L".join([*above, *reversed(below)])}Z"/>'
        if series.spread and self.bars:
            bars = "".join(
                f"M{x} {self._y(y - half)}V{self._y(y + half)}" for (x, _), (_, y), half in self._with_spread(series)
            )
            yield f'<path class="bar {color}" d="{bars}"/>'
        if series.style != "dots" and len(places) > 1:
            line = "L".join(f"{x} {y}" for x, y in places)
            yield f'<path class="{"thin" if series.style == "thin" else "line"} {color}" d="M{line}"/>'
        if series.style in ("dots", "marked") or len(places) == 1:
            # A line without length and with round ends is a disk, also in a stretched drawing.
            yield f'<path class="dot {color}" d="{"".join(f"M{x} {y}h0" for x, y in places)}"/>'

    def _with_spread(self, series: Series) -> Iterator[tuple[tuple[str, str], tuple[float, float], float]]:
        for (x, y), half in zip(series.points, series.spread, strict=True):
            yield (self._x(x), self._y(y)), (x, y), half

    def _labels(self) -> Iterator[str]:
        for value, text in self.y.ticks():
            yield f'<span class="y" style="bottom:{100 * self.y.place(value):.2f}%">{html.escape(text)}</span>'
        ticks = self.x.ticks()
        for i, (value, text) in enumerate(ticks):
            sparse = " sparse" if len(ticks) > 4 and i % 2 else ""
            yield f'<span class="x{sparse}" style="left:{100 * self.x.place(value):.2f}%">{html.escape(text)}</span>'

    def _data(self, named: Sequence[Series]) -> str:
        """The points themselves, with all digits, which are shown at the pointer."""
        content = {
            "x": [self.x.low, self.x.high, self.x.log, list(self.x.labels)],
            "series": [
                {
                    "name": series.name,
                    "color": _color(series.color),
                    "points": [list(p) for p in thinned(series.points)],
                }
                for series in named
            ],
        }
        return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")

    def _x(self, value: float) -> str:
        return f"{_SIDE * self.x.place(value):.1f}"

    def _y(self, value: float) -> str:
        low = self.y.low if self.y.log else value
        return f"{_SIDE * min(max(1 - self.y.place(max(value, low)), -1), 2):.1f}"


def thinned(points: Points) -> Points:
    """Returns at most `_MOST_POINTS` or so of the points, evenly, with the first and the last.

    >>> len(thinned([(float(x), 1.0) for x in range(2001)])), thinned([(1.0, 2.0)])
    (335, [(1.0, 2.0)])
    """
    every = -(-len(points) // _MOST_POINTS)
    if every <= 1:
        return points
    return [point for i, point in enumerate(points) if i % every == 0 or i == len(points) - 1]


def _color(number: int) -> str:
    return "neutral" if number == NEUTRAL else f"c{number % COLORS}"
