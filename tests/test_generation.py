"""Tests generation: seeds, greedy text against a full pass, reading a prompt in pieces, and restricted sampling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_run

from txl_jax.config import DType, EvalConfig, GenerateConfig
from txl_jax.generation import Generator, draw, restrict

LENGTH = 11
PROMPT = np.random.default_rng(2).integers(tiny.V, size=6)


def span(*, segment_len: int = 3, mem_len: int = 32, same_length: bool = False) -> EvalConfig:
    return EvalConfig(segment_len=segment_len, mem_len=mem_len, clamp_len=0, same_length=same_length)


def write(model, config: GenerateConfig, *, block: int = 16) -> np.ndarray:
    """The samples [B, T]."""
    generator = Generator(model, span(), config)
    blocks = list(generator.tokens(tiny_run.params(model), PROMPT, block=block))
    assert all(0 < tokens.shape[1] <= block for tokens in blocks)
    return np.concatenate(blocks, axis=1)


@functools.cache
def sampled(*, seed: int = 5, samples: int = 1, block: int = 16) -> np.ndarray:
    config = GenerateConfig(length=LENGTH, samples=samples, seed=seed, top_k=0)
    tokens = write(tiny.make(), config, block=block)
    assert tokens.shape == (samples, LENGTH) and tokens.dtype == np.int32
    return tokens


def test_the_seed_decides_the_text():
    assert np.array_equal(sampled(), sampled.__wrapped__())
    assert not np.array_equal(sampled(), sampled(seed=6))


def test_the_text_does_not_depend_on_tokens_per_call():
    assert np.array_equal(sampled(), sampled(block=4))


def test_the_text_does_not_depend_on_the_other_samples():
    three = sampled(samples=3)
    assert np.array_equal(sampled()[0], three[0])
    assert len({tuple(row) for row in three.tolist()}) == 3


def test_greedy_text_is_the_argmax_of_a_full_pass(x64):
    model = tiny.make(dtype=DType.FLOAT64)
    variables = {"params": tiny_run.params(model)}
    text = write(model, GenerateConfig(length=20, temperature=0, samples=2), block=8)
    assert np.array_equal(text[0], text[1])
    assert len(set(text[0].tolist())) > 2, "a text of one token shows little"

    tokens = np.concatenate([PROMPT, text[0]])[None, :]
    hidden, _ = tiny.encoder(model)(variables, tokens, model.init_memory(batch_size=1, mem_len=0))
    log_p = model.apply(variables, hidden, method=model.log_probabilities)
    best = np.argmax(log_p[0], axis=-1)
    assert text[0].tolist() == best[len(PROMPT) - 1 : -1].tolist()


@pytest.mark.parametrize("segment_len", [1, 4, 9])
def test_a_prompt_may_be_read_in_pieces(segment_len, x64):
    model = tiny.make(dtype=DType.FLOAT64)
    variables, prompt = {"params": tiny_run.params(model)}, np.random.default_rng(4).integers(tiny.V, size=9)
    context = Generator(model, span(segment_len=segment_len, mem_len=10), GenerateConfig()).read(
        variables["params"], prompt
    )
    hidden, _ = tiny.encoder(model)(variables, prompt[None, :], model.init_memory(batch_size=1, mem_len=0))
    expected = model.apply(variables, hidden[:, -1:], method=model.log_probabilities)[:, 0]
    np.testing.assert_allclose(context.log_probabilities, expected, rtol=0, atol=1e-12)
    assert context.memory.valid.tolist() == [9]


def test_an_empty_prompt_is_refused():
    generator = Generator(tiny.make(), span(), GenerateConfig())
    with pytest.raises(ValueError, match="prompt is empty"):
        next(generator.tokens({}, np.zeros(0, np.int32)))


def kept(probabilities: list[float], *, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    """The tokens that may be drawn; checks that their logits are as they were."""
    logits = jnp.log(jnp.asarray([probabilities], jnp.float32))
    restricted = restrict(logits, top_k=top_k, top_p=top_p)
    allowed = np.flatnonzero(restricted[0] > -jnp.inf)
    np.testing.assert_array_equal(restricted[0][allowed], logits[0][allowed])
    return allowed.tolist()


UNEVEN = [0.1, 0.4, 0.05, 0.3, 0.15]  # From the likeliest: tokens 1, 3, 4, 0, 2.


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(1, [1]), (2, [1, 3]), (3, [1, 3, 4]), (5, [0, 1, 2, 3, 4]), (6, [0, 1, 2, 3, 4]), (0, [0, 1, 2, 3, 4])],
)
def test_top_k_keeps_the_k_likeliest(top_k, expected):
    assert kept(UNEVEN, top_k=top_k) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-6, [1]),  # The likeliest always stays.
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.69, [1, 3]),
        (0.71, [1, 3, 4]),
        (0.94, [0, 1, 3, 4]),
        (0.96, [0, 1, 2, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p, expected):
    assert kept(UNEVEN, top_p=top_p) == expected


def test_top_p_is_of_what_top_k_left():
    assert kept(UNEVEN, top_k=2, top_p=0.5) == [1]  # 0.4 / 0.7 reaches it.
    assert kept(UNEVEN, top_p=0.5) == [1, 3]


def test_ties_at_a_border_stay():
    assert kept([0.2, 0.4, 0.2, 0.1, 0.1], top_k=2) == [0, 1, 2]
    assert kept([0.2, 0.4, 0.2, 0.1, 0.1], top_p=0.5) == [0, 1, 2]


def test_rows_are_restricted_each_by_itself():
    logits = jnp.log(jnp.asarray([UNEVEN, UNEVEN[::-1]]))
    for limits in ({"top_k": 2, "top_p": 1.0}, {"top_k": 0, "top_p": 0.5}):
        assert (restrict(logits, **limits) > -jnp.inf).tolist() == [[False, True, False, True, False]] * 2
    logits = jnp.log(jnp.asarray([UNEVEN, [0.9, 0.04, 0.03, 0.02, 0.01]]))
    assert (restrict(logits, top_k=0, top_p=0.5) > -jnp.inf).sum(axis=-1).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        ({"top_k": 0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 0, "temperature": 0.5}, [0, 1, 2, 3, 4]),
        # Divided by the temperature first: the two likeliest then have 0.16 and 0.09 of 0.285.
        ({"top_k": 4, "top_p": 0.8, "temperature": 0.5}, [1, 3]),
    ],
)
def test_draws_follow_the_restricted_distribution(limits, allowed):
    config, n = GenerateConfig(**limits), 20_000
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(n))
    log_p = jnp.broadcast_to(jnp.log(jnp.asarray(UNEVEN))[None, :], (n, len(UNEVEN)))
    drawn = np.asarray(jax.jit(draw, static_argnums=2)(keys, log_p, config))
    assert drawn.dtype == np.int32
    found = np.bincount(drawn, minlength=len(UNEVEN)) / n
    expected = np.zeros(len(UNEVEN))
    expected[allowed] = np.asarray(UNEVEN)[allowed] ** (1 / config.temperature)
    expected /= expected.sum()
    assert found[expected == 0].sum() == 0
    assert np.abs(found - expected).sum() / 2 < 0.02
    # Pearson's statistic: for up to 4 degrees of freedom above 23.5 once in 10,000 seeds.
    likely = expected > 0
    assert (n * (found - expected)[likely] ** 2 / expected[likely]).sum() < 23.5


def test_temperature_zero_draws_the_likeliest():
    log_p = jnp.log(jnp.asarray([UNEVEN, UNEVEN[::-1]]))
    keys = jax.random.split(jax.random.key(0), 2)
    assert draw(keys, log_p, GenerateConfig(temperature=0)).tolist() == [1, 3]
