"""Sliding-window evaluation for models without recurrence (Al-Rfou et al., 2018).

See also section 4.5 of the Transformer-XL paper.

A window of A tokens is encoded without a memory, and its last `stride` positions are scored. Then
the window moves by `stride`. The first window scores all of its positions, because nothing precedes
them. With T = 9, A = 4 and stride 2, the windows read the following tokens:

    0 1 2 3              and score 1 2 3 4
        2 3 4 5          and score 5 6
            4 5 6 7      and score 7 8

Every token except the first is therefore scored exactly once, from the position before it. After
the first window, a token is predicted from A - stride + 1 to A tokens. With stride 1, the published
protocol, it is always predicted from A tokens, and everything is computed again for each token.

The model's memory has no slots, so this also measures a model with relative positions without
recurrence.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from txl_jax.config.config_tree import require
from txl_jax.data.segments import take
from txl_jax.inference.scorer import at_temperature
from txl_jax.metrics import Totals
from txl_jax.modules import AnyModel
from txl_jax.runtime import distributed

# (params, windows int [B, A], targets int [B, n]) -> nats of the targets [B, n]
WindowStep = Callable[[Any, Any, Any], jax.Array]


class Windows(NamedTuple):
    """B windows, each with the targets of its last n positions.

    All three arrays are 0 after the end of the text.
    """

    inputs: np.ndarray  # int32 [B, A], the tokens.
    targets: np.ndarray  # int32 [B, n], the tokens after the last n inputs.
    scored: np.ndarray  # int64 [B, n], position of each target in the text.


def make_window_step(
    model: AnyModel, *, clamp_len: int | None, temperature: float = 1.0
) -> WindowStep:
    """Returns a jitted function that scores windows.

    The shapes of its arguments determine A and the number n of scored positions.

    Only the last n hidden states go through the softmax, whose logits are divided by `temperature`.
    """

    def step(params: Any, windows: jax.Array, targets: jax.Array) -> jax.Array:
        memory = model.init_memory(batch_size=windows.shape[0], mem_len=0)
        hidden, _ = model.apply({"params": params}, windows, memory, clamp_len=clamp_len)
        scored_hidden = hidden[:, -targets.shape[1] :]
        params, scored_hidden = at_temperature(params, scored_hidden, temperature)
        nll: Any = model.apply({"params": params}, scored_hidden, targets, method=model.nll)
        return nll

    return jax.jit(step)


class _WindowCall(NamedTuple):
    """A call of the step that may not have finished."""

    nll: jax.Array  # [B, n], nats of the targets.
    scored: np.ndarray  # `Windows.scored` of its batch.


def evaluate_windows(
    step: WindowStep,
    params: Any,
    batches: Iterable[Windows],
    *,
    after_call: Callable[[Totals], None] = lambda totals: None,
    token_nats: np.ndarray | None = None,
) -> Totals:
    """Scores the targets of all windows, of which there is at least one batch.

    `after_call` gets the totals so far after each call except the last, and may raise to stop.
    `token_nats`, floats [T], receives each scored token's loss, in nats.
    """
    totals = Totals()
    pending: _WindowCall | None = None
    for batch in batches:
        nll = step(params, batch.inputs, batch.targets)
        # Losses are fetched one call late, so that the device never waits for the host.
        if pending is not None:
            totals += _fetch(pending, token_nats)
            after_call(totals)
        pending = _WindowCall(nll, batch.scored)
    assert pending is not None, "there is at least the first window"
    return totals + _fetch(pending, token_nats)


def _fetch(call: _WindowCall, token_nats: np.ndarray | None) -> Totals:
    """Waits for a call, and sums its losses on the host, in double precision."""
    is_scored = call.scored > 0
    nats = distributed.to_host(call.nll)[is_scored]
    if token_nats is not None:
        token_nats[call.scored[is_scored]] = nats
    return Totals.of(nats)


def window_batches(
    tokens: np.ndarray, *, attention_len: int, stride: int, batch_size: int
) -> Iterator[Windows]:
    """Yields the first window by itself (n = A), then the others in batches of B (n = `stride`).

    Windows past the end of the text are padded, so that their targets are predicted from the same
    number of tokens as all others.

    >>> for batch in window_batches(np.arange(9), attention_len=4, stride=2, batch_size=1):
    ...     print("inputs", batch.inputs.tolist(), "targets", batch.targets.tolist())
    inputs [[0, 1, 2, 3]] targets [[1, 2, 3, 4]]
    inputs [[2, 3, 4, 5]] targets [[5, 6]]
    inputs [[4, 5, 6, 7]] targets [[7, 8]]
    """
    first_start = np.zeros(1, int)
    yield _windows(tokens, first_start, attention_len=attention_len, n_scored=attention_len)
    # The last window is the first that scores the text's last token.
    starts = np.arange(stride, len(tokens) - 1 - attention_len + stride, stride)
    yield from _in_batches(
        tokens, starts, attention_len=attention_len, n_scored=stride, batch_size=batch_size
    )


def positions(n_token: int, *, longest: int, stride: int) -> np.ndarray:
    """Returns the tokens that are scored at every context length.

    They are every `stride`-th token that has `longest` tokens before it.
    """
    require(
        longest < n_token,
        f"the longest context must be less than the text's {n_token:,} tokens, got {longest:,}. "
        "Pass a longer text or shorter contexts.",
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
    after_call: Callable[[Totals], None] = lambda totals: None,
) -> np.ndarray:
    """Computes the losses, in nats, of the tokens at positions `scored` [n].

    Each token is predicted from `context` tokens and no others. The losses are float32 [n].

    These are l(c, t) in the paper's appendix C. The c tokens are encoded again for each loss, so
    c = 500 costs 500 times as much as streaming.
    """
    windows = _in_batches(
        tokens, scored - context, attention_len=context, n_scored=1, batch_size=batch_size
    )
    token_nats = np.zeros(len(tokens), np.float32)
    evaluate_windows(step, params, windows, after_call=after_call, token_nats=token_nats)
    return token_nats[scored]


def _in_batches(
    tokens: np.ndarray,
    starts: np.ndarray,
    *,
    attention_len: int,
    n_scored: int,
    batch_size: int,
) -> Iterator[Windows]:
    """Yields the windows that begin at tokens `starts` [n], B at a time."""
    # All batches have the same shape, so that the step is compiled once: the last batch is filled
    # with windows past the end.
    n_fill = -len(starts) % batch_size
    starts = np.pad(starts, (0, n_fill), constant_values=len(tokens) - 1)
    for batch_starts in starts.reshape(-1, batch_size):
        yield _windows(tokens, batch_starts, attention_len=attention_len, n_scored=n_scored)


def _windows(
    tokens: np.ndarray, starts: np.ndarray, *, attention_len: int, n_scored: int
) -> Windows:
    """Returns the windows that begin at tokens `starts` [B]."""
    # Pair q is the input q and its target q + 1.
    pair_BxA = starts[:, None] + np.arange(attention_len)
    is_real_BxA = pair_BxA < len(tokens) - 1

    # Only the last n pairs of a window are scored.
    pair_Bxn = pair_BxA[:, -n_scored:]
    is_real_Bxn = is_real_BxA[:, -n_scored:]
    return Windows(
        inputs=take(tokens, pair_BxA, is_real_BxA),
        targets=take(tokens, pair_Bxn + 1, is_real_Bxn),
        scored=np.where(is_real_Bxn, pair_Bxn + 1, 0),
    )
