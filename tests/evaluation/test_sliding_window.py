"""Tests sliding-window evaluation: which window scores what, values against a plain loop, totals,
stopping.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from txl_jax.config import DType, Encoding
from txl_jax.evaluation.sliding_window import evaluate_windows, make_window_step, window_batches

T, CLAMP = 14, 2
TEXT = np.random.default_rng(3).integers(tiny.V, size=T)
# A, stride, batch: the published protocol; windows that end past the text; windows in batches; a
# text of one window.
CASES = [
    (encoding, *sizes)
    for encoding in Encoding
    for sizes in ((4, 1, 1), (5, 3, 2), (4, 4, 5), (20, 2, 3))
]
QUICK = [(Encoding.AL_RFOU, 4, 1, 1), (Encoding.RELATIVE, 5, 3, 2), (Encoding.VASWANI, 20, 2, 3)]


@functools.cache
def make(encoding: Encoding):
    """(model, parameters, step)."""
    model = tiny.make(dtype=DType.FLOAT64, encoding=encoding)
    return model, tiny_run.params(model), make_window_step(model, clamp_len=CLAMP)


def nats_by_hand(encoding: Encoding, attention_len: int, stride: int) -> float:
    """Summed nats of TEXT, one token at a time, each from a window of its own."""
    model, params, _ = make(encoding)
    encode, variables, nats = tiny.encoder(model, clamp_len=CLAMP), {"params": params}, 0.0
    for target in range(1, T):
        # The first window that reaches the token before it.
        start = next(start for start in range(0, T, stride) if start + attention_len >= target)
        # Tokens in the window after that one cannot matter; absolute codes count to the window's
        # end.
        seen = TEXT[start:target]
        padding = 0 if encoding is Encoding.RELATIVE else attention_len - len(seen)
        window = np.pad(seen, (0, padding), constant_values=7)
        hidden, _ = encode(
            variables, jnp.asarray(window[None]), model.init_memory(batch_size=1, mem_len=0)
        )
        log_p = model.apply(
            variables, hidden[:, len(seen) - 1 : len(seen)], method=model.log_probabilities
        )
        nats -= float(log_p[0, 0, TEXT[target]])
    return nats


@pytest.mark.parametrize(
    ("encoding", "attention_len", "stride", "batch_size"), full_but(QUICK, CASES)
)
def test_totals_match_a_loop_over_tokens(encoding, attention_len, stride, batch_size, x64):
    _, params, step = make(encoding)
    batches = window_batches(
        TEXT, attention_len=attention_len, stride=stride, batch_size=batch_size
    )
    found = evaluate_windows(step, params, batches)
    assert found.tokens == T - 1
    assert found.nats == pytest.approx(nats_by_hand(encoding, attention_len, stride), rel=1e-12)


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.data())
def test_every_token_is_scored_once_at_the_end_of_what_it_is_predicted_from(data):
    length = data.draw(st.integers(2, 30), "T")
    attention_len = data.draw(st.integers(1, 12), "A")
    stride = data.draw(st.integers(1, attention_len), "stride")
    batch_size = data.draw(st.integers(1, 5), "batch")
    sizes = {"attention_len": attention_len, "stride": stride, "batch_size": batch_size}
    shapes, calls = [], []

    def note(params, windows, targets):
        """A substitute of the model: the nats of a target are its own number, and of padding
        nonsense.
        """
        n = targets.shape[1]
        shapes.append((windows.shape, targets.shape))
        for row, wanted in zip(windows, targets, strict=True):
            for place, target in enumerate(wanted, attention_len - n):
                if target:
                    context = row[: place + 1]
                    np.testing.assert_array_equal(context, np.arange(target - len(context), target))
                    assert (
                        len(context) == target
                        if len(shapes) == 1
                        else len(context) > attention_len - stride
                    )
        return np.where(targets > 0, targets, np.nan)

    nats, batches = np.full(length, -1.0), window_batches(np.arange(length), **sizes)
    progress = {"after_call": lambda totals: calls.append((len(shapes), totals.tokens))}
    found = evaluate_windows(note, None, batches, token_nats=nats, **progress)
    assert nats.tolist() == [-1, *range(1, length)]
    assert (found.tokens, found.nats) == (length - 1, sum(range(length))), "each once"
    assert [made for made, _ in calls] == list(range(2, len(shapes) + 1)), (
        "totals come along one call late"
    )
    assert all(
        tokens == min(attention_len + (made - 2) * batch_size * stride, length - 1)
        for made, tokens in calls
    )
    assert shapes[0] == ((1, attention_len), (1, attention_len))
    # One compilation.
    assert set(shapes[1:]) <= {((batch_size, attention_len), (batch_size, stride))}
    assert len(shapes) - 1 == -(-max(-(-(length - 1 - attention_len) // stride), 0) // batch_size)


def test_only_scored_positions_go_through_the_softmax():
    batch_size, attention_len, stride = 2, 9, 3
    windows, targets = (
        jnp.zeros((batch_size, attention_len), int),
        jnp.zeros((batch_size, stride), int),
    )
    variables = jax.eval_shape(lambda: tiny.variables(tiny.make()))
    program = str(
        jax.make_jaxpr(make_window_step(tiny.make(), clamp_len=None))(
            variables["params"], windows, targets
        )
    )
    assert f"f32[{batch_size},{stride},{tiny.V}]" in program
    assert f"f32[{batch_size},{attention_len},{tiny.V}]" not in program
