"""Metrics from summed nats: loss, bits per token and per byte, perplexity."""

import dataclasses
import enum
import math

import numpy as np

_MOST_PERPLEXITY = 1e9  # A larger perplexity only shows that the run diverged.
_LARGEST_EXPONENT = 700  # exp overflows just above 709.


class Measure(enum.StrEnum):
    """The measure in which a per-token loss is usually reported."""

    BPC = "bpc"  # Bits per character.
    BPB = "bits per byte"  # The same number, for byte tokens.
    PPL = "ppl"  # Perplexity.

    @property
    def is_bits(self) -> bool:
        """Whether it is bits per token, for characters or bytes. Records call both "bpc"."""
        return self is not Measure.PPL


@dataclasses.dataclass(frozen=True)
class Totals:
    """Losses summed over scored tokens. `a + b` is the sum over both documents.

    >>> total = Totals(nats=math.log(2) * 10, tokens=10) + Totals(nats=math.log(8) * 10, tokens=10)
    >>> total.bits_per_token
    2.0
    >>> round(total.perplexity, 3)
    4.0
    """

    nats: float = 0.0  # Sum of the losses.
    tokens: float = 0.0  # Number of scored tokens.
    bytes: float = 0.0  # UTF-8 bytes of the tokens' text, or 0 if unknown, as after `a + b`.

    @classmethod
    def of(cls, nats: np.ndarray) -> "Totals":
        """Sums the nats of tokens in double precision."""
        return cls(nats.sum(dtype=np.float64).item(), float(nats.size))

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.nats + other.nats, self.tokens + other.tokens)

    @property
    def nll(self) -> float:
        """Nats per token, or nan if nothing was scored."""
        if self.tokens == 0:
            return math.nan
        return self.nats / self.tokens

    @property
    def bits_per_token(self) -> float:
        """Bits per token, which is bits per byte or character (bpc) if the tokens are these."""
        return self.nll / math.log(2)

    @property
    def perplexity(self) -> float:
        """Perplexity, exp of the mean over tokens: inf if it overflows, nan if the mean is nan."""
        if self.nll >= _LARGEST_EXPONENT:
            return math.inf
        return math.exp(self.nll)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text, for any kind of tokens, or nan if its bytes are unknown."""
        if self.bytes == 0:
            return math.nan
        return self.bits_per_token * (self.tokens / self.bytes)

    def per_token(self, measure: Measure) -> dict[str, float]:
        """Returns the loss in nats, bits and perplexity by their names in records.

        Bits of characters and bytes are recorded as bpc, and bits of bytes also as bits_per_byte.
        """
        values = {"loss": self.nll}
        if measure.is_bits:
            values["bpc"] = self.bits_per_token
        if measure is Measure.BPB:
            values["bits_per_byte"] = self.bits_per_token
        values["bits_per_token"] = self.bits_per_token
        values["perplexity"] = self.perplexity
        return values

    @property
    def diverged(self) -> bool:
        """Whether the perplexity is above 1e9: the run diverged."""
        return self.perplexity > _MOST_PERPLEXITY

    def value(self, measure: Measure) -> float:
        """Returns the value of a measure."""
        return self.bits_per_token if measure.is_bits else self.perplexity

    def format(self, measure: Measure) -> str:
        """Formats a measure and its value.

        >>> Totals(nats=math.log(100) * 10, tokens=10).format(Measure.PPL)
        'ppl 100.00'
        """
        return format_score(self.value(measure), measure)


def format_score(value: float, measure: Measure) -> str:
    """Formats a measure and its value. A perplexity above 1e9 becomes ">1e9"."""
    if measure is Measure.PPL and value > _MOST_PERPLEXITY:
        return "ppl >1e9"
    decimals = 4 if measure.is_bits else 2
    return f"{measure} {value:.{decimals}f}"
