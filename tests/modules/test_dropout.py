"""Tests of dropout: masks and who shares them, traced rates, and independence.

The masks of a model's places, of training steps and of microbatches are independent. The statistics
are p-values, which are below `SMALLEST`, 1e-6, if masks are not random.

That the places stay is tested in tests/anchors, the hash in tests/ops/test_random_masks.py, masks
on meshes in tests/sharding, and that remat changes no mask in tests/modules/test_transformer_xl.py.
"""

import itertools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from support.mask_statistics import SMALLEST, kept_p, pair_p, sums_p
from txl_jax.config import DType, Network
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
# Options of a model's call in training, which drops.
TRAINING = {"clamp_len": None, "same_length": False, "deterministic": False}
L = 40
config = tiny.model_config


@pytest.mark.parametrize("locked", [False, True], ids=["not locked", "locked"])
def test_locked_masks_are_shared_by_positions_and_not_by_rows(locked):
    drop = dropout(config(dropout__locked=locked), 0.4, deterministic=False)

    @jax.jit
    def dropped(array):
        return drop.apply({}, array, rngs=RNGS)

    scaled = np.asarray(dropped(np.ones((50, L, 60), np.float32)))
    assert set(np.unique(scaled)) == {0.0, np.float32(1 / 0.6)}
    # A locked mask has 50 x 60 numbers, whose mean has a standard deviation of 0.015.
    assert scaled.mean() == pytest.approx(1, abs=0.03)
    assert (scaled == scaled[:, :1]).all() == locked
    assert (scaled[0] != scaled[1]).any()

    # Positional encodings have no rows.
    codes = np.asarray(dropped(np.ones((L, 60), np.float32)))
    assert (codes == codes[:1]).all() == locked


def embedder(rate, vocab_size, width):
    """Returns a compiled function (tokens, seed) -> embeddings whose numbers are equal.

    They are 0 for words that are dropped.
    """
    embedding = Embedding(config(dropout__embedding=rate, d_model=width), vocab_size)
    variables = {"params": {"table_0": np.ones((vocab_size, width), np.float32)}}

    @jax.jit
    def embed(tokens, seed):
        rngs = {"dropout": jax.random.key(seed)}
        return embedding.apply(variables, tokens, deterministic=False, rngs=rngs)

    return embed


def test_whole_words_are_dropped_at_all_their_positions():
    """Except where they begin a segment, where they stay as they are."""
    embed = embedder(0.5, tiny.V, tiny.D)
    whole = np.float32(tiny.D**0.5)
    tokens = tiny.text(L)

    vectors = np.asarray(embed(tokens, 0))[:, 1:]

    numbers = set()
    for token in np.unique(tokens[:, 1:]):
        of_token = np.unique(vectors[tokens[:, 1:] == token])
        assert len(of_token) == 1, f"token {token} has {of_token}"
        numbers.add(of_token[0])
    assert numbers == {np.float32(0), 2 * whole}

    first = embed(np.arange(tiny.V)[:, None], 0)
    np.testing.assert_array_equal(first, np.full(first.shape, whole))


def model_of(network, **changes):
    build = TransformerXL if network is Network.TRANSFORMER_XL else RecurrentModel
    return build(config(network=network, **changes), tiny.V)


@pytest.mark.parametrize("network", full_but([Network.QRNN], Network))
def test_traced_rates_are_those_of_the_config(network, x64):
    """Under `vmap` over two models, which differ in all six rates.

    The second one gives the same as a model whose config has its rates.
    """
    # The traced rates must replace this one.
    model = model_of(network, dtype=DType.FLOAT64, dropout__rate=0.9)
    memory = model.init_memory(batch_size=tiny.B, mem_len=3)
    params = tiny_run.params(model)
    rngs = {"dropout": jax.random.key(0, impl="rbg")}  # Compiles faster than the default.

    def hidden(model):
        return model.apply({"params": params}, tiny.text(5), memory, rngs=rngs, **TRAINING)[0]

    first_rates = 0.1 + np.arange(6) / 10
    second_rates = 0.2 + np.arange(6) / 10
    rates = {}
    changes = {}
    for i, name in enumerate(member_axis.RATES):
        rates[name] = np.asarray([first_rates[i], second_rates[i]])
        changes[f"dropout__{name}"] = float(second_rates[i])
    assert len(rates) == 6

    results = jax.jit(jax.vmap(lambda rates: hidden(member_axis.with_rates(model, rates))))(rates)

    model_with_rates = model_of(network, dtype=DType.FLOAT64, **changes)
    expected = jax.jit(lambda: hidden(model_with_rates))()
    np.testing.assert_allclose(results[1], expected, rtol=1e-12, atol=1e-12)
    assert np.abs(results[0] - results[1]).max() > 0.01


def test_scoring_drops_nothing():
    """The program is the same as for a model without dropout."""
    plain = tiny.make()
    dropping = tiny.make(
        dropout__rate=0.5, dropout__attention=0.5, dropout__embedding=0.5, dropout__qkv=0.5
    )
    variables = {"params": tiny_run.params(plain)}
    memory = plain.init_memory(batch_size=tiny.B, mem_len=3)

    def program(model, deterministic):
        encode = tiny.encoder(model, deterministic=deterministic)
        rngs = None if deterministic else RNGS
        return str(jax.make_jaxpr(encode)(variables, tiny.text(5), memory, rngs))

    assert program(dropping, deterministic=True) == program(plain, deterministic=True)
    # A program that drops something differs.
    assert program(dropping, deterministic=False) != program(plain, deterministic=False)


def _sow_mask(call, arguments, options, context):
    """Stores the mask of a dropout, for `nn.intercept_methods`."""
    if not isinstance(context.module, Dropout) or context.method_name != "__call__":
        return call(*arguments, **options)
    array, *rest = arguments
    scaled = call(jnp.ones_like(array), *rest, **options)
    # The scan over layers stacks this collection.
    context.module.sow("attention", "mask", scaled != 0)
    return array * scaled


def masks_of(model, key, *, rows, length):
    """The masks of all dropouts of activations in a training call, by the path of the module.

    A path ends with the number of the call. Masks are [..], or [N, ..] in a stack of layers.
    """

    @jax.jit
    def call(params, tokens, memory):
        with nn.intercept_methods(_sow_mask):
            _, collections = model.apply(
                {"params": params},
                tokens,
                memory,
                deterministic=False,
                rngs={"dropout": key},
                mutable=["attention"],
            )
        return collections["attention"]

    memory = model.init_memory(batch_size=rows, mem_len=length)
    sown = call(tiny_run.params(model), tiny.text(length, rows=rows), memory)
    masks = {}
    for path, mask in jax.tree.leaves_with_path(sown):
        *module, name, number = path
        if name.key == "mask":
            name = jax.tree_util.keystr((*module, number), simple=True, separator=" ")
            masks[name] = np.asarray(mask)
    return masks


class Place(NamedTuple):
    """Sizes of a model's masks."""

    rows: int
    length: int
    width: int
    locked: bool


PLACES = {
    "plain": Place(rows=8, length=64, width=256, locked=False),
    "locked": Place(rows=256, length=3, width=256, locked=True),
    "ten million numbers": Place(rows=80, length=128, width=1024, locked=False),
}
# Masks of a model of 3 layers. Each layer of a Transformer-XL has one after attention and two in
# its feed-forward network, and encodings, embeddings and output have one each. A recurrent model
# has one for the embeddings, two between its layers, and one for the output.
N_MASKS = {Network.TRANSFORMER_XL: 3 * 3 + 3, Network.LSTM: 4, Network.QRNN: 4}


def masks_of_places(network, place, rate):
    """The masks of a model of 3 layers by place.

    A locked mask is the same at all positions, of which only the first is returned.
    """
    model = model_of(
        network,
        n_layer=3,
        d_model=place.width,
        d_inner=place.width,
        n_head=2,
        d_head=8,
        dropout__rate=rate,
        dropout__locked=place.locked,
    )
    masks = {}
    by_path = masks_of(model, jax.random.key(5), rows=place.rows, length=place.length)
    for name, mask in by_path.items():
        if place.locked:
            assert (mask == mask[..., :1, :]).all(), name
            mask = mask[..., :1, :]
        if name.startswith("stack"):
            for layer, mask_of_layer in enumerate(mask):
                masks[f"{name} of {layer}"] = mask_of_layer
        else:
            masks[name] = mask
    return masks


@pytest.mark.parametrize("case", full_but(["plain", "locked"], PLACES))
@pytest.mark.parametrize("network", Network)
def test_masks_of_a_models_places_are_independent(network, case):
    """Between any two places, of two layers or of two uses of one module.

    For example, the input dropout is used for positional encodings and for embeddings.
    """
    rate = 0.1
    masks = masks_of_places(network, PLACES[case], rate)

    assert len(masks) == N_MASKS[network], masks.keys()
    for name, mask in masks.items():
        assert kept_p(mask, rate) > SMALLEST, name
        for axis in range(mask.ndim):
            assert sums_p(mask, rate, axis) > SMALLEST, (name, axis)
    for (name, mask), (other_name, other) in itertools.combinations(masks.items(), 2):
        # The encodings' mask has no rows of the batch, and more positions than the others.
        length = min(mask.shape[-2], other.shape[-2])
        first, second = np.broadcast_arrays(mask[..., :length, :], other[..., :length, :])
        assert pair_p(first, second, rate) > SMALLEST, (name, other_name)


@pytest.mark.parametrize("vocab_size", full_but([300_000], [300_000, 10_000_000]))
def test_dropped_words_are_independent(vocab_size):
    """Words with neighbouring ids, and words of two training steps."""
    rate = 0.1
    embed = embedder(rate, vocab_size, 2)
    # The first position of a segment is never dropped, so word 0 is there twice.
    tokens = np.arange(-1, vocab_size, dtype=np.int32)[None].clip(0)

    first = np.asarray(embed(tokens, 0))[0, 1:, 0] != 0
    second = np.asarray(embed(tokens, 1))[0, 1:, 0] != 0

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


def masks_of_steps(rate, *, microbatches=1, per_call=1, steps=4):
    """The masks [B, M, D] after each call of the train step."""
    rows = 8
    mem_len = 40
    width = 128
    base = tiny.changed(
        tiny_run.CONFIG,
        train__grad_accum_steps=microbatches,
        train__batch_size=rows,
        train__segment_len=2,
    )
    optimizer = make_optimizer(base)
    step = jax.jit(make_train_step(Probe(rate), optimizer, learning_rate(base), base))

    params = {"unused": np.ones((), np.float32)}
    memory = Memory(np.zeros((1, rows, mem_len, width), np.float32), valid=np.zeros(rows, np.int32))
    opt_state = jax.jit(optimizer.init)(params)
    state = TrainState(
        step=np.int32(0), params=params, opt_state=opt_state, memory=memory, average=None
    )
    segments = Segments(
        inputs=np.zeros((per_call, rows, 2), np.int32),
        targets=np.zeros((per_call, rows, 2), np.int32),
        weights=np.ones((per_call, rows, 2), np.float32),
        reset=np.zeros((per_call, rows), bool),
    )

    masks = []
    for _ in range(0, steps, per_call):
        state, _ = step(state, segments)
        masks.append(np.asarray(state.memory.hidden)[0].astype(bool))
    return masks


def test_masks_of_steps_and_microbatches_are_independent():
    rate = 0.1
    halves = []
    for mask in masks_of_steps(rate, microbatches=2, steps=2):
        halves.extend(np.split(mask, 2))

    assert len(halves) == 4
    for first, second in itertools.combinations(halves, 2):
        assert kept_p(first, rate) > SMALLEST
        assert pair_p(first, second, rate) > SMALLEST


def test_updates_per_call_change_no_mask():
    """Two updates in a call have the masks of two calls. The second call starts at a later step."""
    masks = masks_of_steps(0.3)
    assert len(masks) == 4

    pairs = masks_of_steps(0.3, per_call=2)

    # A call leaves the mask of its last update.
    np.testing.assert_array_equal(pairs, masks[1::2])


def test_masks_of_ensemble_members():
    """Members with other seeds have independent masks, with other rates masks of the same numbers.

    The rates are traced.
    """
    rates = np.asarray([0.05, 0.1, 0.1, 0.5], np.float32)
    seeds = np.asarray([0, 0, 1, 1])
    shape = (50, 200, 100)

    @jax.jit
    @jax.vmap
    def masks_of_members(rate, seed):
        drop = Dropout(rate, deterministic=False)
        return drop.apply({}, jnp.ones(shape), rngs={"dropout": jax.random.key(seed)}) != 0

    masks = np.asarray(masks_of_members(rates, seeds))

    for mask, rate in zip(masks, rates, strict=True):
        assert kept_p(mask, float(rate)) > SMALLEST, f"rate {rate}"
    assert pair_p(masks[1], masks[2], 0.1) > SMALLEST
    # A number that is kept at a rate is kept at each lower rate.
    assert not (masks[1] & ~masks[0]).any()
    assert not (masks[3] & ~masks[2]).any()


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
    config = tiny.changed(
        tiny_run.CONFIG,
        model__d_model=64,
        model__n_head=4,
        model__d_head=16,
        model__d_inner=256,
        model__dropout__rate=0.1,
        model__dropout__embedding=0.1,
        train__batch_size=4,
        train__segment_len=64,
        train__mem_len=64,
        **CASES[name],
    )
    built = build(config, vocab_size=20_000)
    step = make_train_step(built.model, built.optimizer, built.schedule, built.config)
    segments = built.abstract_segments(built.config.train)
    program = jax.make_jaxpr(step)(built.abstract_state, segments)

    sizes = []
    for equation in tiny.equations(program):
        if equation.primitive.name in ("random_bits", "threefry2x32"):
            sizes.extend(output.aval.size for output in equation.outvars)
    # There are some seeds, so larger arrays would be seen. A mask of words has 20,000 numbers, and
    # masks of activations have 4 x 64 x 64 unless they are locked.
    assert sizes
    assert max(sizes) <= 10_000
