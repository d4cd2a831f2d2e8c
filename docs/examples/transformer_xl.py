"""Transformer-XL on one page (Dai et al., 2019, https://arxiv.org/abs/1901.02860).

    python docs/examples/transformer_xl.py book.txt

This is the paper's model in plain JAX, Flax and Optax, to be read from top to bottom. It trains
on the bytes of any file. Nothing is imported from txl_jax, which computes the same numbers: a
test compares losses and gradients.

A language model predicts each token of a text from the tokens before it. Transformer-XL reads the
text segment by segment. Each layer keeps its inputs at the last M positions, its memory. When it
reads the next segment, it attends to the memory and to the segment itself. So one layer reaches
M positions back, and N layers reach N * M, because the states in memory had a memory too.

Letters in shapes (and, in lower case, in einsums):

    B  rows of a batch, read side by side     D  size of a hidden state
    L  positions of a segment                 H  attention heads
    M  positions in memory                    E  size of a head
    K  keys: M + L, the memory first          F  inner size of the feed-forward network
    N  layers                                 V  tokens in the vocabulary

The paper does not number its equations. Here (1) to (6) stand for the six equations that sum up
the model at the end of section 3.3. Each is repeated above its lines, without transposes.
"""

import argparse
import functools
import math
import pathlib
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

BATCH_SIZE = 16  # B
SEGMENT_LEN = 64  # L

normal = nn.initializers.normal(0.05)
layer_norm = functools.partial(nn.LayerNorm, epsilon=1e-5)  # The epsilon of the authors' code.


def encode_distances(n_key, d_model):
    """Returns R [K, D], the sinusoids of the distances K - 1, ..., 1, 0. They are not learned.

    A plain Transformer numbers the positions of a segment. Memory and segment would then have the
    same numbers, and the model could not tell which comes first. The distance from a query back to
    a key is the same wherever the text is cut (section 3.3). The farthest key comes first in the
    text, so the largest distance comes first here.
    """
    distances = jnp.arange(n_key - 1, -1, -1)
    frequencies = 10000.0 ** (-jnp.arange(0, d_model, 2) / d_model)
    angles = distances[:, None] * frequencies[None, :]  # [K, D / 2]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def relative_shift(scores):
    """Moves scores [B, H, L, K] from one column per distance to one column per key (appendix B).

    The columns of `scores` are the distances K - 1, ..., 1, 0 for every query. The picture shows a
    segment of 3 tokens without memory. 21 is the score of query 2 at distance 1:

        one column           padded by            without the first L numbers,
        per distance         a column             in rows of K: one column per key

         02  01  00           .  02  01  00          00   .  12
         12  11  10    ->     .  12  11  10    ->    11  10   .
         22  21  20           .  22  21  20          22  21  20

    A padded row is one number longer than a row of the result. So each row ends up one place
    further right than the row above it, and query i meets key j at distance i - j. (With memory
    it is M + i - j.) Right of the diagonal are keys after the query. What is there has no meaning,
    and the mask hides it.
    """
    B, H, L, K = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0)))
    numbers = padded.reshape(B, H, L * (K + 1))
    return numbers[:, :, L:].reshape(B, H, L, K)


class Layer(nn.Module):
    """Relative attention to memory and segment, then a feed-forward network.

    The paper writes a single head. Here its matrices have an axis H, and all heads run at once.
    """

    d_inner: int  # F

    @nn.compact
    def __call__(self, hidden, memory, encodings, u, v):
        """Computes the layer's outputs [B, L, D].

        Args:
          hidden: The layer's inputs [B, L, D], h in the paper.
          memory: Its inputs at the M positions before the segment [B, M, D], m in the paper.
          encodings: R [K, D], the encodings of the distances.
          u: Learned vectors [H, E], for term (c) of the scores.
          v: Learned vectors [H, E], for term (d) of the scores.
        """
        D = hidden.shape[-1]
        H, E = u.shape
        w_query = self.param("w_query", normal, (D, H, E))
        w_key = self.param("w_key", normal, (D, H, E))  # W_k,E
        w_value = self.param("w_value", normal, (D, H, E))
        w_distance = self.param("w_distance", normal, (D, H, E))  # W_k,R
        w_output = self.param("w_output", normal, (H, E, D))

        # (1)  h~ = [SG(m), h]
        # SG stops the gradient: a segment learns to use what the memory contains, and does not
        # change how earlier segments computed it. (In the training loop below there would be no
        # such gradient anyway: each is of one segment's loss, with the memory as an input.)
        context = jnp.concatenate([jax.lax.stop_gradient(memory), hidden], axis=1)  # [B, K, D]

        # (2)  q = h W_q,  k = h~ W_k,E,  v = h~ W_v
        # Positions in memory have no query, because their outputs were computed before.
        query = jnp.einsum("bld,dhe->blhe", hidden, w_query)
        key = jnp.einsum("bkd,dhe->bkhe", context, w_key)
        value = jnp.einsum("bkd,dhe->bkhe", context, w_value)

        # (3)  A_ij = q_i k_j  +  q_i W_k,R R_i-j  +  u k_j  +  v W_k,R R_i-j
        #              (a)             (b)             (c)          (d)
        # Query i scores key j by its content (a) and by its distance (b). Whatever the query is,
        # u prefers some contents (c), and v prefers some distances (d). There are L * K pairs of
        # query and key, but only K distances. So (b) and (d) get one column per distance first.
        distance_key = jnp.einsum("kd,dhe->khe", encodings, w_distance)
        by_content = jnp.einsum("blhe,bkhe->bhlk", query + u, key)  # (a) + (c)
        by_distance = jnp.einsum("blhe,khe->bhlk", query + v, distance_key)  # (b) + (d)
        scores = by_content + relative_shift(by_distance)

        # (4)  a = Masked-Softmax(A) v
        # Query i is at position M + i of the K, and must not see what comes after it. Scores are
        # divided by sqrt(E), as in every Transformer. The paper's equations leave this out.
        L, K = scores.shape[2:]
        query_position = jnp.arange(K - L, K)
        is_visible = jnp.arange(K)[None, :] <= query_position[:, None]  # [L, K]
        scores = jnp.where(is_visible, scores / math.sqrt(E), -jnp.inf)
        probabilities = jax.nn.softmax(scores, axis=-1)
        attended = jnp.einsum("bhlk,bkhe->blhe", probabilities, value)

        # (5)  o = LayerNorm(Linear(a) + h)
        output = jnp.einsum("blhe,hed->bld", attended, w_output)
        middle = layer_norm(name="attention_norm")(output + hidden)

        # (6)  h of the next layer = Positionwise-Feed-Forward(o)
        # It includes a residual connection and a layer norm.
        inner = nn.relu(nn.Dense(self.d_inner, kernel_init=normal, name="inner")(middle))
        outer = nn.Dense(D, kernel_init=normal, name="outer")(inner)
        return layer_norm(name="feed_forward_norm")(outer + middle)


class TransformerXL(nn.Module):
    """The language model. Its default sizes let two CPU cores learn something in a minute."""

    n_layer: int = 3  # N
    d_model: int = 128  # D
    n_head: int = 4  # H
    d_head: int = 32  # E
    d_inner: int = 512  # F
    n_token: int = 256  # V. Every byte is a token.

    @nn.compact
    def __call__(self, tokens, memory):
        """Reads a segment: int [B, L], memory [N, B, M, D] -> logits [B, L, V], next memory."""
        table = self.param("table", normal, (self.n_token, self.d_model))
        bias = self.param("bias", nn.initializers.zeros, (self.n_token,))
        u = self.param("u", normal, (self.n_head, self.d_head))  # All layers share u and v.
        v = self.param("v", normal, (self.n_head, self.d_head))

        segment_len = tokens.shape[1]
        mem_len = memory.shape[2]
        encodings = encode_distances(mem_len + segment_len, self.d_model)

        hidden = table[tokens] * math.sqrt(self.d_model)
        layer_inputs = []
        for n in range(self.n_layer):
            layer_inputs.append(hidden)
            hidden = Layer(self.d_inner, name=f"layer_{n}")(hidden, memory[n], encodings, u, v)

        # Of these M + L positions, the next memory keeps the last M.
        positions = jnp.concatenate([memory, jnp.stack(layer_inputs)], axis=2)
        next_memory = positions[:, :, segment_len:]

        # The table of the embedding is also the matrix of the softmax.
        logits = hidden @ table.T + bias
        return logits, next_memory


def loss(params, model, memory, inputs, targets):
    """Computes a segment's mean loss in nats per token, and the memory after the segment."""
    logits, memory = model.apply({"params": params}, inputs, memory)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)  # [B, L]
    return nats.mean(), memory


class TrainState(NamedTuple):
    """What training carries from segment to segment."""

    params: Any
    opt_state: Any
    memory: jax.Array  # [N, B, M, D]


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_on(model, optimizer, state, segments):
    """Updates the parameters once per segment. Returns the state and the losses [S] in nats.

    `segments` are the inputs and the targets of S successive segments, int [S, B, L] each.
    """

    def update(state, segment):
        inputs, targets = segment
        gradient = jax.value_and_grad(loss, has_aux=True)
        (nats, memory), grads = gradient(state.params, model, state.memory, inputs, targets)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # The memory comes from the parameters before the update. It is not computed again.
        return TrainState(params, opt_state, memory), nats

    return jax.lax.scan(update, state, segments)


def cut(tokens):
    """Cuts a text into B rows, and the rows into segments: inputs and targets, int [S, B, L].

    A row of one segment continues in the same row of the next. Otherwise its memory would be of
    another part of the text. The target of a token is the token that follows it.
    """
    n_segment = (len(tokens) - 1) // (BATCH_SIZE * SEGMENT_LEN)
    n_input = n_segment * BATCH_SIZE * SEGMENT_LEN
    shape = (BATCH_SIZE, n_segment, SEGMENT_LEN)
    inputs = tokens[:n_input].reshape(shape).swapaxes(0, 1)
    targets = tokens[1 : n_input + 1].reshape(shape).swapaxes(0, 1)
    return inputs, targets


def train(text, *, steps, mem_len):
    """Trains a model on a text (bytes), and prints the bits per byte while it learns."""
    inputs, targets = cut(np.frombuffer(text, np.uint8).astype(np.int32))
    if len(inputs) == 0:
        needed = BATCH_SIZE * SEGMENT_LEN + 1
        raise SystemExit(f"the text must have at least {needed} bytes, got {len(text)}")

    model = TransformerXL()
    # The first segment has no past. It attends to zeros. (txl_jax masks them by default.)
    memory = jnp.zeros((model.n_layer, BATCH_SIZE, mem_len, model.d_model))
    params = model.init(jax.random.key(0), inputs[0], memory)["params"]

    # The learning rate rises during a tenth of the steps, and then falls to 0.
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0, peak_value=2e-3, warmup_steps=steps // 10, decay_steps=steps
    )
    optimizer = optax.chain(optax.clip_by_global_norm(0.25), optax.adam(rate))
    state = TrainState(params, optimizer.init(params), memory)

    start = time.perf_counter()
    for first in range(0, steps, 50):
        end = min(first + 50, steps)
        numbers = np.arange(first, end) % len(inputs)  # After its end the text begins again.
        segments = (inputs[numbers], targets[numbers])
        state, losses = train_on(model, optimizer, state, segments)

        # A segment is predicted before the model learns from it. So the first time through the
        # text, these are losses on text that the model has not seen.
        bits = losses.mean() / math.log(2)
        seconds = time.perf_counter() - start
        print(f"step {end:5}   {bits:.3f} bits per byte   {seconds:5.1f} s", flush=True)


def main():
    """Trains on the file that the command line names."""
    parser = argparse.ArgumentParser(description="Train a small Transformer-XL on a file's bytes.")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=600, help="number of segments to learn from")
    parser.add_argument("--mem_len", type=int, default=SEGMENT_LEN, help="0 means no memory")
    options = parser.parse_args()
    train(options.file.read_bytes(), steps=options.steps, mem_len=options.mem_len)


if __name__ == "__main__":
    main()
