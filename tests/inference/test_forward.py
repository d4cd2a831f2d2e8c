"""Tests that keys and values kept from segment to segment give the numbers of memory kept as hidden
states.

And of a temperature of evaluation, which divides logits with their biases, of each network; and
generation: greedy text on a ring against one pass, and prompts of any length.
"""

import dataclasses
import functools

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
from txl_jax.inference.scorer import make_scorer
from txl_jax.modules.recurrent import RecurrentModel

SEGMENTS = 10
# L, M, clamp_len, same_length. Memories that L divides and does not, shorter than a segment, and
# none; clamps below a segment, inside the memory, above all distances.
LENGTHS = {
    "divides": (4, 8, None, False),
    "rounded up": (4, 10, None, True),
    "shorter": (5, 3, None, False),
    "clamp": (3, 11, 7, True),
    "clamp below a segment": (3, 11, 2, False),
    "clamp of one": (6, 6, 1, True),
    "clamp above all": (7, 16, 30, True),
    "one token": (1, 6, 4, False),
    "no memory": (4, 0, None, False),
}
MODELS = {
    "post": {},
    "pre": {"layer_norm": NormPlace.PRE},
    "own biases": {"untie_r": True},
    "tied positions": {"tie_positions": True},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2, "d_embed": 8, "tie_projs": (False, True, True)},
    **{
        str(encoding): {"encoding": encoding}
        | ({"num_positions": 9} if encoding.is_learned else {})
        for encoding in Encoding
        if encoding is not Encoding.RELATIVE  # Those above.
    },
    # Starts and windows of other implementations.
    **{preset: {"compat": tiny.compat_config(preset)} for preset in ("tf", "hf", "pytorch")},
    "shaw, as the original": {
        "encoding": Encoding.SHAW,
        "num_positions": 6,
        "compat": CompatConfig(shaw_terms=ShawTerms.ORIGINAL),
    },
}


@functools.cache
def frozen(model, segment_len, mem_len, clamp_len, same_length=False):
    lengths = {"segment_len": segment_len, "mem_len": mem_len, "clamp_len": clamp_len}
    return tiny.prepared(model, tiny.variables(model), same_length=same_length, **lengths)


def both(model, lengths, *, resets=(), memory_dtype=None):
    """Yields (hidden, nll, memory) of both models over the same text, segment by segment."""
    segment_len, mem_len, clamp_len, same_length = lengths
    variables, text = tiny.variables(model), tiny.text(segment_len * SEGMENTS + 1)
    encode = tiny.encoder(model, clamp_len=clamp_len, same_length=same_length)
    weights = frozen(model, *lengths)
    start = model.config.compat.memory_start
    nll = jax.jit(functools.partial(model.apply, method=model.nll))
    sizes = {"batch_size": tiny.B, "mem_len": mem_len}
    states = model.init_memory(**sizes)
    kept = forward.init_cache(weights, segment_len=segment_len, dtype=memory_dtype, **sizes)
    for s in range(SEGMENTS):
        tokens, targets = (
            text[:, i : i + segment_len] for i in (s * segment_len, s * segment_len + 1)
        )
        if s in resets:
            rows = jnp.arange(tiny.B) == 1
            states = memory_lib.reset(states, rows, start)
            kept = cache_lib.reset_cache(kept, rows, weights.initial, start)
        hidden, states = encode(variables, tokens, states)
        expected = hidden, nll(variables, hidden, targets), states
        found = tiny.read_cached(weights, tokens, targets, kept)
        kept = found[-1]
        yield found, expected


# Every model at the lengths where something may go wrong, every length with the usual model.
CASES = [("post", name) for name in LENGTHS]
CASES += [
    (name, lengths) for name in MODELS if name != "post" for lengths in ("rounded up", "clamp")
]
QUICK = [("post", name) for name in ("rounded up", "clamp of one", "one token", "no memory")]
QUICK += [(name, "clamp") for name in ("pre", "own biases", "tied positions", "adaptive")]
QUICK += [(name, "clamp") for name in ("vaswani", "shaw, as the original")]
QUICK += [(preset, "rounded up") for preset in ("tf", "hf", "pytorch")]


@pytest.mark.parametrize(("model", "lengths"), full_but(QUICK, CASES))
def test_both_memories_agree_over_ten_segments(model, lengths, x64):
    model, lengths = tiny.make(dtype=DType.FLOAT64, **MODELS[model]), LENGTHS[lengths]
    for found, expected in both(model, lengths, resets=(4,)):
        tiny_run.assert_close(found[:2], expected[:2], atol=1e-12)
        np.testing.assert_array_equal(found[2].valid, expected[2].valid)


def test_the_query_is_scaled_before_it_is_rounded():
    """The step scales its products: a query that is rounded twice moves every score by another part
    in 256.
    """
    model = tiny.make(dtype=DType.BFLOAT16)
    query = tiny.variables(model)["params"]["stack"]["layers"]["attention"]["query"][0]
    found = frozen(model, *LENGTHS["clamp"]).layers[0].query_key_value[:, 0]
    np.testing.assert_array_equal(found, (query * tiny.E**-0.5).astype(jnp.bfloat16))
    assert np.any(found != query.astype(jnp.bfloat16) * tiny.E**-0.5)


def test_a_narrower_memory_is_read_in_the_compute_type(x64):
    """float32 in a float64 model: off by what float32 rounds (1e-7), by no more and no less."""
    pairs = list(both(tiny.make(dtype=DType.FLOAT64), LENGTHS["clamp"], memory_dtype=jnp.float32))
    assert (
        1e-9 < max(float(np.abs(found[0] - expected[0]).max()) for found, expected in pairs) < 1e-6
    )


@pytest.mark.full
@pytest.mark.parametrize("rows", [None, 1, 3])  # With one index, that of one row, and one per row.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_step_keeps_no_copy_of_the_memory(rows, dtype):
    """Temporary memory of eight steps, beside the memory that they are given: the point of writing
    in place.
    """
    model = tiny.make(n_layer=4, d_model=64, n_head=4, d_head=16, d_inner=64)
    weights, zeros = frozen(model, 1, 4096, 64), np.zeros(rows or 1, np.int32)
    cache = forward.init_cache(
        weights, batch_size=len(zeros), mem_len=4096, segment_len=1, dtype=dtype
    )
    if rows:
        cache = cache.replace(write_index=cache.valid)
    given = BlockRows(
        zeros[:, None], zeros, zeros + 8, np.stack([row_key(0)] * len(zeros)), np.int32(-1)
    )
    steps = jax.jit(decode_block, static_argnames=("sampling", "count"), donate_argnums=1)
    compiled = steps.lower(weights, cache, given, Sampling(1.0, 1.0), count=8).compile()
    assert (
        compiled.memory_analysis().temp_size_in_bytes
        < cache.keys[0].nbytes + cache.values[0].nbytes
    )


@pytest.mark.parametrize(
    ("mem_len", "segment_len", "length", "named"),
    [
        (16, 4, 4, r"\b16\b.*\b4\b.*\b12\b"),
        (8, 8, 8, r"\b8\b.*\b8\b.*\b12\b"),
        (8, 4, 3, r"\b8\b.*\b3\b"),
    ],
)
def test_other_lengths_than_those_of_the_weights_are_refused(mem_len, segment_len, length, named):
    model = tiny.make()
    weights = frozen(model, 4, 8, 0)
    memory = forward.init_cache(weights, batch_size=1, mem_len=mem_len, segment_len=segment_len)
    with pytest.raises(ValueError, match=named):
        forward.forward(weights, jnp.zeros((1, length), jnp.int32), memory)


@pytest.mark.parametrize("network", Network)
def test_logits_are_divided_with_their_biases(network):
    recurrent = RecurrentModel(tiny.model_config(network=network), tiny.V)
    model, rng = (
        tiny.make() if network is Network.TRANSFORMER_XL else recurrent,
        np.random.default_rng(0),
    )
    params = tiny_run.params(model)
    params["softmax"]["bias"] = rng.normal(size=tiny.V).astype(np.float32)
    hidden, targets = (
        rng.normal(size=(2, 5, tiny.D)).astype(np.float32),
        rng.integers(tiny.V, size=(2, 5)),
    )
    logits = (hidden @ params["embedding"]["table_0"].T + params["softmax"]["bias"]) / 1.7
    expected = -np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), targets[..., None], axis=-1
    )[..., 0]
    reader = make_scorer(model, dataclasses.replace(tiny_run.CONFIG.eval, temperature=1.7))
    found = jax.jit(reader.nll)(
        jax.jit(reader.prepare_params)(params), jnp.asarray(hidden), jnp.asarray(targets)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


SPAN = EvalConfig(segment_len=3, mem_len=32, clamp_len=None, same_length=False)
TEXT = np.random.default_rng(2).integers(tiny.V, size=12).tolist()
LONGEST = 60


def argmax_of_one_pass(tokens: list[int], window: int) -> list[int]:
    """The most likely token after each position of a text read at once, where a query sees its last
    `window` keys.
    """
    # One program for all; no position sees what follows it.
    padded = np.zeros((1, LONGEST), np.int32)
    padded[0, : len(tokens)] = tokens
    model = tiny.make(dtype=DType.FLOAT64)
    variables = {"params": tiny_run.params(model)}
    # Whose length is the window; no slot is filled.
    empty = model.init_memory(batch_size=1, mem_len=window)
    hidden, _ = tiny.encoder(model, clamp_len=5, same_length=True)(variables, padded, empty)
    return np.argmax(model.apply(variables, hidden, method=model.log_probabilities)[0], axis=-1)[
        : len(tokens)
    ].tolist()


@pytest.mark.parametrize(
    ("n", "length", "same_length", "window"),
    [(12, 45, False, 8), (12, 45, True, 7), *((n, 6, False, 8) for n in (1, 3, 4, 10))],
)
def test_greedy_text_on_a_ring_is_that_of_one_pass_without_memory(
    n, length, same_length, window, x64
):
    """Token for token, where the ring of 7 slots goes round eight times, and after prompts of any
    length.

    Shorter than a segment, whole segments, and both; beyond the ring's length.
    """
    prompt, lengths = (
        TEXT[:n],
        EvalConfig(segment_len=3, mem_len=7, clamp_len=5, same_length=same_length),
    )
    generator = tiny_run.generator(tiny.make(dtype=DType.FLOAT64), lengths)
    blocks = generator.tokens(prompt, GenerateConfig(length=length, temperature=0))
    text = np.concatenate(list(blocks), axis=1)[0].tolist()
    assert text == argmax_of_one_pass(prompt + text, window)[n - 1 : -1]
    if length == 45:
        assert (
            len(set(text)) > 2 and text != argmax_of_one_pass(prompt + text, window + 1)[n - 1 : -1]
        )


def test_weights_for_single_tokens_share_arrays_with_those_for_segments():
    generator = tiny_run.generator(tiny.make(), SPAN)
    both = generator.for_segments, generator.for_tokens
    shared = [jax.tree.leaves((params.embed_and_norm, params.clusters)) for params in both]
    of_segment, of_token = ({leaf.unsafe_buffer_pointer() for leaf in leaves} for leaves in shared)
    assert of_segment == of_token
