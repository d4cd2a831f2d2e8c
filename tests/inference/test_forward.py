"""Tests that keys and values kept from segment to segment give the numbers of memory kept as hidden
states.

And of a temperature of evaluation, which divides logits with their biases, of each network; and
generation: greedy text on a ring against one pass, and prompts of any length.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from txl_jax import memory as memory_lib
from txl_jax.config import (
    CompatConfig,
    DType,
    Encoding,
    EvalConfig,
    GenerateConfig,
    Network,
    NormPlace,
    ShawTerms,
)
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import forward
from txl_jax.inference.decode import BlockRows, Sampling, decode_block, row_key
from txl_jax.inference.prepare import prepare_params
from txl_jax.inference.scorer import make_scorer
from txl_jax.modules.recurrent import RecurrentModel

SEGMENTS = 10


class Lengths(NamedTuple):
    """How a text is read."""

    segment_len: int
    mem_len: int
    clamp_len: int | None
    same_length: bool


# Memories that L divides and does not, shorter than a segment, and none. Clamps below a segment,
# inside the memory, and above all distances. The cache rounds the memory up to whole segments.
LENGTHS = {
    "divides": Lengths(4, 8, None, False),
    "rounded up": Lengths(4, 10, None, True),
    "shorter": Lengths(5, 3, None, False),
    "clamp": Lengths(3, 11, 7, True),
    "clamp below a segment": Lengths(3, 11, 2, False),
    "clamp of one": Lengths(6, 6, 1, True),
    "clamp above all": Lengths(7, 16, 30, True),
    "one token": Lengths(1, 6, 4, False),
    "no memory": Lengths(4, 0, None, False),
}
MODELS = {
    "post": {},
    "pre": {"layer_norm": NormPlace.PRE},
    "own biases": {"untie_r": True},
    "tied positions": {"tie_positions": True},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2, "d_embed": 8, "tie_projs": (False, True, True)},
}
# Starts and windows of other implementations.
for preset in ("tf", "hf", "pytorch"):
    MODELS[preset] = {"compat": tiny.compat_config(preset)}
MODELS["shaw, as the original"] = {
    "encoding": Encoding.SHAW,
    "num_positions": 6,
    "compat": CompatConfig(shaw_terms=ShawTerms.ORIGINAL),
}
for encoding in Encoding:
    if encoding is Encoding.RELATIVE:
        continue  # The models above have it.
    MODELS[str(encoding)] = {"encoding": encoding}
    if encoding.is_learned:
        MODELS[str(encoding)]["num_positions"] = 9


@functools.cache
def prepared(model, lengths: Lengths):
    return tiny.prepared(model, tiny.variables(model), **lengths._asdict())


class Reading(NamedTuple):
    """What a model returns for a segment."""

    hidden: jax.Array
    nll: jax.Array
    memory: Any  # After the segment.


def both(model, lengths: Lengths, *, reset_at=None, cache_dtype=None):
    """Yields the `Reading` of each segment of a text with a KV cache, and with hidden states.

    The second row begins anew at the segment `reset_at`.
    """
    segment_len, mem_len, clamp_len, same_length = lengths
    memory_start = model.config.compat.memory_start
    variables = tiny.variables(model)
    window = model.config.compat.window(mem_len, same_length=same_length)

    @jax.jit
    def start(params):
        weights = prepare_params(
            params,
            model=model,
            segment_len=segment_len,
            mem_len=mem_len,
            clamp_len=clamp_len,
            window=window,
        )
        cache = forward.init_cache(
            weights,
            batch_size=tiny.B,
            mem_len=mem_len,
            segment_len=segment_len,
            dtype=cache_dtype,
        )
        return weights, cache

    def read_with_cache(weights, tokens, targets, cache, is_reset):
        cache = cache_lib.reset_cache(cache, is_reset, weights.initial, memory_start)
        hidden, cache = forward.forward(weights, tokens, cache)
        return Reading(hidden, forward.nll(weights, hidden, targets), cache)

    def read_with_states(variables, tokens, targets, memory, is_reset):
        memory = memory_lib.reset(memory, is_reset)
        hidden, memory = model.apply(
            variables, tokens, memory, clamp_len=clamp_len, same_length=same_length
        )
        nll = model.apply(variables, hidden, targets, method=model.nll)
        return Reading(hidden, nll, memory)

    # One program, which compiles faster than two.
    @jax.jit
    def read(weights, variables, tokens, targets, cache, memory, is_reset):
        with_cache = read_with_cache(weights, tokens, targets, cache, is_reset)
        with_states = read_with_states(variables, tokens, targets, memory, is_reset)
        return with_cache, with_states

    text = tiny.text(segment_len * SEGMENTS + 1)
    weights, cache = start(variables["params"])
    memory = model.init_memory(batch_size=tiny.B, mem_len=mem_len)
    for number in range(SEGMENTS):
        first = number * segment_len
        tokens = text[:, first : first + segment_len]
        targets = text[:, first + 1 : first + 1 + segment_len]
        is_reset = (np.arange(tiny.B) == 1) & (number == reset_at)

        with_cache, with_states = read(weights, variables, tokens, targets, cache, memory, is_reset)
        cache = with_cache.memory
        memory = with_states.memory
        yield with_cache, with_states


# Every model at the lengths where something may go wrong, every length with the usual model.
CASES = [("post", name) for name in LENGTHS]
OTHER_MODELS = [name for name in MODELS if name != "post"]
CASES += itertools.product(OTHER_MODELS, ("rounded up", "clamp"))
QUICK = [
    ("post", "rounded up"),
    ("post", "clamp of one"),
    ("post", "one token"),
    ("post", "no memory"),
    ("pre", "clamp"),
    ("own biases", "clamp"),
    ("tied positions", "clamp"),
    ("adaptive", "clamp"),
    ("vaswani", "clamp"),
    ("shaw, as the original", "clamp"),
    ("tf", "rounded up"),
    ("hf", "rounded up"),
    ("pytorch", "rounded up"),
]


@pytest.mark.parametrize(("model", "lengths"), full_but(QUICK, CASES))
def test_both_memories_agree_over_ten_segments(model, lengths, x64):
    model = tiny.make(dtype=DType.FLOAT64, **MODELS[model])

    for with_cache, with_states in both(model, LENGTHS[lengths], reset_at=4):
        np.testing.assert_allclose(with_cache.hidden, with_states.hidden, rtol=0, atol=1e-12)
        np.testing.assert_allclose(with_cache.nll, with_states.nll, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(with_cache.memory.valid, with_states.memory.valid)


def test_the_query_is_scaled_before_it_is_rounded():
    """The step scales its products: a query that is rounded twice moves every score by another part
    in 256.
    """
    model = tiny.make(dtype=DType.BFLOAT16)
    layers = tiny.variables(model)["params"]["stack"]["layers"]
    query = np.asarray(layers["attention"]["query"][0])
    scale = np.float32(tiny.E**-0.5)

    scaled = prepared(model, LENGTHS["clamp"]).layers[0].query_key_value[:, 0]

    np.testing.assert_array_equal(scaled, (query * scale).astype(jnp.bfloat16))
    assert np.any(np.asarray(scaled) != query.astype(jnp.bfloat16) * jnp.bfloat16(scale))


def test_a_narrower_memory_is_read_in_the_compute_type(x64):
    """float32 in a float64 model: off by about what float32 rounds, 1e-7.

    Without a difference the memory would not be narrower.
    """
    model = tiny.make(dtype=DType.FLOAT64)
    differences = []
    for with_cache, with_states in both(model, LENGTHS["clamp"], cache_dtype=jnp.float32):
        difference = np.subtract(with_cache.hidden, with_states.hidden)
        differences.append(np.abs(difference).max())

    assert 1e-9 < max(differences) < 1e-6


@pytest.mark.full
# None is one row, and an index that all rows share. 1 and 3 are rows that each have an index.
@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_step_keeps_no_copy_of_the_memory(rows, dtype):
    """Eight steps take less temporary memory than the keys and values of a layer, of four.

    So the cache is written in place.
    """
    model = tiny.make(n_layer=4, d_model=64, n_head=4, d_head=16, d_inner=64)
    weights = prepared(model, Lengths(1, 4096, 64, False))
    n_row = rows or 1
    cache = forward.init_cache(weights, batch_size=n_row, mem_len=4096, segment_len=1, dtype=dtype)
    if rows:
        cache = cache.replace(write_index=cache.valid)
    block_rows = BlockRows(
        known=np.zeros((n_row, 1), np.int32),
        number=np.zeros(n_row, np.int32),
        steps=np.full(n_row, 8, np.int32),
        key=np.stack([row_key(0)] * n_row),
        stop=np.int32(-1),  # No token stops a row.
    )

    steps = jax.jit(decode_block, static_argnames=("sampling", "count"), donate_argnums=1)
    compiled = steps.lower(weights, cache, block_rows, Sampling(1.0, 1.0), count=8).compile()

    of_one_layer = cache.keys[0].nbytes + cache.values[0].nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < of_one_layer


@pytest.mark.parametrize(
    ("mem_len", "segment_len", "length", "numbers"),
    [
        pytest.param(16, 4, 4, r"\b16\b.*\b4\b.*\b12\b", id="memory"),
        pytest.param(8, 8, 8, r"\b8\b.*\b8\b.*\b12\b", id="segments"),
        pytest.param(8, 4, 3, r"\b8\b.*\b3\b", id="tokens"),
    ],
)
def test_other_lengths_than_those_of_the_weights_are_refused(mem_len, segment_len, length, numbers):
    """The weights are for 8 slots and 4 tokens, together 12 keys.

    In turn: more keys than 12, because of the slots and because of the tokens; and a segment that
    does not divide the slots.
    """
    weights = prepared(tiny.make(), Lengths(4, 8, 0, False))
    memory = forward.init_cache(weights, batch_size=1, mem_len=mem_len, segment_len=segment_len)

    with pytest.raises(ValueError, match=numbers):
        forward.forward(weights, jnp.zeros((1, length), jnp.int32), memory)


@pytest.mark.parametrize("network", Network)
def test_logits_are_divided_with_their_biases(network):
    """By the temperature of evaluation."""
    temperature = 1.7
    if network is Network.TRANSFORMER_XL:
        model = tiny.make()
    else:
        model = RecurrentModel(tiny.model_config(network=network), tiny.V)
    rng = np.random.default_rng(0)
    params = tiny_run.params(model)
    params["softmax"]["bias"] = rng.normal(size=tiny.V).astype(np.float32)
    hidden = rng.normal(size=(2, 5, tiny.D)).astype(np.float32)
    targets = rng.integers(tiny.V, size=(2, 5))

    scorer = make_scorer(model, dataclasses.replace(tiny_run.CONFIG.eval, temperature=temperature))

    @jax.jit
    def nll(params, hidden, targets):
        return scorer.nll(scorer.prepare_params(params), hidden, targets)

    actual = nll(params, hidden, targets)

    logits = hidden @ params["embedding"]["table_0"].T + params["softmax"]["bias"]
    exponentials = np.exp(logits / temperature)
    probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True)
    for row, column in np.ndindex(targets.shape):
        expected = -np.log(probabilities[row, column, targets[row, column]])
        np.testing.assert_allclose(
            actual[row, column], expected, rtol=1e-4, atol=1e-5, err_msg=f"{row}, {column}"
        )


TEXT = np.random.default_rng(2).integers(tiny.V, size=12).tolist()
LONGEST = 60  # More than 12 tokens of a prompt and 45 generated tokens.


@functools.cache
def one_pass(window: int):
    """The compiled log probabilities [1, LONGEST, V] of tokens read at once.

    A query attends to the last `window` keys.
    """
    model = tiny.make(dtype=DType.FLOAT64)

    @jax.jit
    def log_probabilities(params, tokens):
        # The length of the memory is the window. No slot is filled.
        empty = model.init_memory(batch_size=1, mem_len=window)
        variables = {"params": params}
        hidden, _ = model.apply(variables, tokens, empty, clamp_len=5, same_length=True)
        return model.apply(variables, hidden, method=model.log_probabilities)

    return functools.partial(log_probabilities, tiny_run.params(model))


def argmax_of_one_pass(tokens: list[int], window: int) -> list[int]:
    """The most likely token after each position of a text read at once."""
    # One program for all texts: no position sees what follows it.
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(tokens)] = tokens
    log_p = np.asarray(one_pass(window)(padded))
    return np.argmax(log_p[0, : len(tokens)], axis=-1).tolist()


@functools.cache
def generator_on_a_ring(same_length: bool):
    lengths = EvalConfig(segment_len=3, mem_len=7, clamp_len=5, same_length=same_length)
    return tiny_run.generator(tiny.make(dtype=DType.FLOAT64), lengths)


def greedy_text(prompt: list[int], length: int, *, same_length: bool) -> list[int]:
    generator = generator_on_a_ring(same_length)
    blocks = generator.tokens(prompt, GenerateConfig(length=length, temperature=0))
    return np.concatenate(list(blocks), axis=1)[0].tolist()


# A token attends to the ring's 7 slots and to itself, or to as many keys as the ring has slots.
@pytest.mark.parametrize(("same_length", "window"), [(False, 8), (True, 7)])
def test_greedy_text_on_a_ring_matches_one_pass_without_memory(same_length, window, x64):
    """Token for token, where the ring of 7 slots goes round eight times."""
    text = greedy_text(TEXT, 45, same_length=same_length)

    # The last token of the prompt predicts the first one of the text.
    first = len(TEXT) - 1
    assert text == argmax_of_one_pass(TEXT + text, window)[first:-1]
    # The comparison sees a window of another size.
    assert len(set(text)) > 2
    assert text != argmax_of_one_pass(TEXT + text, window + 1)[first:-1]


@pytest.mark.parametrize("n_prompt", [1, 3, 4, 10])
def test_greedy_text_after_prompts_of_any_length_matches_one_pass(n_prompt, x64):
    """Segments have 3 tokens: a part of one, one, one and a part, and a prompt beyond the ring."""
    prompt = TEXT[:n_prompt]

    text = greedy_text(prompt, 6, same_length=False)

    # A token attends to the ring's 7 slots and to itself.
    assert text == argmax_of_one_pass(prompt + text, 8)[n_prompt - 1 : -1]


def test_weights_for_single_tokens_share_arrays_with_those_for_segments():
    """So a generator holds the embedding and the softmax once."""
    lengths = EvalConfig(segment_len=3, mem_len=32, clamp_len=None, same_length=False)
    generator = tiny_run.generator(tiny.make(), lengths)

    def buffers(params):
        leaves = jax.tree.leaves((params.embed_and_norm, params.clusters))
        return {leaf.unsafe_buffer_pointer() for leaf in leaves}

    assert buffers(generator.for_segments) == buffers(generator.for_tokens)
