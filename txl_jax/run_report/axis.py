"""Axes of charts: the range, the ticks, and numbers as text."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
      low: the value at its beginning.
      high: the value at its end.
      log: whether it is logarithmic.
      labels: names of the values 0, 1, ...; empty: numbers.
    """

    low: float
    high: float
    log: bool = False
    labels: tuple[str, ...] = ()

    def place(self, value: float) -> float:
        """Returns where a value lies: 0 at the beginning, 1 at the end; beyond them outside of the axis.

        >>> Axis(1, 100, log=True).place(10)
        0.5
        """
        low, high, value = (math.log(max(x, 1e-300)) if self.log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """Returns about `count` round values of the axis, with their text.

        >>> Axis(0, 2000).ticks()
        [(0.0, '0'), (500.0, '500'), (1000.0, '1,000'), (1500.0, '1,500'), (2000.0, '2,000')]
        >>> [text for _, text in Axis(80, 1200, log=True).ticks()]
        ['100', '200', '500', '1,000']
        """
        if self.labels:
            return [(float(i), label) for i, label in enumerate(self.labels)]
        values = _log_ticks(self.low, self.high, count) if self.log else _ticks(self.low, self.high, count)
        return list(zip(values, axis_texts(values), strict=True))


def axis_over(values: Iterable[float], *, log: bool = False, margin: float = 0.06) -> Axis:
    """Returns an axis over all of the values, with a margin on both sides; the values are positive if `log`.

    >>> axis_over([1.0, 3.0], margin=0.5)
    Axis(low=0.0, high=4.0, log=False, labels=())
    """
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    if log:
        low, high = math.log(low), math.log(high)
    space = (high - low) * margin or abs(high) * 0.05 or 0.5
    low, high = low - space, high + space
    return Axis(math.exp(low), math.exp(high), log=True) if log else Axis(low, high)


def is_spread(values: Sequence[float]) -> bool:
    """Returns whether positive values differ by so much that only a logarithmic axis shows them.

    >>> is_spread([0.0001, 0.01]), is_spread([1, 3]), is_spread([0, 100])
    (True, False, False)
    """
    return min(values) > 0 and max(values) / min(values) >= 8


def axis_texts(values: Sequence[float]) -> list[str]:
    """Formats the values of an axis alike.

    >>> axis_texts([0.5, 1.0]), axis_texts([1000, 2000]), axis_texts([0.0001, 0.001])
    (['0.5', '1.0'], ['1,000', '2,000'], ['0.0001', '0.001'])
    """
    if len(values) > 1 and max(values) / max(min((abs(x) for x in values if x), default=1), 1e-300) >= 8:
        return [short(value) for value in values]
    steps = [abs(b - a) for a, b in itertools.pairwise(values)] or [abs(value) for value in values]
    step = min(steps, default=1) or 1
    digits = max(0, -int((math.log10(step) + 1e-9) // 1))
    digits += any(abs(value * 10**digits - round(value * 10**digits)) > 1e-6 for value in values)
    return [f"{value:,.{digits}f}" for value in values]


def short(value: float) -> str:
    """Formats a number in four significant digits or with all of its integer ones, without an exponent where it can be.

    >>> short(1234567), short(0.00025), short(3.14159), short(2e-9), short(1.5e13)
    ('1,234,567', '0.00025', '3.142', '2e-09', '1.5e+13')
    """
    if value == 0:
        return "0"
    size = int(math.log10(abs(value)) // 1)
    if not -6 <= size < 9:
        return f"{value:.3g}"
    text = f"{value:,.{max(0, 3 - size)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _ticks(low: float, high: float, count: int) -> list[float]:
    rough = (high - low) / max(count, 1)
    size = 10.0 ** (math.log10(rough) // 1)
    step = next(size * part for part in (1, 2, 2.5, 5, 10) if size * part >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), int((high / step + 1e-9) // 1)
    return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    first, last = int(math.log10(low) // 1), math.ceil(math.log10(high))
    for parts in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{part}e{power}") for power in range(first, last + 1) for part in parts]
        found = [value for value in found if low * 0.999 <= value <= high * 1.001]
        if len(found) <= count + 2:
            break
    return found if len(found) >= 3 else [value for value in _ticks(low, high, count) if value > 0]
