"""Embeddings of a document of any length, passage by passage while it is read, in constant memory.

    python docs/examples/document_embeddings.py

A Transformer-XL reads passages of 128 tokens as its segments; a passage's embedding is the mean of
its hidden states. Only the memory goes from one passage to the next. `stream` does that for a model
that you have trained.

The script shows what the memory is for. The first word of a document names one of 8 topics; all
other words are drawn without regard to it. The model is trained to name the topic at each word. A
linear probe, fitted on the embeddings of some documents, is asked for the topic of other documents,
from one passage of each. If each passage is read with an empty memory, the probe is right in 1 of 8
documents at best, in all passages but the first. N layers with a memory of M tokens reach N * M
tokens back, and no further.
"""

import itertools
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
TOPICS, WORDS = 8, 24  # The first ids name topics, the others are words of any document.
MODEL = txl_jax.TransformerXL(CONFIG, vocab_size=TOPICS + WORDS)
PASSAGE, PASSAGES = 128, 12  # Tokens per passage, passages per document.
MEM_LEN = 512
ROWS = 12  # Documents side by side.


def stream(model, pieces, length=PASSAGE):
    """Yields one embedding [D] per passage while the pieces of a document arrive.

    The pieces can be the lines of an open file, for example.

    `model` is a `txl_jax.LanguageModel`. The last passage may be shorter than `length` tokens.
    """
    lengths = {
        "clamp_len": model.config.eval.clamp_len,
        "same_length": model.config.eval.same_length,
    }
    variables = {"params": model.params}
    read = model.components.jit(
        lambda tokens, memory: model.components.model.apply(variables, tokens, memory, **lengths)
    )
    memory, waiting = model.init_memory(1), np.zeros(0, np.int32)
    for piece in itertools.chain(pieces, [None]):  # None ends the document.
        waiting = waiting if piece is None else np.concatenate([waiting, model.encode(piece)])
        while len(waiting) >= length or (piece is None and len(waiting)):
            hidden, memory = read(waiting[None, :length], memory)
            waiting = waiting[length:]
            yield np.asarray(hidden[0].mean(0))


class Reading(NamedTuple):
    """Documents that are read side by side [B]."""

    topic: jax.Array  # int, 0 .. TOPICS - 1.
    place: jax.Array  # int, number of the next passage.
    memory: txl_jax.Memory

    @staticmethod
    def start(key, mem_len, rows):
        """Returns new documents, all at their first passage."""
        topic = jax.random.randint(key, (rows,), 0, TOPICS)
        return Reading(
            topic, jnp.zeros(rows, jnp.int32), MODEL.init_memory(batch_size=rows, mem_len=mem_len)
        )

    def draw(self, key):
        """Returns the next passage of each document: int [B, L].

        The first one begins with the topic.
        """
        words = jax.random.randint(key, (len(self.topic), PASSAGE), TOPICS, TOPICS + WORDS)
        return words.at[:, 0].set(jnp.where(self.place == 0, self.topic, words[:, 0]))

    def move_on(self, key, memory):
        """Returns the state after a passage. Rows whose document has ended begin a new one."""
        ended = self.place == PASSAGES - 1
        fresh = jax.random.randint(key, self.topic.shape, 0, TOPICS)
        topic, place = jnp.where(ended, fresh, self.topic), jnp.where(ended, 0, self.place + 1)
        return Reading(topic, place, txl_jax.reset_memory(memory, ended))


def topic_loss(params, reading, key):
    """Computes the nats of the topic's name at each word of a passage, and the state after it."""
    words, fresh = jax.random.split(key)
    hidden, memory = MODEL.apply(params, reading.draw(words), reading.memory)
    targets = jnp.broadcast_to(reading.topic[:, None], hidden.shape[:2])
    return MODEL.apply(params, hidden, targets, method=MODEL.nll).mean(), reading.move_on(
        fresh, memory
    )


def train(*, steps, seed=1):
    """Trains a model and returns its parameters."""
    init_key, text_key, key = jax.random.split(jax.random.key(seed), 3)
    # Rows are at different places of their documents, so that each step has passages of all
    # distances.
    reading = Reading.start(text_key, MEM_LEN, ROWS)._replace(
        place=jnp.arange(ROWS) * PASSAGES // ROWS
    )
    params = MODEL.init(init_key, reading.draw(text_key), reading.memory)
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(optax.warmup_constant_schedule(0, 2e-3, 20))
    )

    def step(carry, key):
        params, moments, reading = carry
        grads, reading = jax.grad(topic_loss, has_aux=True)(params, reading, key)
        changes, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, changes), moments, reading), None

    carry = params, optimizer.init(params), reading
    return jax.jit(jax.lax.scan, static_argnums=0)(step, carry, jax.random.split(key, steps))[0][0]


def embed_documents(params, mem_len, *, rows, seed):
    """Returns the embeddings of new documents, with a column of ones, and their topics.

    With the column, the embeddings have shape [PASSAGES, B, D + 1]. The topics have shape [B].
    """

    def step(reading, key):
        words, fresh = jax.random.split(key)
        hidden, memory = MODEL.apply(params, reading.draw(words), reading.memory)
        return reading.move_on(fresh, memory), hidden.mean(1)

    topic_key, key = jax.random.split(jax.random.key(seed))
    reading = Reading.start(topic_key, mem_len, rows)
    _, embeddings = jax.jit(jax.lax.scan, static_argnums=0)(
        step, reading, jax.random.split(key, PASSAGES)
    )
    return np.pad(embeddings, ((0, 0), (0, 0), (0, 1)), constant_values=1), np.asarray(
        reading.topic
    )


def accuracy(params, mem_len, *, documents=128, seed=1):
    """Fits a linear probe on some documents.

    Returns the fraction of others it is right for, per passage [PASSAGES].
    """
    inputs, topics = embed_documents(params, mem_len, rows=documents, seed=seed + 1)
    others, expected = embed_documents(params, mem_len, rows=documents, seed=seed + 2)
    inputs, targets = (
        inputs.reshape(-1, inputs.shape[-1]),
        np.eye(TOPICS)[np.tile(topics, PASSAGES)],
    )
    probe = np.linalg.solve(inputs.T @ inputs + 0.1 * np.eye(inputs.shape[1]), inputs.T @ targets)
    return ((others @ probe).argmax(-1) == expected).mean(axis=1)


def main(steps=500):
    """Prints and returns the fractions of right topics by passage, with and without the memory."""
    params = train(steps=steps)
    right = {
        name: accuracy(params, m) for name, m in (("with memory", MEM_LEN), ("without memory", 0))
    }
    print(
        f"right topics by passage of {PASSAGE} tokens; {CONFIG.n_layer * MEM_LEN} tokens are "
        "within reach"
    )
    for name, fractions in right.items():
        print(f"  {name:<16}{'  '.join(f'{fraction:.2f}' for fraction in fractions)}")
    return right


if __name__ == "__main__":
    main()
