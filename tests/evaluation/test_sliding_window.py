"""Tests sliding-window evaluation: which window scores what, values against a plain loop, totals,
stopping.
"""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from txl_jax.config import DType, Encoding
from txl_jax.evaluation.sliding_window import evaluate_windows, make_window_step, window_batches

T = 14
CLAMP = 2  # Less than the distances in a window, so that it matters.
TEXT = np.random.default_rng(3).integers(tiny.V, size=T)
# A, which is the length of a window, stride and batch size.
SIZES = (
    (4, 1, 1),  # The published protocol.
    (5, 3, 2),  # Windows that end past the text.
    (4, 4, 5),  # Windows in batches.
    (20, 2, 3),  # A text of one window.
)
CASES = [(encoding, *sizes) for encoding, sizes in itertools.product(Encoding, SIZES)]
QUICK = [(Encoding.AL_RFOU, 4, 1, 1), (Encoding.RELATIVE, 5, 3, 2), (Encoding.VASWANI, 20, 2, 3)]


@functools.cache
def make(encoding: Encoding):
    """(model, parameters, step)."""
    model = tiny.make(dtype=DType.FLOAT64, encoding=encoding)
    return model, tiny_run.params(model), make_window_step(model, clamp_len=CLAMP)


def nats_by_hand(encoding: Encoding, attention_len: int, stride: int) -> float:
    """Summed nats of TEXT, one token at a time, each from a window of its own."""
    model, params, _ = make(encoding)
    memory = model.init_memory(batch_size=1, mem_len=0)

    @jax.jit
    def log_probabilities(variables, window):
        """Log probabilities [A, V] of what follows each token of a window."""
        hidden, _ = model.apply(variables, window[None], memory, clamp_len=CLAMP)
        return model.apply(variables, hidden, method=model.log_probabilities)[0]

    nats = 0.0
    for target in range(1, T):
        # The first window that reaches the token before it.
        start = 0
        while start + attention_len < target:
            start += stride
        # Tokens in the window after that one cannot matter, so that others are in their place.
        seen = TEXT[start:target]
        window = np.full(attention_len, 7)
        window[: len(seen)] = seen
        log_p = log_probabilities({"params": params}, window)
        nats -= float(log_p[len(seen) - 1, TEXT[target]])
    return nats


@pytest.mark.parametrize(
    ("encoding", "attention_len", "stride", "batch_size"), full_but(QUICK, CASES)
)
def test_totals_match_a_loop_over_tokens(encoding, attention_len, stride, batch_size, x64):
    _, params, step = make(encoding)
    batches = window_batches(
        TEXT, attention_len=attention_len, stride=stride, batch_size=batch_size
    )

    totals = evaluate_windows(step, params, batches)

    assert totals.tokens == T - 1
    assert totals.nats == pytest.approx(nats_by_hand(encoding, attention_len, stride), rel=1e-12)


class NotingModel:
    """A substitute of the model, for a text whose tokens are their positions.

    The nats of a target are its own number, and nonsense for padding.
    """

    def __init__(self, attention_len: int, stride: int):
        self.attention_len = attention_len
        self.stride = stride
        self.shapes = []

    def __call__(self, params, windows, targets):
        self.shapes.append((windows.shape, targets.shape))
        # A window has targets only at its end.
        first_place = self.attention_len - targets.shape[1]
        for window, row_targets in zip(windows, targets, strict=True):
            for place, target in enumerate(row_targets, first_place):
                if target > 0:
                    self.check_context(window[: place + 1], target)
        return np.where(targets > 0, targets, np.nan)

    def check_context(self, context, target):
        """A target is predicted from the tokens just before it, of which there are enough.

        The first call has the first window, where a target has all tokens before it.
        """
        np.testing.assert_array_equal(context, np.arange(target - len(context), target))
        if len(self.shapes) == 1:
            assert len(context) == target
        else:
            assert len(context) > self.attention_len - self.stride


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.data())
def test_every_token_is_scored_once_at_the_end_of_what_it_is_predicted_from(data):
    length = data.draw(st.integers(2, 30), "T")
    attention_len = data.draw(st.integers(1, 12), "A")
    stride = data.draw(st.integers(1, attention_len), "stride")
    batch_size = data.draw(st.integers(1, 5), "batch")
    model = NotingModel(attention_len, stride)
    batches = window_batches(
        np.arange(length), attention_len=attention_len, stride=stride, batch_size=batch_size
    )
    nats = np.full(length, -1.0)
    # The number of calls of the model, and of scored tokens, whenever totals come along.
    reports = []

    def after_call(totals):
        reports.append((len(model.shapes), totals.tokens))

    totals = evaluate_windows(model, None, batches, after_call=after_call, token_nats=nats)

    # Each token is scored once.
    n_scored = length - 1
    assert nats.tolist() == [-1, *range(1, length)]
    assert totals.tokens == n_scored
    assert totals.nats == sum(range(length))

    # Totals come along one call late: after call c they are those of the c - 1 calls before. The
    # first of these has one window, and each of the others a stride of targets per window.
    n_call = len(model.shapes)
    expected_reports = []
    for calls in range(2, n_call + 1):
        in_windows = attention_len + (calls - 2) * batch_size * stride
        expected_reports.append((calls, min(in_windows, n_scored)))
    assert reports == expected_reports

    # One compiled program serves all calls but the first.
    assert model.shapes[0] == ((1, attention_len), (1, attention_len))
    assert set(model.shapes[1:]) <= {((batch_size, attention_len), (batch_size, stride))}
    n_window = math.ceil(max(n_scored - attention_len, 0) / stride)
    assert n_call - 1 == math.ceil(n_window / batch_size)


def test_only_scored_positions_go_through_the_softmax():
    batch_size = 2
    attention_len = 9
    stride = 3
    model = tiny.make()
    params = jax.eval_shape(lambda: tiny.variables(model))["params"]
    windows = jax.ShapeDtypeStruct((batch_size, attention_len), "int32")
    targets = jax.ShapeDtypeStruct((batch_size, stride), "int32")

    step = make_window_step(model, clamp_len=None)
    program = str(jax.make_jaxpr(step)(params, windows, targets))

    assert f"f32[{batch_size},{stride},{tiny.V}]" in program
    assert f"f32[{batch_size},{attention_len},{tiny.V}]" not in program
