"""Tests of the model's parts in place: layer scan, remat, dropout, types, axis names, compile size."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny
from support.cases import slow_but
from txl_jax.config import CompatConfig, DType, Encoding, NormPlace, Remat, Residual, ShawTerms
from txl_jax.modules.block import Block, LayerContext
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.attention import Visibility, positions
from txl_jax.sharding import axes

L, M = 3, 8


def some_memory(model: TransformerXL):
    """A memory with a different number of filled slots in each row."""
    memory = model.init_memory(batch_size=tiny.B, mem_len=M)
    states = np.random.default_rng(2).normal(size=memory.hidden.shape).astype(memory.hidden.dtype)
    return memory.replace(hidden=jnp.asarray(states), valid=jnp.asarray([0, 5, M], jnp.int32))


def loss_of(model: TransformerXL, *, deterministic: bool = True):
    """(variables, rngs) -> (summed nll, (hidden, nll, memory))."""

    @jax.jit
    def loss(variables, rngs=None):
        encode = tiny.encoder(model, deterministic=deterministic)
        hidden, memory = encode(variables, tiny.text(L), some_memory(model), rngs)
        nll = model.apply(variables, hidden, tiny.text(L, seed=1), method=model.nll)
        return nll.sum(), (hidden, nll, memory)

    return loss


def dropout_rngs(seed: int) -> dict[str, jax.Array]:
    """A generator that compiles faster than the default one."""
    return {"dropout": jax.random.key(seed, impl="rbg")}


@pytest.mark.parametrize(
    ("norm", "untie_r"),
    slow_but([(NormPlace.PRE, True), (NormPlace.POST, False)], itertools.product(NormPlace, [False, True])),
)
def test_the_scan_over_layers_is_a_loop_over_layers(norm, untie_r, x64):
    model = tiny.make(dtype=DType.FLOAT64, layer_norm=norm, untie_r=untie_r, compat=CompatConfig(final_norm=False))
    variables, memory = tiny.variables(model), some_memory(model)
    _, (hidden, _, after) = loss_of(model)(variables)

    params = variables["params"]
    codes = positions.sinusoids(positions.key_distances(M + L), tiny.D, jnp.float64)
    visibility = Visibility(memory.valid, L, M)
    shared = None if untie_r else (params["stack"]["biases"]["content"], params["stack"]["biases"]["position"])
    states = params["embedding"]["table_0"][tiny.text(L)] * tiny.D**0.5
    for layer in range(tiny.N):
        np.testing.assert_allclose(after.hidden[layer, :, -L:], states, rtol=0, atol=1e-12)
        of_layer = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["stack"]["layers"])
        block = Block(model.config, model.compat, deterministic=True)
        states, _ = block.apply(
            {"params": of_layer}, states, memory.hidden[layer], LayerContext(codes, visibility, shared)
        )
    np.testing.assert_allclose(hidden, states, rtol=0, atol=1e-12)


def test_tied_positions_are_the_keys_matrix_and_the_query_of_distance_zero(x64):
    """Against a model with matrices of their own, filled in by hand."""
    tied, own = (tiny.make(dtype=DType.FLOAT64, tie_positions=tie, untie_r=not tie) for tie in (True, False))
    params = tiny.variables(tied)["params"]
    layers = params["stack"]["layers"]
    assert set(layers["attention"]) == {"query", "key", "value", "output"} and "biases" not in params["stack"]
    code = positions.sinusoids(jnp.zeros(1, int), tiny.D, jnp.float64)[0]
    query = jnp.einsum("d,ndhe->nhe", code, layers["attention"]["query"])
    filled = {
        **layers,
        "attention": {**layers["attention"], "position_key": layers["attention"]["key"]},
        "biases": {"content": query, "position": query},
    }
    same = {"params": {**params, "stack": {"layers": filled}}}
    for lengths in ([4, 4, 4], [3, 5]):
        found, expected = (
            tiny.stream(
                tiny.encoder(model), of, tiny.text(12), lengths, model.init_memory(batch_size=tiny.B, mem_len=5)
            )
            for model, of in ((tied, {"params": params}), (own, same))
        )
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_remat_changes_neither_values_nor_gradients(x64):
    found, texts = {}, {}
    for remat in Remat:
        model = tiny.make(dtype=DType.FLOAT64, remat=remat, dropout__rate=0.3, dropout__attention=0.2)
        variables, rngs = tiny.variables(model), dropout_rngs(3)
        step = jax.value_and_grad(loss_of(model, deterministic=False), has_aux=True)
        traced = jax.jit(step).trace(variables, rngs)
        found[remat], texts[remat] = traced.lower().compile()(variables, rngs), str(traced.jaxpr)
    for remat in (Remat.DOTS, Remat.FULL):
        for a, b in zip(jax.tree.leaves(found[Remat.NONE]), jax.tree.leaves(found[remat]), strict=True):
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-11)
    # The number of matrix products in the backward pass shows what is rematerialised.
    products = {remat: text.count("dot_general[") for remat, text in texts.items()}
    assert products[Remat.NONE] < products[Remat.DOTS] < products[Remat.FULL]


# Where the original drops: name of the module that calls Dropout (call number), shape, rate.
WIDTHS = (tiny.B, L, tiny.D)
DROPOUTS = {
    "position codes": (("drop_input", 0), (M + L, tiny.D), 0.5),
    "embedding": (("drop_input", 1), WIDTHS, 0.5),
    "attention probabilities": (("stack/layers/attention/Dropout_0", 0), tiny.H, 0.25),
    "attention output": (("stack/layers/attention/Dropout_1", 0), WIDTHS, 0.5),
    "inner layer": (("stack/layers/feed_forward/Dropout_0", 0), (tiny.B, L, tiny.F), 0.5),
    "feed-forward output": (("stack/layers/feed_forward/Dropout_1", 0), WIDTHS, 0.5),
    "last layer": (("drop_output", 0), WIDTHS, 0.5),
}


@functools.cache
def compiled_with_dropout():
    """(hidden states, {place: (shape, rate)} of all dropouts); the first is a function of a factor for each output.

    That of attention probabilities has its number of heads instead of a shape, and its seed is changed.
    """
    model, places = tiny.make(dropout__rate=0.5, dropout__attention=0.25), {}

    def interceptor(factors, call, args, kwargs, context):
        outputs = call(*args, **kwargs)
        if not isinstance(context.module, nn.Dropout):
            return outputs
        path = "/".join(context.module.path)
        number = sum(seen == path for seen, _ in places) if path.startswith("drop_") else 0
        if context.method_name == "draw_seed":
            places[path, number] = (args[0], context.module.rate)
            return outputs.replace(seed=outputs.seed + (factors[path, number] - 1).astype(outputs.seed.dtype))
        places[path, number] = (args[0].shape, context.module.rate)
        return factors[path, number] * outputs

    variables = tiny.variables(model)

    @jax.jit
    def hidden(factors):
        places.clear()  # Calls are counted from the beginning of a trace.
        with nn.intercept_methods(functools.partial(interceptor, factors)):
            return loss_of(model, deterministic=False)(variables, dropout_rngs(3))[1][0]

    hidden(factors_of(None))
    return hidden, places


def factors_of(doubled):
    """A factor for the output of each dropout: 2 for one, 1 for the others."""
    return {place: np.float32(1 + (place == doubled)) for place, _, _ in DROPOUTS.values()}


def hidden_with_dropout(change=None):
    """Hidden states; dropout `change` gives twice its output."""
    hidden, _ = compiled_with_dropout()
    return hidden(factors_of(change))


def test_dropout_is_applied_where_the_original_has_it():
    _, places = compiled_with_dropout()
    assert places == {place: (shape, rate) for place, shape, rate in DROPOUTS.values()}


@pytest.mark.parametrize("place", [place for place, _, _ in DROPOUTS.values()], ids=DROPOUTS)
def test_every_dropout_is_on_the_path(place):
    assert np.abs(hidden_with_dropout(place) - hidden_with_dropout()).max() > 0.01


def test_layers_and_keys_drop_different_entries():
    """One mask for all layers, or for all steps, would be a weaker regulariser."""
    model = tiny.make(n_layer=3, dropout__rate=0.5, layer_norm=NormPlace.PRE, compat=CompatConfig(final_norm=False))
    variables = jax.tree.map(jnp.zeros_like, tiny.variables(model))
    # The only thing that a layer adds is the dropped-out bias of its feed-forward part.
    variables["params"]["stack"]["layers"]["feed_forward"]["outer_bias"] += 1
    encode, tokens = tiny.encoder(model, deterministic=False), tiny.text(L)
    empty = model.init_memory(batch_size=tiny.B, mem_len=L)

    def kept_by_layers(seed):
        _, memory = encode(variables, tokens, empty, dropout_rngs(seed))
        return np.diff(memory.hidden, axis=0) != 0

    first, again, other = kept_by_layers(1), kept_by_layers(1), kept_by_layers(2)
    np.testing.assert_array_equal(first, again)
    assert np.any(first[0] != first[1])
    assert np.any(first != other)
    assert 0.3 < first.mean() < 0.7


def test_deterministic_uses_no_dropout_and_needs_no_rng():
    dropping, plain = tiny.make(dropout__rate=0.5, dropout__attention=0.25), tiny.make()
    variables = tiny.variables(plain)
    np.testing.assert_array_equal(loss_of(dropping)(variables)[1][0], loss_of(plain)(variables)[1][0])


def test_bfloat16_computes_close_to_float32():
    exact, fast = tiny.make(), tiny.make(dtype=DType.BFLOAT16)
    variables = tiny.variables(fast)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    (_, (hidden, nll, _)), gradients = jax.jit(jax.value_and_grad(loss_of(exact), has_aux=True))(variables)
    (_, (fast_hidden, fast_nll, memory)), fast_gradients = jax.jit(jax.value_and_grad(loss_of(fast), has_aux=True))(
        variables
    )
    assert (fast_hidden.dtype, memory.hidden.dtype, fast_nll.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    # The distance of two bfloat16 numbers near 1 is 2**-7; some tens of roundings follow each other.
    assert 0 < distance(fast_hidden, hidden) < 0.01
    assert 0 < distance(fast_nll, nll) < 0.005
    paths = flax.traverse_util.flatten_dict(gradients, sep="/")
    for path, found in flax.traverse_util.flatten_dict(fast_gradients, sep="/").items():
        assert found.dtype == jnp.float32
        assert distance(found, paths[path]) < 0.03, path


def distance(found, expected) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))


ADAPTIVE = {"cutoffs": (4, 11), "d_embed": 16, "div_val": 2, "tie_projs": (False, True, True)}
AXES_CASES = {
    "post": {},
    "pre, u and v per layer": {"layer_norm": NormPlace.PRE, "untie_r": True},
    "gated": {"layer_norm": NormPlace.PRE, "residual": Residual.GATED},
    **{
        str(encoding): {"encoding": encoding} | ({"num_positions": 17} if encoding.is_learned else {})
        for encoding in Encoding
        if encoding is not Encoding.RELATIVE  # Those above.
    },
    "shaw, as the original": {
        "encoding": Encoding.SHAW,
        "num_positions": 17,
        "compat": CompatConfig(shaw_terms=ShawTerms.ORIGINAL),
    },
    "adaptive": ADAPTIVE,
    "adaptive, nothing tied": ADAPTIVE | {"tie_weight": False, "tie_projs": ()},
}


@pytest.mark.parametrize("changes", AXES_CASES.values(), ids=AXES_CASES)
def test_every_parameter_names_its_axes(changes):
    model, tokens = tiny.make(**changes), jnp.zeros((1, 2), jnp.int32)
    memory = model.init_memory(batch_size=1, mem_len=1)
    boxed = jax.eval_shape(model.init, jax.random.key(0), tokens, memory)["params"]
    sizes = {
        axes.LAYERS: {tiny.N},
        axes.EMBED: {tiny.D},
        axes.NORM: {tiny.D},
        axes.GATE: {tiny.D},
        None: {2, 3},  # Gates side by side.
        axes.HEADS: {tiny.H},
        axes.HEAD_DIM: {tiny.E},
        axes.POSITIONS: {17},
        axes.INNER: {tiny.F},
        axes.VOCAB: {tiny.V, 4, 7, 2},
        axes.CLUSTER_EMBED: {tiny.D} if not changes.get("cutoffs") else {16, 8, 4},
        axes.CLUSTERS: {2},
    }
    for path, leaf in flax.traverse_util.flatten_dict(boxed, sep="/").items():
        assert isinstance(leaf, nn.LogicallyPartitioned), path
        assert len(leaf.names) == leaf.value.ndim, path
        for name, size in zip(leaf.names, leaf.value.shape, strict=True):
            assert size in sizes[name], f"{path}: {name} of size {size}"


@pytest.mark.parametrize("remat", [Remat.NONE, Remat.DOTS])
def test_the_program_does_not_grow_with_the_layers(remat):
    def lowered_size(n_layer):
        model = tiny.make(n_layer=n_layer, remat=remat)
        memory = model.init_memory(batch_size=tiny.B, mem_len=M)
        tokens = tiny.text(L)
        shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens, memory))

        def loss(variables):
            hidden, _ = model.apply(variables, tokens, memory)
            return model.apply(variables, hidden, tokens, method=model.nll).sum()

        return len(jax.jit(jax.grad(loss)).lower(shapes).as_text())

    assert lowered_size(24) <= 1.01 * lowered_size(2)  # One per cent for longer numbers.


def test_log_probabilities_are_the_losses():
    model, targets = tiny.make(**ADAPTIVE), tiny.text(L, seed=1)
    variables, (hidden, nll, _) = tiny.variables(model), loss_of(model)(tiny.variables(model))[1]
    log_p = jax.jit(lambda hidden: model.apply(variables, hidden, method=model.log_probabilities))(hidden)
    np.testing.assert_allclose(-np.take_along_axis(log_p, targets[..., None], 2)[..., 0], nll, rtol=1e-5)
    np.testing.assert_allclose(np.exp(log_p).sum(-1), np.ones((tiny.B, L)), rtol=1e-5)


def test_the_final_norm_follows_the_config():
    for norm, final_norm, expected in (
        (NormPlace.PRE, True, True),
        (NormPlace.PRE, False, False),
        (NormPlace.POST, True, False),
    ):
        model = tiny.make(layer_norm=norm, compat=CompatConfig(final_norm=final_norm))
        variables = tiny.variables(model)
        assert ("final_norm" in variables["params"]) == expected
        if expected:
            hidden = tiny.encoder(model)(variables, tiny.text(L), some_memory(model))[0]
            scale, bias = (variables["params"]["final_norm"][name] for name in ("scale", "bias"))
            normed = (hidden - bias[None, None]) / scale[None, None]
            np.testing.assert_allclose(normed.mean(-1), np.zeros((tiny.B, L)), atol=1e-5)


def test_layer_norm_epsilon_comes_from_the_compat_settings():
    hidden = []
    for eps in (1e-5, 1e-1):
        model = tiny.make(compat=dataclasses.replace(CompatConfig(), layer_norm_eps=eps))
        hidden.append(tiny.encoder(model)(tiny.variables(model), tiny.text(L), some_memory(model))[0])
    assert np.abs(hidden[0] - hidden[1]).max() > 1e-3
