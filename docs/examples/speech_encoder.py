"""Speech-like input: a Conformer block with bidirectional relative attention.

    python docs/examples/speech_encoder.py

An utterance is a sequence of syllables of 8 kinds, each 6 to 12 frames of noisy spectrum. The task
is to name, in each frame, the syllable that comes *next*. Syllables are drawn independently, so an
encoder that attends only to the past is right in 1 of 8 frames at best. With both sides the next
syllable is up to 12 frames away, which the convolution of 7 frames does not reach: attention does.
Utterances differ in length. `Visibility(lengths=...)` hides the padding.

Letters: B utterances of a batch, T frames of each (padding included), D features of a state, H
heads of E features.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import txl_jax

KINDS = 8  # Kinds of syllables.
BANDS = 16  # Bands of the spectrum.
ROWS = 16  # B
FRAMES = 128  # T
SHORTEST = 6  # Frames of a syllable.
LONGEST = 12


def draw_utterances(key):
    """Draws a batch of utterances.

    Returns:
      Frames [B, T, BANDS], the lengths of the utterances, int [B], and the kind of the syllable
      that comes next in each frame, int [B, T]. It is -1 if the utterance ends first.
    """
    kind_key, duration_key, length_key, noise_key = jax.random.split(key, 4)
    n_syllable = FRAMES // SHORTEST + 2  # Enough for all frames, and one that follows.
    kinds = jax.random.randint(kind_key, (ROWS, n_syllable), 0, KINDS)
    durations = jax.random.randint(duration_key, (ROWS, n_syllable), SHORTEST, LONGEST + 1)
    ends = jnp.cumsum(durations, axis=1)  # The first frame after each syllable.
    lengths = jax.random.randint(length_key, (ROWS,), FRAMES // 2, FRAMES + 1)

    # The number of a frame's syllable is how many syllables have ended.
    has_ended = jnp.arange(FRAMES)[None, :, None] >= ends[:, None, :]
    number = jnp.sum(has_ended, axis=2)  # [B, T]
    kind = jnp.take_along_axis(kinds, number, axis=1)
    next_kind = jnp.take_along_axis(kinds, number + 1, axis=1)

    spectra = jax.random.normal(jax.random.key(0), (KINDS, BANDS))  # The same in all utterances.
    noise = jax.random.normal(noise_key, (ROWS, FRAMES, BANDS))
    frames = spectra[kind] + 0.5 * noise

    # The next syllable must begin before the utterance ends.
    is_heard = jnp.take_along_axis(ends, number, axis=1) < lengths[:, None]
    return frames, lengths, jnp.where(is_heard, next_kind, -1)


class RelativeSelfAttention(nn.Module):
    """Self-attention with relative positions over padded rows."""

    n_head: int
    causal: bool  # Whether the future is hidden.

    @nn.compact
    def __call__(self, frames, lengths):
        """Computes [B, T, D] from frames [B, T, D], of which `lengths` [B] are not padding."""
        n_row, n_frame, width = frames.shape
        heads = (self.n_head, width // self.n_head)

        no_memory = jnp.zeros(n_row, jnp.int32)
        if self.causal:
            # A frame does not attend to the padding, because it comes after the frame.
            visibility = txl_jax.Visibility(no_memory, n_frame, 0)
        else:
            visibility = txl_jax.Visibility(no_memory, n_frame, 0, causal=False, lengths=lengths)

        def project(states, name, *, use_bias=True):
            """Projects [..., T, D] to heads: [..., H, T, E]."""
            projected = nn.DenseGeneral(heads, use_bias=use_bias, name=name)(states)
            return projected.swapaxes(-3, -2)

        encodings = txl_jax.sinusoids(visibility.distances(), width, frames.dtype)
        attended = txl_jax.attention(
            project(frames, "query"),
            project(frames, "key"),
            project(frames, "value"),
            project(encodings, "position", use_bias=False),
            content_bias=self.param("u", nn.initializers.zeros, heads),
            position_bias=self.param("v", nn.initializers.zeros, heads),
            visibility=visibility,
        )
        return nn.DenseGeneral(width, axis=(-2, -1), name="output")(attended.swapaxes(1, 2))


class ConformerBlock(nn.Module):
    """A Conformer block (Gulati et al., 2020).

    It consists of half a feed-forward layer, attention, convolution, the other half, and a layer
    norm. A layer norm also replaces the convolution's batch norm, so that a row does not depend
    on its batch.
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
        """Computes a feed-forward layer: [B, T, D] -> [B, T, D]."""
        width = frames.shape[-1]
        normed = nn.LayerNorm()(frames)
        inner = nn.swish(nn.Dense(4 * width, name=f"{name}_inner")(normed))
        return nn.Dense(width, name=f"{name}_outer")(inner)

    def _convolution(self, frames, lengths):
        """Computes the convolution, and the layers around it: [B, T, D] -> [B, T, D]."""
        width = frames.shape[-1]
        normed = nn.LayerNorm()(frames)
        gated = nn.glu(nn.Dense(2 * width, name="gate")(normed))
        # Padding must be 0 here, because the convolution reaches from the last frames into it.
        is_frame = jnp.arange(frames.shape[1])[None, :] < lengths[:, None]
        gated = gated * is_frame[..., None]

        before = self.kernel_size // 2  # Frames that the kernel reaches back.
        if self.causal:
            before = self.kernel_size - 1
        after = self.kernel_size - 1 - before
        depthwise = nn.Conv(
            width,
            (self.kernel_size,),
            padding=[(before, after)],
            feature_group_count=width,
            name="depthwise",
        )
        inner = nn.swish(nn.LayerNorm()(depthwise(gated)))
        return nn.Dense(width, name="mix")(inner)


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


def loss(params, encoder, frames, lengths, next_kind):
    """Computes the loss of a batch, over all frames that have a next syllable.

    Args:
      params: Parameters of the encoder.
      encoder: An `Encoder`.
      frames: Floats [B, T, BANDS].
      lengths: Frames of each utterance, int [B].
      next_kind: Kind of the next syllable, int [B, T], or -1 after the last one.

    Returns:
      The mean loss in nats, and the fraction of frames whose next syllable is right.
    """
    logits = encoder.apply(params, frames, lengths)
    is_scored = next_kind >= 0
    n_scored = jnp.sum(is_scored)

    labels = jnp.maximum(next_kind, 0)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)  # [B, T]
    mean_nats = jnp.sum(nats * is_scored) / n_scored

    is_right = logits.argmax(-1) == next_kind
    accuracy = jnp.sum(is_right * is_scored) / n_scored
    return mean_nats, accuracy


def train(*, causal, steps, seed=0):
    """Trains an encoder on new utterances in each step.

    Returns:
      The fraction of right frames in each step, floats [steps].
    """
    encoder = Encoder(causal=causal)
    rate = optax.warmup_constant_schedule(init_value=0, peak_value=1e-3, warmup_steps=20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def step(state, key):
        params, moments = state
        frames, lengths, next_kind = draw_utterances(key)
        gradient = jax.grad(loss, has_aux=True)
        grads, accuracy = gradient(params, encoder, frames, lengths, next_kind)
        changes, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, changes)
        return (params, moments), accuracy

    init_key, key = jax.random.split(jax.random.key(seed))
    frames, lengths, _ = draw_utterances(init_key)
    params = encoder.init(init_key, frames, lengths)

    scan = jax.jit(jax.lax.scan, static_argnums=0)
    state = (params, optimizer.init(params))
    _, accuracies = scan(step, state, jax.random.split(key, steps))
    return accuracies


def main(steps=200):
    """Prints and returns both encoders' mean fraction of right frames in the last 30 steps."""
    right = {}
    for name, causal in {"both sides": False, "past only": True}.items():
        accuracies = train(causal=causal, steps=steps)
        right[name] = float(accuracies[-30:].mean())
    print(
        f"right frames of the last 30 of {steps} steps, {1 / KINDS} at best with the past only: "
        f"{right}"
    )
    return right


if __name__ == "__main__":
    main()
