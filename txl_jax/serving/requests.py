"""A request to write or score, checked, and the limits of the server; nothing here knows HTTP or a device."""

import dataclasses
import secrets
from typing import NamedTuple

import numpy as np

from txl_jax.inference.decode import Scores

_SEEDS = 1 << 32


class RequestError(Exception):
    """A request that is refused, or that ended early: one sentence, a status of HTTP and a code for programs."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a server."""

    body_bytes: int = 8 << 20  # Of a request.
    prompt_tokens: int = 200_000  # Maximum prompt tokens per request, summed over its choices.
    new_tokens: int = 4096  # `max_tokens` of a request.
    choices: int = 128  # Prompts times samples of a request.
    stop_strings: int = 16  # Of a request.
    stop_length: int = 256  # Characters of a stop string.
    waiting: int = 512  # Choices that wait for a row, of all requests; 429 beyond.
    seconds: float = 600  # Time of a request, in which it must be answered.
    body_seconds: float = 30  # Time in which its body must have come.


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The limits and seeds with which tokens are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0  # Taken modulo 2**32.
    sample: int = 0  # Number of the sample, among those of the same prompt and seed.

    @property
    def seed_bits(self) -> np.uint32:
        """The seed as the programs take it."""
        return np.uint32(self.seed % _SEEDS)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One text to read and to continue.

    Attributes:
      prompt: int32 [T], at least one token unless a session has one that is not read yet.
      max_tokens: tokens to write; 0: the prompt is read and scored only.
      sampling: how they are drawn.
      stop: strings that end the text, which does not include them.
      logprobs: whether tokens come with their logprobs.
      echo: whether the prompt's tokens do too.
    """

    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    echo: bool = False


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request of several choices."""

    choices: tuple[Choice, ...]
    echo: bool  # Whether texts begin with their prompts.
    logprobs: int | None  # Number of likeliest tokens; None: no logprobs.
    stream: bool
    include_usage: bool  # Whether a stream ends with the numbers of tokens.
    session: str | None


class Piece(NamedTuple):
    """The tokens and the text that one call has added to a choice.

    Attributes:
      text: what is certain of the text now.
      tokens: int32 [n], the tokens that were read, with `echo`, or written.
      scores: of these tokens; None: no logprobs were wanted, or of the first token of a memory, which nothing precedes.
      is_prompt: whether the tokens are of the prompt.
      end: "stop" or "length" with the last piece; None before.
    """

    text: str
    tokens: np.ndarray
    scores: Scores | None
    is_prompt: bool = False
    end: str | None = None


Event = Piece | RequestError


def draw_seed() -> int:
    """Returns the seed of a request that gives none."""
    return secrets.randbelow(_SEEDS)
