"""Embeddings of a document of any length, passage by passage while it is read, in constant memory.

    python docs/examples/document_embeddings.py

A Transformer-XL reads passages of 128 tokens as its segments. A passage's embedding is the mean of
its hidden states. Only the memory goes from one passage to the next. `stream` does that for a model
that you have trained.

The script shows what the memory is for. The first word of a document names one of 8 topics. All
other words are drawn without regard to it. The model is trained to name the topic at each word. A
linear probe, fitted on the embeddings of some documents, is asked for the topic of other documents,
from one passage of each. If each passage is read with an empty memory, the probe is right in 1 of 8
documents at best, in all passages but the first. N layers with a memory of M tokens reach N * M
tokens back, and no further.

Letters: B documents side by side, L tokens of a passage, M tokens of the memory, D features of a
hidden state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import txl_jax
from txl_jax import ModelConfig, NormPlace

CONFIG = ModelConfig(
    n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, init_std=0.1, layer_norm=NormPlace.PRE
)
TOPICS = 8  # The first ids name topics.
WORDS = 24  # The others are words of any document.
MODEL = txl_jax.TransformerXL(CONFIG, vocab_size=TOPICS + WORDS)
PASSAGE = 128  # Tokens in a passage, L.
PASSAGES = 12  # Passages in a document.
MEM_LEN = 512  # M
ROWS = 12  # Documents side by side in training, B.


def stream(model, pieces, length=PASSAGE):
    """Yields one embedding per passage while the pieces of a document arrive.

    Args:
      model: A `txl_jax.LanguageModel`, for example from `txl_jax.load`.
      pieces: The document in pieces of any size, for example the lines of an open file.
      length: Tokens in a passage. The last passage may be shorter.

    Yields:
      The mean of a passage's hidden states, floats [D].
    """
    variables = {"params": model.params}
    settings = model.config.eval

    @model.components.jit
    def read(tokens, memory):
        """Reads a passage: int [1, L] -> hidden states [1, L, D], next memory."""
        return model.components.model.apply(
            variables,
            tokens,
            memory,
            clamp_len=settings.clamp_len,
            same_length=settings.same_length,
        )

    memory = model.init_memory(1)
    waiting = np.zeros(0, np.int32)  # Tokens that do not fill a passage yet.
    for piece in pieces:
        waiting = np.concatenate([waiting, model.encode(piece)])
        while len(waiting) >= length:
            hidden, memory = read(waiting[None, :length], memory)
            waiting = waiting[length:]
            yield np.asarray(hidden[0].mean(0))

    if len(waiting) > 0:
        hidden, _ = read(waiting[None, :], memory)
        yield np.asarray(hidden[0].mean(0))


class Reading(NamedTuple):
    """Documents that are read side by side [B]."""

    topic: jax.Array  # int, 0 .. TOPICS - 1.
    place: jax.Array  # int, number of the next passage.
    memory: txl_jax.Memory

    @staticmethod
    def start(key, mem_len, rows):
        """Returns new documents, all at their first passage, with an empty memory."""
        return Reading(
            topic=jax.random.randint(key, (rows,), 0, TOPICS),
            place=jnp.zeros(rows, jnp.int32),
            memory=MODEL.init_memory(batch_size=rows, mem_len=mem_len),
        )

    def draw(self, key):
        """Returns the next passage of each document: int [B, L].

        The first one begins with the topic.
        """
        words = jax.random.randint(key, (len(self.topic), PASSAGE), TOPICS, TOPICS + WORDS)
        first_word = jnp.where(self.place == 0, self.topic, words[:, 0])
        return words.at[:, 0].set(first_word)

    def move_on(self, key, memory):
        """Returns the state after a passage. Rows whose document has ended begin a new one.

        Args:
          key: Key of the topics of new documents.
          memory: Memory after the passage.
        """
        ended = self.place == PASSAGES - 1
        new_topic = jax.random.randint(key, self.topic.shape, 0, TOPICS)
        return Reading(
            topic=jnp.where(ended, new_topic, self.topic),
            place=jnp.where(ended, 0, self.place + 1),
            memory=txl_jax.reset_memory(memory, ended),
        )


def topic_loss(params, reading, key):
    """Computes the loss of the topic's name at each word of a passage.

    Args:
      params: Parameters of MODEL.
      reading: The documents before the passage.
      key: Key of the passage, and of new topics.

    Returns:
      The mean loss in nats, and the documents after the passage.
    """
    words_key, topic_key = jax.random.split(key)
    words = reading.draw(words_key)
    hidden, memory = MODEL.apply(params, words, reading.memory)
    targets = jnp.broadcast_to(reading.topic[:, None], words.shape)  # [B, L]
    nats = MODEL.apply(params, hidden, targets, method=MODEL.nll)  # [B, L]
    return nats.mean(), reading.move_on(topic_key, memory)


def train(*, steps, seed=1):
    """Trains a model, one passage of each row per step, and returns its parameters."""
    init_key, text_key, key = jax.random.split(jax.random.key(seed), 3)
    # Rows are at different places of their documents, so that each step has passages of all
    # distances.
    reading = Reading.start(text_key, MEM_LEN, ROWS)
    reading = reading._replace(place=jnp.arange(ROWS) * PASSAGES // ROWS)
    params = MODEL.init(init_key, reading.draw(text_key), reading.memory)

    rate = optax.warmup_constant_schedule(init_value=0, peak_value=2e-3, warmup_steps=20)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))

    def step(state, key):
        params, moments, reading = state
        grads, reading = jax.grad(topic_loss, has_aux=True)(params, reading, key)
        changes, moments = optimizer.update(grads, moments)
        params = optax.apply_updates(params, changes)
        return (params, moments, reading), None

    scan = jax.jit(jax.lax.scan, static_argnums=0)
    state = (params, optimizer.init(params), reading)
    (params, _, _), _ = scan(step, state, jax.random.split(key, steps))
    return params


def embed_documents(params, mem_len, *, rows, seed):
    """Embeds the passages of new documents.

    Args:
      params: Parameters of MODEL.
      mem_len: Length of the memory, M.
      rows: Number of documents, B.
      seed: Seed of the documents.

    Returns:
      Embeddings [PASSAGES, B, D + 1], of which the last feature is 1 for the bias of a probe, and
      topics, int [B].
    """

    def step(reading, key):
        words_key, topic_key = jax.random.split(key)
        hidden, memory = MODEL.apply(params, reading.draw(words_key), reading.memory)
        return reading.move_on(topic_key, memory), hidden.mean(1)

    topic_key, key = jax.random.split(jax.random.key(seed))
    reading = Reading.start(topic_key, mem_len, rows)
    scan = jax.jit(jax.lax.scan, static_argnums=0)
    _, embeddings = scan(step, reading, jax.random.split(key, PASSAGES))

    with_ones = np.pad(embeddings, ((0, 0), (0, 0), (0, 1)), constant_values=1)
    return with_ones, np.asarray(reading.topic)


def accuracy(params, mem_len, *, documents=128, seed=1):
    """Fits a linear probe on some documents, and asks it for the topics of others.

    Args:
      params: Parameters of MODEL.
      mem_len: Length of the memory, M.
      documents: Number of documents to fit, and of documents to ask for.
      seed: Seed of the documents.

    Returns:
      The fraction of the other documents whose topic is right, per passage [PASSAGES].
    """
    fitted, topics = embed_documents(params, mem_len, rows=documents, seed=seed + 1)
    others, expected = embed_documents(params, mem_len, rows=documents, seed=seed + 2)

    # Ridge regression of the topics, one-hot, on the embeddings of all passages.
    inputs = fitted.reshape(-1, fitted.shape[-1])  # [PASSAGES * B, D + 1]
    targets = np.eye(TOPICS)[np.tile(topics, PASSAGES)]  # [PASSAGES * B, TOPICS]
    penalty = 0.1 * np.eye(inputs.shape[1])
    probe = np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ targets)  # [D + 1, TOPICS]

    named = (others @ probe).argmax(-1)  # [PASSAGES, B]
    return (named == expected).mean(axis=1)


def main(steps=500):
    """Prints and returns the fractions of right topics by passage, with and without the memory."""
    params = train(steps=steps)
    right = {
        "with memory": accuracy(params, MEM_LEN),
        "without memory": accuracy(params, 0),
    }
    reach = CONFIG.n_layer * MEM_LEN
    print(f"right topics by passage of {PASSAGE} tokens; {reach} tokens are within reach")
    for name, fractions in right.items():
        columns = "  ".join(f"{fraction:.2f}" for fraction in fractions)
        print(f"  {name:<16}{columns}")
    return right


if __name__ == "__main__":
    main()
