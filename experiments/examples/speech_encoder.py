"""Speech-like input: a Conformer block with bidirectional relative attention.

    python -m experiments.examples.speech_encoder --out=runs/speech_encoder

An utterance is a sequence of syllables of 8 kinds, each 6 to 12 frames of noisy spectrum. The task is to name in each
frame the syllable that comes *next*. Syllables are drawn independently, so an encoder that sees only the past is right
in 1 of 8 frames at best. One that sees both sides finds the next syllable at a distance of up to 12 frames, which the
convolution of 7 frames does not reach: attention does.

Utterances have different lengths; `Visibility(lengths=...)` hides the padding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import txl_jax
from experiments.examples import comparison
from txl_jax import cli
from txl_jax.cli import setting

KINDS, BANDS = 8, 16  # Kinds of syllables; bands of the spectrum.
ROWS, FRAMES = 16, 128
SHORTEST, LONGEST = 6, 12  # Frames of a syllable.


class Utterances(NamedTuple):
    """A batch of padded utterances."""

    frames: jax.Array  # [B, T, BANDS]
    lengths: jax.Array  # int [B]
    following: jax.Array  # int [B, T], the next syllable of each frame; -1: none follows, or padding.


def draw_utterances(key: jax.Array) -> Utterances:
    """Returns new utterances of 64 to 128 frames."""
    keys = jax.random.split(key, 4)
    most = FRAMES // SHORTEST + 2
    kinds = jax.random.randint(keys[0], (ROWS, most), 0, KINDS)
    ends = jnp.cumsum(jax.random.randint(keys[1], (ROWS, most), SHORTEST, LONGEST + 1), axis=1)
    lengths = jax.random.randint(keys[2], (ROWS,), FRAMES // 2, FRAMES + 1)
    number = jnp.sum(jnp.arange(FRAMES)[None, :, None] >= ends[:, None, :], axis=2)  # Of a frame's syllable.
    kind, following = (jnp.take_along_axis(kinds, number + shift, axis=1) for shift in (0, 1))
    next_begins = jnp.take_along_axis(ends, number, axis=1)
    spectra = jax.random.normal(jax.random.key(0), (KINDS, BANDS))  # The same in all utterances.
    frames = spectra[kind] + 0.5 * jax.random.normal(keys[3], (ROWS, FRAMES, BANDS))
    is_heard = next_begins < lengths[:, None]
    return Utterances(frames, lengths, jnp.where(is_heard, following, -1))


class RelativeSelfAttention(nn.Module):
    """Self-attention with relative positions over padded rows of frames.

    Attributes:
      causal: frames see the past only.
    """

    n_head: int
    causal: bool

    @nn.compact
    def __call__(self, frames: jax.Array, lengths: jax.Array) -> jax.Array:
        """Computes [B, T, D] from frames [B, T, D] of which int [B] are no padding."""
        n_row, n_frame, width = frames.shape
        heads = self.n_head, width // self.n_head
        no_memory = jnp.zeros(n_row, jnp.int32)
        see = functools.partial(txl_jax.Visibility, no_memory, n_frame, 0)
        visibility = see() if self.causal else see(causal=False, lengths=lengths)

        def project(states: jax.Array, name: str) -> jax.Array:  # [.., T, D] -> [.., H, T, E]
            return nn.DenseGeneral(heads, use_bias=name != "position", name=name)(states).swapaxes(-3, -2)

        attended = txl_jax.attention(
            project(frames, "query"),
            project(frames, "key"),
            project(frames, "value"),
            project(txl_jax.sinusoids(visibility.distances(), width, frames.dtype), "position"),
            content_bias=self.param("u", nn.initializers.zeros, heads),
            position_bias=self.param("v", nn.initializers.zeros, heads),
            visibility=visibility,
        )
        return nn.DenseGeneral(width, axis=(-2, -1), name="output")(attended.swapaxes(1, 2))


class ConformerBlock(nn.Module):
    """Half a feed-forward part, attention, convolution, the other half, layer norm (Gulati et al., 2020).

    A layer norm takes the place of the convolution's batch norm, so that a row does not depend on its batch.
    """

    n_head: int = 4
    kernel_size: int = 7
    causal: bool = False

    @nn.compact
    def __call__(self, frames: jax.Array, lengths: jax.Array) -> jax.Array:
        """Computes [B, T, D] from frames [B, T, D] of which int [B] are no padding."""
        attention = RelativeSelfAttention(self.n_head, self.causal, name="attention")
        frames += 0.5 * self._feed_forward(frames, "first")
        frames += attention(nn.LayerNorm()(frames), lengths)
        frames += self._convolution(frames, lengths)
        frames += 0.5 * self._feed_forward(frames, "second")
        return nn.LayerNorm()(frames)

    def _feed_forward(self, frames: jax.Array, name: str) -> jax.Array:
        width = frames.shape[-1]
        inner = nn.swish(nn.Dense(4 * width, name=f"{name}_inner")(nn.LayerNorm()(frames)))
        return nn.Dense(width, name=f"{name}_outer")(inner)

    def _convolution(self, frames: jax.Array, lengths: jax.Array) -> jax.Array:
        width = frames.shape[-1]
        is_frame = jnp.arange(frames.shape[1])[None, :] < lengths[:, None]
        gated = nn.glu(nn.Dense(2 * width, name="gate")(nn.LayerNorm()(frames)))
        before = self.kernel_size - 1 if self.causal else self.kernel_size // 2
        padding = [(before, self.kernel_size - 1 - before)]
        depthwise = nn.Conv(width, (self.kernel_size,), padding=padding, feature_group_count=width, name="depthwise")
        return nn.Dense(width, name="mix")(nn.swish(nn.LayerNorm()(depthwise(gated * is_frame[..., None]))))


class Encoder(nn.Module):
    """Frames to logits of the syllable that follows."""

    width: int = 64
    causal: bool = False

    @nn.compact
    def __call__(self, frames: jax.Array, lengths: jax.Array) -> jax.Array:
        """Computes logits [B, T, KINDS] from frames [B, T, BANDS]."""
        states = nn.Dense(self.width, name="subsample")(frames)
        for number in range(2):
            states = ConformerBlock(causal=self.causal, name=f"block_{number}")(states, lengths)
        return nn.Dense(KINDS, name="kinds")(states)


def train(*, causal: bool, updates: int, seed: int, log: Callable[[str], None]) -> list[float]:
    """Trains an encoder on new utterances in each update; returns the share of right frames, per 10 updates."""
    encoder = Encoder(causal=causal)
    first = draw_utterances(jax.random.key(seed))
    params = encoder.init(jax.random.key(seed), first.frames, first.lengths)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.warmup_constant_schedule(0, 1e-3, 20)))

    def loss(params: Any, batch: Utterances) -> tuple[jax.Array, jax.Array]:
        logits = encoder.apply(params, batch.frames, batch.lengths)
        assert isinstance(logits, jax.Array)
        counts = batch.following >= 0
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch.following, 0))
        is_right = logits.argmax(-1) == batch.following
        return jnp.sum(nats * counts) / jnp.sum(counts), jnp.sum(is_right * counts) / jnp.sum(counts)

    @jax.jit
    def ten_updates(params: Any, moments: Any, key: jax.Array) -> Any:
        def update(carry: Any, key: jax.Array) -> Any:
            params, moments = carry
            grads, right = jax.grad(loss, has_aux=True)(params, draw_utterances(key))
            changes, moments = optimizer.update(grads, moments, params)
            return (optax.apply_updates(params, changes), moments), right

        carry, right = jax.lax.scan(update, (params, moments), jax.random.split(key, 10))
        return *carry, right.mean()

    moments, curve = optimizer.init(params), []
    for number in range(updates // 10):
        key = jax.random.fold_in(jax.random.key(seed + 1), number)
        params, moments, right = ten_updates(params, moments, key)
        curve.append(float(right))
        if (number + 1) % 5 == 0:
            log(f"{'past only' if causal else 'both sides'}  update {10 * (number + 1):4}  right {curve[-1]:.3f}")
    return curve


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """The folder, and how long it takes."""

    out: str = setting("runs/speech_encoder", "Folder of the result and the picture.", path=True)
    updates: int = setting(200, "Updates of each of the two encoders.", at_least=10)
    seed: int = setting(0, "Seed of weights and utterances.")


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the example."""
    del job
    shares = {
        name: train(causal=causal, updates=plan.updates, seed=plan.seed, log=print)
        for name, causal in (("both sides", False), ("past only", True))
    }
    comparison.write(
        plan.out,
        shares,
        measure="share of right frames",
        bounds="with the past only 0.125 at best",
        title="Naming the syllable that comes next",
    )


if __name__ == "__main__":
    cli.main(run, Plan)
