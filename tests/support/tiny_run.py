"""A run small enough to compile in seconds: its config, and training from numbers instead of a
corpus.

B = 3, H = 4, E = 5, D = 6, L = 7, M = 8, F = 10, V = 13, N = 2.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from support import tiny
from txl_jax.config import DropoutConfig, EvalConfig, ExperimentConfig, OptimizerConfig, TrainConfig
from txl_jax.data.segments import SegmentReader, training_segments
from txl_jax.inference.generate import Generator
from txl_jax.inference.scorer import make_scorer
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.recurrence import Segments
from txl_jax.runs.build import Built, Compilation, build
from txl_jax.training import weight_averaging
from txl_jax.training.step import TrainState, TrainStep, UpdateMetrics, init_params

B = tiny.B
L = 7
M = 8
STEPS = 10
EPOCH = 3  # Segments, so that epochs end inside calls of 2 and of 5 updates.
COUNTS = ("steps", "log_every", "eval_every", "checkpoint_every")

CONFIG = ExperimentConfig(
    model=dataclasses.replace(tiny.CONFIG, dropout=DropoutConfig(rate=0.3)),
    optimizer=OptimizerConfig(learning_rate=0.01, clip_norm=0.5),
    train=TrainConfig(batch_size=B, segment_len=L, mem_len=M, **dict.fromkeys(COUNTS, STEPS)),
    eval=EvalConfig(batch_size=1, segment_len=5, mem_len=9, clamp_len=None),
)


def parts(*, end_token: int | None = None, **changes: Any) -> Built:
    """The parts of the tiny run with some settings changed.

    `model__dropout__rate` stands for model.dropout.rate.
    """
    return build(tiny.changed(CONFIG, **changes), vocab_size=tiny.V, end_token=end_token)


@functools.cache
def compiled(**changes: Any) -> tuple[Built, TrainStep, Compilation]:
    """The parts and their compiled step. Compiling takes seconds, so tests share it."""
    made = parts(**changes)
    compilation = made.compile_step()
    return made, compilation.program, compilation


def params(model: TransformerXL) -> Any:
    """Parameters on the host, large enough for every path to leave a mark.

    Nothing is compiled for them.
    """
    rng = np.random.default_rng(1)
    # On a mesh the parameters are in boxes with the names of their axes.
    shapes = nn.unbox(jax.eval_shape(lambda: init_params(model, jax.random.key(0))))
    # Sums over D are equally large for each D from 12 on.
    wide = 0.5 * min(1.0, math.sqrt(12 / model.config.d_model))

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean = {"scale": 1.0}.get(path[-1].key, 0.0)
        # A large bias always favours the same token.
        spread = {"bias": 0.0}.get(path[-1].key, wide)
        return rng.normal(mean, spread, leaf.shape).astype(leaf.dtype)

    return jax.tree.map_with_path(draw, shapes)


def generator(model: TransformerXL, eval_config: EvalConfig) -> Generator:
    prepare_params = jax.jit(make_scorer(model, eval_config).prepare_params)
    return Generator(prepare_params(params(model)), eval_config)


def state(made: Built) -> TrainState:
    """A first state on the host, with `params`."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), made.abstract_state)
    drawn = params(made.model)
    average = None
    if made.config.average.on:
        average = weight_averaging.init(drawn, made.config.average)
    return zeros.replace(params=drawn, average=jax.device_get(average))


def text(*, seed: int = 0) -> SegmentReader:
    tokens = np.random.default_rng(seed).integers(tiny.V, size=B * L * EPOCH + 1)
    return training_segments(tokens, batch_size=B, segment_len=L)


def call(
    made: Built, step: TrainStep, state: TrainState, segments: Segments
) -> tuple[TrainState, UpdateMetrics]:
    """One call of the step, from host to host. The passed state stays usable."""
    return jax.device_get(step(jax.device_put(state), made.place(segments)))


def train(updates: int, **changes: Any) -> tuple[TrainState, UpdateMetrics]:
    """The state after this many updates, and their metrics [updates]."""
    made, step, _ = compiled(**changes)
    per_call = made.config.train.segments_per_call
    after = state(made)
    parts = []
    for first in range(0, updates, per_call):
        after, metrics = call(made, step, after, text().segments(first, per_call))
        parts.append(metrics)
    joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    return after, joined


def assert_equal(found: Any, expected: Any) -> None:
    """Equality bit for bit of two trees, naming the first leaf that differs."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), jax.tree_util.keystr(path)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def assert_close(found: Any, expected: Any, *, rtol: float = 0, atol: float = 0) -> None:
    """Asserts that two trees are close, and names the first leaf that is not."""

    def check(path: Any, leaf: Any, expected_leaf: Any) -> None:
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(leaf, expected_leaf, rtol=rtol, atol=atol, err_msg=name)

    jax.tree.map_with_path(check, found, expected)
