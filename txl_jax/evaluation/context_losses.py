"""Losses at exact context lengths: l(c, t) of appendix C, token t predicted from the c tokens before it and no others.

For each loss the c tokens are encoded again from an empty memory, so c = 500 costs 500 times as much as streaming; a
stride scores every s-th token instead of all.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from txl_jax.errors import UserError
from txl_jax.evaluation.sliding_window import WindowStep


def positions(n_token: int, *, longest: int, stride: int) -> np.ndarray:
    """Returns the tokens that are scored at every context length.

    They are every `stride`-th one from the first that has `longest` before it. Raises `UserError` if the text has none.
    """
    if longest >= n_token:
        raise UserError(
            f"the longest context is {longest:,} tokens and the text has {n_token:,}; give a longer text, or shorter "
            "contexts"
        )
    return np.arange(longest, n_token, stride)


def context_losses(
    step: WindowStep,
    params: Any,
    tokens: np.ndarray,
    scored: np.ndarray,
    *,
    context: int,
    batch_size: int,
    after_call: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """Computes the nats of the tokens at positions `scored` [n], each after `context` tokens: float32 [n].

    `step` is made by `make_window_step`. `batch_size`, windows per call, changes no number. `after_call` gets the
    number of tokens done, and may raise to stop.
    """
    found, pending = np.empty(len(scored), np.float32), None

    def fetch(first: int, nll: Any) -> None:
        part = found[first : first + batch_size]
        part[:] = np.asarray(nll)[: len(part), 0]

    for first in range(0, len(scored), batch_size):
        at = scored[first : first + batch_size]
        at = np.pad(at, (0, batch_size - len(at)), mode="edge")  # One shape, one compilation.
        windows = np.take(tokens, at[:, None] + np.arange(-context, 0)).astype(np.int32)
        nll = step(params, windows, np.take(tokens, at)[:, None].astype(np.int32))
        if pending is not None:  # Fetched one call late, so that the device never waits for the host.
            fetch(*pending)
            after_call(first)
        pending = first, nll
    if pending is not None:
        fetch(*pending)
    return found
