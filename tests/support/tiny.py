"""A model small enough to compile in a second, with every size different from every other."""

import functools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from txl_jax.config import CompatConfig, DropoutConfig, ExperimentConfig, ModelConfig, config_tree
from txl_jax.config.experiment import apply_preset
from txl_jax.inference import forward
from txl_jax.inference.prepare import prepare_params
from txl_jax.modules.transformer_xl import TransformerXL

B = 3  # Batch size.
D = 6  # d_model.
H = 4  # Heads.
E = 5  # Size of a head.
F = 10  # d_inner.
V = 13  # Vocabulary size.
N = 2  # Layers.
# Weights that are large enough for every path to leave a mark.
_SIZES = {"n_layer": N, "d_model": D, "n_head": H, "d_head": E, "d_inner": F}
CONFIG = ModelConfig(
    **_SIZES, init_std=0.4, projection_init_std=0.4, dropout=DropoutConfig(rate=0.0)
)
# A context of float64. jax 0.7 has it only in jax.experimental, jax 0.12 only in jax.
if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
else:
    enable_x64 = jax.experimental.enable_x64


def make(*, end_token: int | None = None, **changes) -> TransformerXL:
    if changes.get("encoding", CONFIG.encoding).is_learned:
        changes.setdefault("num_positions", 12)
    return TransformerXL(model_config(**changes), V, end_token)


def model_config(**changes) -> ModelConfig:
    return changed(CONFIG, **changes)


def changed(config, **changes):
    """A config with some settings changed, such as `dropout__attention` for dropout.attention."""
    by_name = {name.replace("__", "."): value for name, value in changes.items()}
    return config_tree.replace(config, by_name)


def compat_config(preset: str) -> CompatConfig:
    return apply_preset(ExperimentConfig(), preset).model.compat


def variables(model: TransformerXL) -> dict:
    """Random parameters, with random biases and layer norms, without axis names.

    `model.init` is only traced.
    """
    # New dictionaries, since the drawn ones are kept.
    return jax.tree.map(lambda leaf: leaf, _drawn(model, jax.config.jax_enable_x64))


@functools.cache
def _drawn(model: TransformerXL, x64: bool) -> dict:
    """The parameters, which depend on whether there is float64."""
    assert jax.config.jax_enable_x64 == x64
    tokens = jnp.zeros((1, 2), jnp.int32)
    memory = model.init_memory(batch_size=1, mem_len=1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, memory)
    rng = np.random.default_rng(1)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        numbers = rng.normal(size=leaf.shape)
        if path[-1].key == "scale":  # A layer norm's.
            numbers = 1 + 0.1 * numbers
        else:
            numbers = CONFIG.init_std * numbers
        # Converted by numpy, because JAX would compile a conversion for each shape.
        return jnp.asarray(numbers.astype(leaf.dtype))

    # What is kept are arrays also where this is called in a traced function.
    with jax.ensure_compile_time_eval():
        return jax.tree_util.tree_map_with_path(draw, shapes)


def text(length: int, *, rows: int = B, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(V, size=(rows, length), dtype=np.int32)


def encoder(
    model: TransformerXL,
    *,
    clamp_len: int | None = None,
    same_length: bool = False,
    deterministic: bool = True,
):
    """A compiled function: (variables, tokens, memory, rngs) -> (hidden, memory)."""
    options = {"clamp_len": clamp_len, "same_length": same_length, "deterministic": deterministic}

    @jax.jit
    def encode(variables, tokens, memory, rngs=None):
        return model.apply(variables, tokens, memory, rngs=rngs, **options)

    return encode


def stream(encode, variables, tokens: np.ndarray, lengths: list[int], memory) -> jnp.ndarray:
    """Hidden states [B, sum of lengths, D] of a text read in segments of these lengths."""
    parts = []
    start = 0
    for length in lengths:
        hidden, memory = encode(variables, tokens[:, start : start + length], memory)
        parts.append(np.asarray(hidden))
        start += length
    return np.concatenate(parts, axis=1)


def prepared(model: TransformerXL, variables: dict, *, same_length: bool = False, **lengths):
    window = model.config.compat.window(lengths["mem_len"], same_length=same_length)
    lengths = {"clamp_len": None} | lengths
    prepare = functools.partial(prepare_params, model=model, window=window, **lengths)
    return jax.jit(prepare)(variables["params"])


@jax.jit
def read_cached(weights, tokens, targets, cache):
    """Hidden states, nats of the targets, and the cache after a segment."""
    hidden, cache = forward.forward(weights, tokens, cache)
    return hidden, forward.nll(weights, hidden, targets), cache


def over_segments(read, memory, tokens: np.ndarray, segment_len: int):
    """Nats [B, T - 1] of a text, and the last memory.

    `read` is a function: (tokens, targets, memory) -> (nats, memory).
    """
    parts = []
    for first in range(0, tokens.shape[1] - 1, segment_len):
        end = min(first + segment_len, tokens.shape[1] - 1)
        nats, memory = read(tokens[:, first:end], tokens[:, first + 1 : end + 1], memory)
        parts.append(nats)
    return np.concatenate(parts, axis=1), memory


def equations(jaxpr):
    """Yields the equations of a program and of all that it calls."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        parameters = list(equation.params.values())
        for part in jax.tree.leaves(parameters, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield from equations(part)


def with_gradients(function):
    """A compiled function: (values, gradients by the first two arguments).

    The gradients are of a sum in which every value has a different weight.
    """

    @jax.jit
    def call(first, second, *rest):
        values, pull_back = jax.vjp(lambda *operands: function(*operands, *rest), first, second)
        return values, pull_back(jnp.arange(1.0, values.size + 1).reshape(values.shape))

    return call
