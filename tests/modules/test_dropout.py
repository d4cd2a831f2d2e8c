"""Tests dropout: masks and who shares them, that those of a model's places, steps and microbatches
are independent, and rates that are traced; anchors have its places.

The hash is tested in tests/ops/test_random_masks.py, masks on meshes in tests/sharding.
"""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from support.mask_statistics import SMALLEST, kept_p, pair_p, sums_p
from txl_jax.config import DType, Network, Remat
from txl_jax.memory import Memory
from txl_jax.modules.dropout import Dropout, dropout
from txl_jax.modules.embedding import Embedding
from txl_jax.modules.recurrent import RecurrentModel
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.recurrence import Segments
from txl_jax.runs.build import build
from txl_jax.training import member_axis
from txl_jax.training.optimizer import learning_rate, make_optimizer
from txl_jax.training.step import TrainState, make_train_step

RNGS = {"dropout": jax.random.key(0)}
DRAWING = {"clamp_len": None, "same_length": False, "deterministic": False}
L = 40
config = tiny.model_config


@pytest.mark.parametrize("locked", [False, True])
def test_locked_masks_are_shared_by_positions_and_not_by_rows(locked):
    drop = dropout(config(dropout__locked=locked), 0.4, deterministic=False)
    found = np.asarray(drop.apply({}, jnp.ones((50, L, 60)), rngs=RNGS))
    assert set(np.unique(found)) == {0.0, np.float32(1 / 0.6)}
    assert found.mean() == pytest.approx(1, abs=0.03)
    assert (found == found[:, :1]).all() == locked
    assert (found[0] != found[1]).any()
    # Position codes have no rows.
    codes = np.asarray(drop.apply({}, jnp.ones((L, 60)), rngs=RNGS))
    assert (codes == codes[:1]).all() == locked


def test_whole_words_are_dropped_at_all_their_positions():
    embedding = Embedding(config(dropout__embedding=0.5), tiny.V)
    tokens = jnp.asarray(tiny.text(L))
    variables = {"params": {"table_0": jnp.ones((tiny.V, tiny.D))}}
    whole = embedding.apply(variables, tokens)
    found = np.asarray(embedding.apply(variables, tokens, deterministic=False, rngs=RNGS))
    after, seen = np.asarray(tokens)[:, 1:], found[:, 1:]
    kept = {int(token): seen[after == token] for token in np.unique(after)}
    for rows in kept.values():
        assert (rows == rows[0, 0]).all() and rows[0, 0] in (0.0, 2 * whole[0, 0, 0])
    assert {float(rows[0, 0]) for rows in kept.values()} == {0.0, float(2 * whole[0, 0, 0])}
    # But where they begin a segment, they stay as they are.
    first = embedding.apply(variables, jnp.arange(tiny.V)[:, None], deterministic=False, rngs=RNGS)
    np.testing.assert_array_equal(first, jnp.broadcast_to(whole[0, 0, 0], first.shape))


def model_of(network, **changes):
    build = TransformerXL if network is Network.TRANSFORMER_XL else RecurrentModel
    return build(config(network=network, **changes), tiny.V)


@pytest.mark.parametrize("network", full_but([Network.QRNN], Network))
def test_traced_rates_are_those_of_the_config(network, x64):
    """Vmapped over models with other rates, each of all six: what each would give whose config has
    them.
    """
    model = model_of(network, dtype=DType.FLOAT64, dropout__rate=0.9)
    memory = model.init_memory(batch_size=tiny.B, mem_len=3)
    params = tiny_run.params(model)
    rngs = {"dropout": jax.random.key(0, impl="rbg")}  # Which compiles faster.

    def hidden(model):
        return model.apply({"params": params}, tiny.text(5), memory, rngs=rngs, **DRAWING)[0]

    settings = [
        dict(zip(member_axis.RATES, np.arange(6) / 10 + shift, strict=True)) for shift in (0.1, 0.2)
    ]
    traced = jax.tree.map(lambda *numbers: jnp.asarray(numbers), *settings)
    found = jax.jit(jax.vmap(lambda rates: hidden(member_axis.with_rates(model, rates))))(traced)
    of_config = {f"dropout__{name}": float(rate) for name, rate in settings[1].items()}
    of_own = model_of(network, dtype=DType.FLOAT64, **of_config)
    expected = jax.jit(functools.partial(hidden, of_own))()
    np.testing.assert_allclose(found[1], expected, rtol=1e-12, atol=1e-12)
    assert np.abs(found[0] - found[1]).max() > 0.01


def test_scoring_leaves_nothing_out():
    rates = {f"dropout__{name}": 0.5 for name in ("rate", "attention", "embedding", "qkv")}
    plain, dropped = tiny.make(), tiny.make(**rates)
    variables, memory = tiny.variables(plain), plain.init_memory(batch_size=tiny.B, mem_len=3)
    np.testing.assert_array_equal(
        *(tiny.encoder(of)(variables, tiny.text(5), memory)[0] for of in (plain, dropped))
    )


def masks_of(model, key, *, rows, length):
    """The masks of all dropouts of activations in a training call: lists of [..], or [N, ..] in a
    stack of layers, by the path of the module.
    """

    def record(call, arguments, options, context):
        if not isinstance(context.module, Dropout) or context.method_name != "__call__":
            return call(*arguments, **options)
        scaled = call(jnp.ones_like(arguments[0]), *arguments[1:], **options)
        # The scan over layers stacks this collection.
        context.module.sow("attention", "mask", scaled != 0)
        return arguments[0] * scaled

    @jax.jit
    def call(params, tokens, memory):
        with nn.intercept_methods(record):
            return model.apply(
                {"params": params},
                tokens,
                memory,
                deterministic=False,
                rngs={"dropout": key},
                mutable=["attention"],
            )[1]

    memory = model.init_memory(batch_size=rows, mem_len=length)
    sown = call(tiny_run.params(model), tiny.text(length, rows=rows), memory)["attention"]
    return {
        jax.tree_util.keystr(path[:-1], simple=True, separator=" "): np.asarray(mask)
        for path, mask in _masks(sown)
    }


def _masks(sown):
    """(path with the number of the call, mask) of all calls of dropout."""
    for path, mask in jax.tree.leaves_with_path(sown):
        *modules, name, number = path
        if name.key == "mask":
            yield (*modules, number, name), mask


PLACES = {
    "plain": {"rows": 8, "length": 64, "width": 256, "locked": False},
    "locked": {"rows": 256, "length": 3, "width": 256, "locked": True},
    "ten million numbers": {"rows": 80, "length": 128, "width": 1024, "locked": False},
}


@pytest.mark.parametrize("case", full_but(["plain", "locked"], PLACES))
@pytest.mark.parametrize("network", Network)
def test_masks_of_a_models_places_are_independent(network, case):
    """Between any two places, of two layers or of two uses of one module, such as the input
    dropout's for codes and for embeddings.
    """
    rate = 0.1
    rows, length, width, locked = PLACES[case].values()
    sizes = {"n_layer": 3, "d_model": width, "d_inner": width, "n_head": 2, "d_head": 8}
    model = model_of(network, **sizes, dropout__rate=rate, dropout__locked=locked)
    found = masks_of(model, jax.random.key(5), rows=rows, length=length)

    masks = {}
    for name, mask in found.items():
        if locked:
            assert (mask == mask[..., :1, :]).all(), name
            mask = mask[..., :1, :]
        if name.startswith("stack"):
            for layer, of_layer in enumerate(mask):
                masks[f"{name} of {layer}"] = of_layer
        else:
            masks[name] = mask
    n_masks = {Network.TRANSFORMER_XL: 3 * 3 + 3, Network.LSTM: 4, Network.QRNN: 4}
    assert len(masks) == n_masks[network], masks.keys()
    for name, mask in masks.items():
        assert kept_p(mask, rate) > SMALLEST, name
        for axis in range(mask.ndim):
            assert sums_p(mask, rate, axis) > SMALLEST, (name, axis)
    for (name, mask), (other_name, other) in itertools.combinations(masks.items(), 2):
        # The codes' mask has no rows of the batch.
        length = min(mask.shape[-2], other.shape[-2])
        first, second = np.broadcast_arrays(mask[..., :length, :], other[..., :length, :])
        assert pair_p(first, second, rate) > SMALLEST, (name, other_name)


@pytest.mark.parametrize("vocab_size", full_but([300_000], [300_000, 10_000_000]))
def test_dropped_words_are_independent(vocab_size):
    """Of words with neighbouring ids, and of two updates."""
    rate = 0.1
    embedding = Embedding(config(dropout__embedding=rate, d_model=2), vocab_size)
    # The first position of a segment is never dropped.
    tokens = jnp.arange(-1, vocab_size)[None].clip(0)
    variables = {"params": {"table_0": jnp.ones((vocab_size, 2))}}

    @jax.jit
    def kept(seed):
        rngs = {"dropout": jax.random.key(seed)}
        return embedding.apply(variables, tokens, deterministic=False, rngs=rngs)[0, 1:, 0] != 0

    first, second = (np.asarray(kept(seed)) for seed in (0, 1))
    assert kept_p(first, rate) > SMALLEST
    for distance in (1, 2, 256, 1000):
        assert pair_p(first[distance:], first[:-distance], rate) > SMALLEST, distance
    assert pair_p(first, second, rate) > SMALLEST


class Probe(nn.Module):
    """A model whose memory is the mask that a call of it drew, [1, B, M, D]."""

    rate: float

    @nn.compact
    def __call__(self, tokens, memory, *, clamp_len, same_length, deterministic):
        drop = Dropout(self.rate, deterministic=deterministic)
        scaled = drop(jnp.ones(memory.hidden.shape[1:]))
        mask = (scaled != 0).astype(jnp.float32)
        return scaled, Memory(mask[None], memory.valid)

    def nll(self, hidden, targets):
        return jnp.zeros(targets.shape)


def masks_of_steps(rate, *, microbatches=1, per_call=1, steps=4, shape=(8, 40, 128)):
    """The masks [B, M, D] after each call of the train step."""
    rows, mem_len, width = shape
    base = tiny.changed(
        tiny_run.CONFIG,
        train__grad_accum_steps=microbatches,
        train__batch_size=rows,
        train__segment_len=2,
    )
    optimizer = make_optimizer(base)
    step = jax.jit(make_train_step(Probe(rate), optimizer, learning_rate(base), base))
    params = {"unused": jnp.ones(())}
    memory = Memory(jnp.zeros((1, rows, mem_len, width)), jnp.zeros(rows, jnp.int32))
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        memory=memory,
        average=None,
    )
    segments = Segments(
        inputs=jnp.zeros((per_call, rows, 2), jnp.int32),
        targets=jnp.zeros((per_call, rows, 2), jnp.int32),
        weights=jnp.ones((per_call, rows, 2)),
        reset=jnp.zeros((per_call, rows), bool),
    )
    masks = []
    for _ in range(0, steps, per_call):
        state, _ = step(state, segments)
        masks.append(np.asarray(state.memory.hidden[0], bool))
    return masks


def test_masks_of_steps_and_microbatches_are_independent():
    rate = 0.1
    masks = masks_of_steps(rate, microbatches=2, steps=2)
    halves = [half for mask in masks for half in np.split(mask, 2)]
    for first, second in itertools.combinations(halves, 2):
        assert kept_p(first, rate) > SMALLEST
        assert pair_p(first, second, rate) > SMALLEST


def test_updates_per_call_and_a_later_start_change_no_mask():
    masks = masks_of_steps(0.3)
    assert len(masks) == 4
    pairs = masks_of_steps(0.3, per_call=2)
    np.testing.assert_array_equal(pairs, masks[1::2])


@pytest.mark.parametrize("remat", full_but([Remat.FULL], [Remat.FULL, Remat.DOTS]))
def test_remat_changes_no_mask(remat, x64):
    """Neither in the forward pass nor in the backward pass, where it is drawn once more."""
    changes = {"dtype": DType.FLOAT64, "dropout__rate": 0.3, "dropout__attention": 0.2}

    def loss_and_gradients(remat):
        model = model_of(Network.TRANSFORMER_XL, remat=remat, **changes)
        memory = model.init_memory(batch_size=tiny.B, mem_len=3)

        def loss(params):
            hidden, _ = model.apply({"params": params}, tiny.text(5), memory, rngs=RNGS, **DRAWING)
            return jnp.sum(hidden**3)

        return jax.jit(jax.value_and_grad(loss))(tiny_run.params(model))

    found, expected = (loss_and_gradients(each) for each in (remat, Remat.NONE))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11),
        found,
        expected,
    )


def test_masks_of_ensemble_members():
    """By their seeds independent, by their rates the same numbers, at traced rates."""
    rates = np.asarray([0.05, 0.1, 0.1, 0.5], np.float32)
    seeds = jnp.asarray([0, 0, 1, 1])
    shape = (50, 200, 100)

    @jax.jit
    @jax.vmap
    def masks(rate, seed):
        drop = Dropout(rate, deterministic=False)
        return drop.apply({}, jnp.ones(shape), rngs={"dropout": jax.random.key(seed)}) != 0

    found = np.asarray(masks(rates, seeds))
    for mask, rate in zip(found, rates, strict=True):
        assert kept_p(mask, float(rate)) > SMALLEST
    assert pair_p(found[1], found[2], 0.1) > SMALLEST
    # What is kept at a rate is kept at each lower one.
    assert not (found[1] & ~found[0]).any() and not (found[3] & ~found[2]).any()


CASES = {
    "all": {
        "model__network": Network.TRANSFORMER_XL,
        "model__dropout__attention": 0.1,
        "model__dropout__qkv": 0.1,
    },
    "locked": {"model__network": Network.TRANSFORMER_XL, "model__dropout__locked": True},
    "lstm": {"model__network": Network.LSTM},
    "qrnn": {"model__network": Network.QRNN},
}


@pytest.mark.parametrize("name", CASES)
def test_no_random_bits_but_seeds_in_a_train_step(name):
    """Threefry costs ten times the hash, and XLA runs it twice and stores the mask."""
    changes = {
        "model__d_model": 64,
        "model__n_head": 4,
        "model__d_head": 16,
        "model__d_inner": 256,
        "model__dropout__rate": 0.1,
        "model__dropout__embedding": 0.1,
        "train__batch_size": 4,
        "train__segment_len": 64,
        "train__mem_len": 64,
    }
    made = build(tiny.changed(tiny_run.CONFIG, **changes | CASES[name]), vocab_size=20_000)
    step = make_train_step(made.model, made.optimizer, made.schedule, made.config)
    segments = made.abstract_segments(made.config.train)
    program = jax.make_jaxpr(step)(made.abstract_state, segments)
    sizes = [
        output.aval.size
        for equation in tiny.equations(program)
        if equation.primitive.name in ("random_bits", "threefry2x32")
        for output in equation.outvars
    ]
    # Some seeds are there: this would see more.
    assert sizes and max(sizes) <= 10_000
