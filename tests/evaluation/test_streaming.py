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

T, L, M = 25, 5, 7
TEXT = np.random.default_rng(3).integers(tiny.V, size=T)

pytestmark = pytest.mark.usefixtures("x64")


def model():
    return tiny.make(dtype=DType.FLOAT64)


@functools.cache
def params():
    return tiny_run.params(model())


@functools.cache
def eval_step(clamp_len: int | None, same_length: bool):
    return jax.jit(
        make_eval_step(model(), EvalConfig(clamp_len=clamp_len, same_length=same_length)),
        donate_argnums=1,
    )


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
    """Totals of a text; the memory first holds noise in `valid` slots."""
    lengths = {"segment_len": segment_len, "mem_len": mem_len, "clamp_len": clamp_len}
    weights = tiny.prepared(model(), {"params": params()}, same_length=same_length, **lengths)
    memory = forward.init_cache(weights, batch_size=rows, mem_len=mem_len, segment_len=segment_len)
    noise = jax.tree.map(
        lambda ring: jax.random.normal(jax.random.key(9), ring.shape), (memory.keys, memory.values)
    )
    return evaluate(
        eval_step(clamp_len, same_length),
        weights,
        memory.replace(keys=noise[0], values=noise[1], valid=memory.valid + valid),
        evaluation_segments(text, batch_size=rows, segment_len=segment_len),
        segments_per_call=per_call,
        place=jax.device_put,
        **others,
    )


@pytest.mark.parametrize(("clamp_len", "same_length"), [(None, False), (4, True)])
def test_segments_are_read_in_order_with_the_memory_between(clamp_len, same_length):
    """As a loop over segments scores them, of which the last is shorter, without the code under
    test.
    """
    encode = tiny.encoder(model(), clamp_len=clamp_len, same_length=same_length)

    def read(tokens, targets, memory):
        hidden, memory = encode({"params": params()}, tokens, memory)
        log_p = model().apply({"params": params()}, hidden, method=model().log_probabilities)
        return -np.take_along_axis(np.asarray(log_p), targets[..., None], axis=-1)[..., 0], memory

    expected, _ = tiny.over_segments(
        read, model().init_memory(batch_size=1, mem_len=M), TEXT[None], L
    )
    found = totals(clamp_len=clamp_len, same_length=same_length)
    assert found.tokens == expected.size == T - 1 and found.nats == pytest.approx(
        expected.sum(), rel=1e-13
    )


def test_ignored_targets_are_not_counted():
    segments = evaluation_segments(TEXT, batch_size=1, segment_len=L).segments(0, 1)
    targets = segments.targets.copy()
    targets[:, :, 2:4] = -100
    weights = tiny.prepared(model(), {"params": params()}, segment_len=L, mem_len=M)

    def scores(targets):
        memory = forward.init_cache(weights, batch_size=1, mem_len=M, segment_len=L)
        return eval_step(None, False)(weights, memory, segments._replace(targets=targets))[1]

    found, whole = scores(targets), scores(segments.targets)
    assert (found.tokens, whole.tokens) == (L - 2, L)
    assert found.nats == pytest.approx(float(whole.nats[0] - whole.nll[:, :, 2:4].sum()), rel=1e-13)


@pytest.mark.parametrize(("per_call", "rows"), full_but([(3, 2)], [(4, 1), (3, 2), (4, 3)]))
def test_segments_scored_together_have_the_losses_of_each_alone(monkeypatch, per_call, rows):
    words = tiny.make(dtype=DType.FLOAT64, cutoffs=(5, 8), div_val=2)
    weights = tiny.prepared(words, {"params": tiny_run.params(words)}, segment_len=L, mem_len=M)
    reader = evaluation_segments(TEXT, batch_size=rows, segment_len=2)
    assert reader.n_segments >= per_call and TEXT.max() >= 8

    def losses():
        memory = forward.init_cache(weights, batch_size=rows, mem_len=M, segment_len=2)
        _, scores = jax.jit(make_eval_step(words, EvalConfig()))(
            weights, memory, reader.segments(0, per_call)
        )
        return scores

    together = losses()
    monkeypatch.setattr(streaming, "_SCORED_TOGETHER", 0)
    tiny_run.assert_close(together, losses(), rtol=1e-12)


def test_padding_never_changes_the_totals():
    """Of blocks, at the end of rows, as whole segments of another cut have none, and of a row that
    is empty.
    """
    for padded, whole in (
        (totals(per_call=2), totals()),  # Five segments.
        (totals(per_call=8), totals()),
        (totals(rows=4, segment_len=5, mem_len=6), totals(rows=4, segment_len=6, mem_len=6)),
        (totals(rows=7, segment_len=4, mem_len=0), totals(segment_len=4, mem_len=0)),
    ):
        assert padded.tokens == whole.tokens == T - 1
        assert padded.nats == pytest.approx(whole.nats, rel=1e-12)


def test_a_used_memory_is_emptied_first_and_totals_come_along_one_call_late():
    assert totals(valid=M).nats == totals().nats
    calls = []
    result = totals(per_call=2, after_call=lambda done, so_far: calls.append((done, so_far)))
    assert [done for done, _ in calls] == [2, 4]  # Of 5 segments; the last call's are the result.
    assert [so_far.tokens for _, so_far in calls] == [10, 20]
    assert calls[0][1].nats < calls[1][1].nats < result.nats


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

    sizes = {"batch_size": batch_size, "segment_len": segment_len, "warmup_tokens": warmup}
    reader, nats = evaluation_segments(np.arange(length), **sizes), np.full(length, -1.0)
    found = evaluate(
        step, 0, 0, reader, segments_per_call=per_call, place=lambda placed: placed, token_nats=nats
    )
    assert nats.tolist() == [-1, *range(1, length)] and found.tokens == length - 1, "each once"
