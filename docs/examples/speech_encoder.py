"""Speech-like input: a Conformer block with bidirectional relative attention.

    python docs/examples/speech_encoder.py

An utterance is a sequence of syllables of 8 kinds, each 6 to 12 frames of noisy spectrum. The task
is to name, in each frame, the syllable that comes *next*. Syllables are drawn independently, so an
encoder that attends only to the past is right in 1 of 8 frames at best. With both sides the next
syllable is up to 12 frames away, which the convolution of 7 frames does not reach: attention does.
Utterances differ in length; `Visibility(lengths=...)` hides the padding.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import txl_jax

KINDS, BANDS = 8, 16  # Kinds of syllables; bands of the spectrum.
ROWS, FRAMES = 16, 128
SHORTEST, LONGEST = 6, 12  # Frames of a syllable.


def draw_utterances(key):
    """Returns frames, lengths, and the next syllable of each frame, or -1.

    The frames have shape [B, T, BANDS], and the lengths have shape [B]. The syllables are int [B,
    T].
    """
    keys = jax.random.split(key, 4)
    most = FRAMES // SHORTEST + 2
    kinds = jax.random.randint(keys[0], (ROWS, most), 0, KINDS)
    ends = jnp.cumsum(jax.random.randint(keys[1], (ROWS, most), SHORTEST, LONGEST + 1), axis=1)
    lengths = jax.random.randint(keys[2], (ROWS,), FRAMES // 2, FRAMES + 1)
    # Index of a frame's syllable.
    number = jnp.sum(jnp.arange(FRAMES)[None, :, None] >= ends[:, None, :], axis=2)
    kind, following = (jnp.take_along_axis(kinds, number + shift, axis=1) for shift in (0, 1))
    spectra = jax.random.normal(jax.random.key(0), (KINDS, BANDS))  # The same in all utterances.
    frames = spectra[kind] + 0.5 * jax.random.normal(keys[3], (ROWS, FRAMES, BANDS))
    is_heard = jnp.take_along_axis(ends, number, axis=1) < lengths[:, None]
    return frames, lengths, jnp.where(is_heard, following, -1)


class RelativeSelfAttention(nn.Module):
    """Self-attention with relative positions over padded rows; `causal` hides the future."""

    n_head: int
    causal: bool

    @nn.compact
    def __call__(self, frames, lengths):
        """Computes [B, T, D] from frames [B, T, D], of which `lengths` [B] are not padding."""
        n_row, n_frame, width = frames.shape
        heads = self.n_head, width // self.n_head
        options = {} if self.causal else {"causal": False, "lengths": lengths}
        visibility = txl_jax.Visibility(jnp.zeros(n_row, jnp.int32), n_frame, 0, **options)

        def project(states, name):  # [.., T, D] -> [.., H, T, E]
            return nn.DenseGeneral(heads, use_bias=name != "position", name=name)(states).swapaxes(
                -3, -2
            )

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
    """A Conformer block (Gulati et al., 2020).

    It consists of half a feed-forward layer, attention, convolution, the other half, and a layer
    norm.

    A layer norm replaces the convolution's batch norm, so that a row does not depend on its batch.
    """

    n_head: int = 4
    kernel_size: int = 7
    causal: bool = False

    @nn.compact
    def __call__(self, frames, lengths):
        """Computes [B, T, D] from frames [B, T, D], of which `lengths` [B] are not padding."""
        attention = RelativeSelfAttention(self.n_head, self.causal, name="attention")
        frames += 0.5 * self._feed_forward(frames, "first")
        frames += attention(nn.LayerNorm()(frames), lengths)
        frames += self._convolution(frames, lengths)
        frames += 0.5 * self._feed_forward(frames, "second")
        return nn.LayerNorm()(frames)

    def _feed_forward(self, frames, name):
        width = frames.shape[-1]
        inner = nn.swish(nn.Dense(4 * width, name=f"{name}_inner")(nn.LayerNorm()(frames)))
        return nn.Dense(width, name=f"{name}_outer")(inner)

    def _convolution(self, frames, lengths):
        width = frames.shape[-1]
        is_frame = jnp.arange(frames.shape[1])[None, :] < lengths[:, None]
        gated = nn.glu(nn.Dense(2 * width, name="gate")(nn.LayerNorm()(frames)))
        before = self.kernel_size - 1 if self.causal else self.kernel_size // 2
        padding = [(before, self.kernel_size - 1 - before)]
        depthwise = nn.Conv(
            width, (self.kernel_size,), padding=padding, feature_group_count=width, name="depthwise"
        )
        return nn.Dense(width, name="mix")(
            nn.swish(nn.LayerNorm()(depthwise(gated * is_frame[..., None])))
        )


class Encoder(nn.Module):
    """Two blocks, from frames [B, T, BANDS] to logits [B, T, KINDS] of the next syllable."""

    width: int = 64
    causal: bool = False

    @nn.compact
    def __call__(self, frames, lengths):
        """Computes the logits."""
        states = nn.Dense(self.width, name="subsample")(frames)
        for number in range(2):
            states = ConformerBlock(causal=self.causal, name=f"block_{number}")(states, lengths)
        return nn.Dense(KINDS, name="kinds")(states)


def train(*, causal, steps, seed=0):
    """Trains an encoder on new utterances in each step.

    Returns the fraction of right frames per step.
    """
    encoder = Encoder(causal=causal)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.warmup_constant_schedule(0, 1e-3, 20))
    )

    def loss(params, frames, lengths, following):
        logits, counts = encoder.apply(params, frames, lengths), following >= 0
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(following, 0))
        is_right = logits.argmax(-1) == following
        return jnp.sum(nats * counts) / jnp.sum(counts), jnp.sum(is_right * counts) / jnp.sum(
            counts
        )

    def step(carry, key):
        params, moments = carry
        grads, right = jax.grad(loss, has_aux=True)(params, *draw_utterances(key))
        changes, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, changes), moments), right

    init_key, key = jax.random.split(jax.random.key(seed))
    params = encoder.init(init_key, *draw_utterances(init_key)[:2])
    carry = params, optimizer.init(params)
    return jax.jit(jax.lax.scan, static_argnums=0)(step, carry, jax.random.split(key, steps))[1]


def main(steps=200):
    """Prints and returns both encoders' mean fraction of right frames in the last 30 steps."""
    modes = {"both sides": False, "past only": True}
    right = {
        name: float(train(causal=causal, steps=steps)[-30:].mean())
        for name, causal in modes.items()
    }
    print(
        f"right frames of the last 30 of {steps} steps, {1 / KINDS} at best with the past only: "
        f"{right}"
    )
    return right


if __name__ == "__main__":
    main()
