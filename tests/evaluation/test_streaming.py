"""Tests streaming evaluation against one long pass and a plain loop: scores, blocks, padding, rows,
stopping.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from txl_jax.config import DType, EvalConfig
from txl_jax.data.segments import evaluation_segments
from txl_jax.evaluation import streaming
from txl_jax.evaluation.streaming import SegmentLosses, evaluate, make_eval_step
from txl_jax.inference import forward

T = 25
L = 5
M = 7
TEXT = np.random.default_rng(3).integers(tiny.V, size=T)

pytestmark = pytest.mark.usefixtures("x64")


def model():
    return tiny.make(dtype=DType.FLOAT64)


@functools.cache
def params():
    return tiny_run.params(model())


# The memory is donated, as in the product.
@functools.cache
def eval_step(clamp_len: int | None, same_length: bool):
    return jax.jit(
        make_eval_step(model(), EvalConfig(clamp_len=clamp_len, same_length=same_length)),
        donate_argnums=1,
    )


@functools.cache
def weights(segment_len: int, mem_len: int, clamp_len: int | None, same_length: bool):
    """The parameters, prepared for segments and memory of these lengths."""
    return tiny.prepared(
        model(),
        {"params": params()},
        segment_len=segment_len,
        mem_len=mem_len,
        clamp_len=clamp_len,
        same_length=same_length,
    )


def noise_like(rings):
    """Stored keys or values that no evaluation may see."""
    rng = np.random.default_rng(9)
    return jax.tree.map(lambda ring: rng.normal(size=ring.shape).astype(ring.dtype), rings)


def totals(
    text=TEXT,
    *,
    rows=1,
    segment_len=L,
    mem_len=M,
    per_call=1,
    clamp_len=None,
    same_length=False,
    valid=0,
    **others,
):
    """Totals of a text. The memory holds noise, and `valid` of its slots count as filled."""
    prepared = weights(segment_len, mem_len, clamp_len, same_length)
    memory = forward.init_cache(prepared, batch_size=rows, mem_len=mem_len, segment_len=segment_len)
    with_noise = memory.replace(
        keys=noise_like(memory.keys),
        values=noise_like(memory.values),
        valid=np.asarray(memory.valid) + valid,
    )
    return evaluate(
        eval_step(clamp_len, same_length),
        prepared,
        jax.device_put(with_noise),
        evaluation_segments(text, batch_size=rows, segment_len=segment_len),
        segments_per_call=per_call,
        place=jax.device_put,
        **others,
    )


@pytest.mark.parametrize(("clamp_len", "same_length"), [(None, False), (4, True)])
def test_segments_are_read_in_order_with_the_memory_between(clamp_len, same_length):
    """Totals match a loop over segments, the last of which is shorter, in the training model."""
    network = model()

    @jax.jit
    def log_probabilities(variables, tokens, memory):
        hidden, memory = network.apply(
            variables, tokens, memory, clamp_len=clamp_len, same_length=same_length
        )
        return network.apply(variables, hidden, method=network.log_probabilities), memory

    variables = {"params": params()}
    memory = network.init_memory(batch_size=1, mem_len=M)
    expected = 0.0
    for first in range(0, T - 1, L):
        end = min(first + L, T - 1)
        log_p, memory = log_probabilities(variables, TEXT[None, first:end], memory)
        for place in range(first, end):
            expected -= float(log_p[0, place - first, TEXT[place + 1]])

    scored = totals(clamp_len=clamp_len, same_length=same_length)

    assert scored.tokens == T - 1
    assert scored.nats == pytest.approx(expected, rel=1e-13)


def test_ignored_targets_are_not_counted():
    segments = evaluation_segments(TEXT, batch_size=1, segment_len=L).segments(0, 1)
    targets = segments.targets.copy()
    targets[:, :, 2:4] = -100

    prepared = weights(L, M, None, False)

    def losses(segments):
        memory = forward.init_cache(prepared, batch_size=1, mem_len=M, segment_len=L)
        return jax.device_get(eval_step(None, False)(prepared, memory, segments)[1])

    without_ignored = losses(segments._replace(targets=targets))
    whole = losses(segments)

    assert without_ignored.tokens == L - 2
    assert whole.tokens == L
    ignored_nats = whole.nll[:, :, 2:4].sum()
    assert without_ignored.nats == pytest.approx(float(whole.nats[0] - ignored_nats), rel=1e-13)


@pytest.mark.parametrize(("per_call", "rows"), full_but([(3, 2)], [(4, 1), (3, 2), (4, 3)]))
def test_segments_scored_together_have_the_losses_of_each_alone(monkeypatch, per_call, rows):
    words = tiny.make(dtype=DType.FLOAT64, cutoffs=(5, 8), div_val=2)
    prepared = tiny.prepared(words, {"params": tiny_run.params(words)}, segment_len=L, mem_len=M)
    reader = evaluation_segments(TEXT, batch_size=rows, segment_len=2)
    segments = reader.segments(0, per_call)
    # No segment is padding, and the last tail has targets.
    assert reader.n_segments >= per_call
    assert TEXT.max() >= 8

    def losses():
        memory = forward.init_cache(prepared, batch_size=rows, mem_len=M, segment_len=2)
        _, losses_of_segments = jax.jit(make_eval_step(words, EvalConfig()))(
            prepared, memory, segments
        )
        return losses_of_segments

    # All these segments have fewer positions than the limit. A limit of 0 leaves one at a time.
    together = losses()
    monkeypatch.setattr(streaming, "_SCORED_TOGETHER", 0)
    tiny_run.assert_close(together, losses(), rtol=1e-12)


def check_same_scores(padded, whole):
    assert padded.tokens == whole.tokens == T - 1
    assert padded.nats == pytest.approx(whole.nats, rel=1e-12)


@pytest.mark.parametrize("per_call", [2, 8])
def test_padding_of_blocks_never_changes_the_totals(per_call):
    """Calls of 2 and of 8 segments pad the five segments of the text to 6 and 8."""
    check_same_scores(totals(per_call=per_call), totals())


def test_padding_at_the_end_of_rows_never_changes_the_totals():
    """Four rows of 6 targets are whole segments of 6, but 5 and 1 in segments of 5."""
    check_same_scores(totals(rows=4, segment_len=5), totals(rows=4, segment_len=6, mem_len=6))


def test_an_empty_row_never_changes_the_totals():
    # 24 targets are six rows of 4, so the seventh is empty. Without memory each row is a segment of
    # its own, and the same segments are in one row too.
    check_same_scores(totals(rows=7, segment_len=4, mem_len=0), totals(segment_len=4, mem_len=0))


def test_a_used_memory_is_emptied_first():
    assert totals(valid=M).nats == totals().nats


def test_totals_come_along_one_call_late():
    reports = []

    result = totals(per_call=2, after_call=lambda done, so_far: reports.append((done, so_far)))

    # Five segments are three calls. The totals of the last call are the result.
    (first_done, first), (second_done, second) = reports
    assert (first_done, second_done) == (2, 4)
    assert (first.tokens, second.tokens) == (2 * L, 4 * L)
    assert first.nats < second.nats < result.nats


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    st.integers(2, 60), st.integers(1, 7), st.integers(1, 9), st.integers(0, 30), st.integers(1, 5)
)
@hypothesis.example(6, 4, 3, 2, 2)  # The last row has no target of its own.
def test_every_tokens_nats_come_to_its_place(length, batch_size, segment_len, warmup, per_call):
    """With a model for which the nats of a token are its number, and NaN elsewhere."""

    def step(weights, memory, segments):
        nll = np.where(segments.weights > 0, segments.targets, np.nan)
        return memory, SegmentLosses(np.nansum(nll, (1, 2)), segments.weights.sum((1, 2)), nll)

    reader = evaluation_segments(
        np.arange(length), batch_size=batch_size, segment_len=segment_len, warmup_tokens=warmup
    )
    nats = np.full(length, -1.0)

    totals = evaluate(
        step,
        prepared=None,
        memory=None,
        reader=reader,
        segments_per_call=per_call,
        place=lambda segments: segments,
        token_nats=nats,
    )

    # Each token is scored once.
    assert nats.tolist() == [-1, *range(1, length)]
    assert totals.tokens == length - 1
