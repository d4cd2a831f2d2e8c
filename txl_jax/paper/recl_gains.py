"""Relative effective context length: appendix C of the paper.

l_i(c, t) is the loss of model i at token t when it has read the c tokens before it and nothing else. For models in one
group, and a step d,

    b(c, t)     = min over i of l_i(c, t)                                    the baseline
    f_i(c, c')  = mean over t in T of min(b(c, t), l_i(c', t))               the relative loss, c' = c + d
    g_i(c, c')  = (exp f_i(c, c) - exp f_i(c, c')) / exp f_i(c, c)           the relative gain

where T are the r-th part of all positions with the largest b(c, t): those that a short context explains worst. RECL is
the first c, in steps of d, from which one step more gains less than the threshold. Losses above the baseline do not
count, so that a model which is worse everywhere gains nothing by reading on.

Arrays: losses [models, T], one per context length.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from txl_jax.errors import UserError

THRESHOLD = 0.01  # Of the paper.


class Gain(NamedTuple):
    """The gain of a model from a longer context."""

    context: int  # c
    longer: int  # c'
    relative: float  # g_i(c, c')
    perplexity: float  # exp f_i(c, c) - exp f_i(c, c'), which figure 3 draws.


def hardest(baseline: np.ndarray, ratio: float) -> np.ndarray:
    """Returns the positions, in order, of the `ratio` of [T] with the largest baseline; at least one.

    Raises:
      UserError: the ratio is not above 0 and at most 1.
    """
    if not 0 < ratio <= 1:
        raise UserError(f"the ratio of positions is {ratio}; it must be above 0 and at most 1")
    count = max(round(ratio * len(baseline)), 1)
    # Stable, so that of equal positions the earlier ones are taken.
    return np.sort(np.argsort(-baseline, kind="stable")[:count])


def relative_loss(baseline: np.ndarray, losses: np.ndarray, positions: np.ndarray) -> float:
    """Computes f_i in nats from one model's losses [T]."""
    return float(np.minimum(baseline, losses)[positions].mean(dtype=np.float64))


def gains(losses: Mapping[int, np.ndarray], *, ratio: float) -> list[list[Gain]]:
    """Computes, for each model, the gain of every step from a context length to the next.

    Args:
      losses: by context length, in increasing order, [models, T].
      ratio: r.

    Raises:
      UserError: fewer than two models or lengths, or a ratio out of range.
    """
    lengths, n_model = list(losses), len(next(iter(losses.values()), ()))
    if n_model < 2:
        raise UserError(
            f"the group has {n_model} model; a relative context length compares models, so give two or more"
        )
    if len(lengths) < 2 or lengths != sorted(lengths):
        raise UserError(f"the context lengths are {lengths}; give two or more, shortest first")
    found: list[list[Gain]] = [[] for _ in range(n_model)]
    for i in range(len(lengths) - 1):
        context, longer = lengths[i], lengths[i + 1]
        baseline = losses[context].min(axis=0)
        positions = hardest(baseline, ratio)
        for model in range(n_model):
            before = np.exp(relative_loss(baseline, losses[context][model], positions))
            after = np.exp(relative_loss(baseline, losses[longer][model], positions))
            found[model].append(Gain(context, longer, float((before - after) / before), float(before - after)))
    return found


def effective_length(steps: Sequence[Gain], *, threshold: float = THRESHOLD) -> int | None:
    """Returns RECL: the context from which the next step gains less than the threshold; None: every step gains more.

    None means that the lengths ended before the gains did, so that RECL is at least the last of them.
    """
    for step in steps:
        if step.relative < threshold:
            return step.context
    return None
