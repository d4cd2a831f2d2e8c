"""Embeddings of a document of any length, passage by passage while it is read, in constant memory.

    python -m experiments.examples.document_embeddings --out=runs/document_embeddings

A Transformer-XL reads passages of 128 tokens as its segments; the embedding of a passage is the mean of its hidden
states. The memory is all that goes from one passage to the next, so that time per token and memory of the process do
not depend on how much was read. The program measures both over a document of a million tokens.

Then it shows what the memory is for. The first word of a document names one of 8 topics; all other words are drawn
without regard to it. The model is trained to name the topic at each word. A linear probe, fitted on the embeddings of
some documents, is asked for the topic of other documents, from one passage of each. If the model reads each passage
from pathlib import Path
from an empty memory, the probe is right in 1 of 8 documents at best, in all passages but the first. N layers with a
memory of M tokens reach N * M tokens back, and no further.

With a trained language model it writes the embeddings of a text, float32 [passages, D], as they come:

    python -m experiments.examples.document_embeddings --workdir=runs/ptb_small --file=book.txt --out=runs/book
"""

import dataclasses
import functools
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import txl_jax
from txl_jax import CompatConfig, ModelConfig, NormPlace, cli, plots
from txl_jax.cli import setting
from txl_jax.runtime.storage import as_path, write_json

CONFIG = ModelConfig(n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, init_std=0.1, layer_norm=NormPlace.PRE)
TOPICS, WORDS = 8, 24  # The first ids are the topics' names, the others words of any document.
PASSAGE, PASSAGES = 128, 12  # Tokens of a passage, passages of a document.
MEM_LEN = 512
MARKS = (10_000, 100_000, 1_000_000)  # Tokens after which time and memory are written down.
ROWS = 12  # Documents side by side.


def regroup(pieces: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Yields the tokens of pieces of any lengths again, `length` at a time; the last may be fewer."""
    held = np.zeros(0, np.int32)
    for piece in pieces:
        held = np.concatenate([held, piece], dtype=np.int32)
        while len(held) >= length:
            yield held[:length]
            held = held[length:]
    if len(held):
        yield held


def read_passage(model: Any, params: Any, tokens: jax.Array, memory: txl_jax.Memory, **lengths: Any) -> Any:
    """Computes the mean hidden states [B, D] of passages [B, L], and the memory moved on by L tokens."""
    hidden, memory = model.apply({"params": params}, tokens, memory, **lengths)
    return hidden.mean(1), memory


def stream(read: Callable[..., Any], memory: txl_jax.Memory, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields one embedding [D] per passage of a document, while its pieces come.

    Args:
      read: maps a passage [1, L] and the memory to its embedding [1, D] and the next memory.
      memory: that of the model before the document, for one row.
      pieces: token ids [T] of any lengths.
    """
    for passage in regroup(pieces, PASSAGE):
        embedding, memory = read(passage[None], memory)
        yield np.asarray(embedding[0])


class Reading(NamedTuple):
    """Documents that are read side by side [B]."""

    topic: jax.Array  # int, 0 .. TOPICS - 1.
    place: jax.Array  # int, number of the next passage.
    memory: txl_jax.Memory

    def draw(self, key: jax.Array) -> jax.Array:
        """Returns the next passage of each document: int [B, L]; the first one begins with the topic."""
        words = jax.random.randint(key, (len(self.topic), PASSAGE), TOPICS, TOPICS + WORDS)
        return words.at[:, 0].set(jnp.where(self.place == 0, self.topic, words[:, 0]))

    def move_on(self, key: jax.Array, memory: txl_jax.Memory) -> "Reading":
        """Returns the state after a passage; rows whose document has ended begin a new one."""
        ended = self.place == PASSAGES - 1
        fresh = jax.random.randint(key, self.topic.shape, 0, TOPICS)
        return Reading(
            topic=jnp.where(ended, fresh, self.topic),
            place=jnp.where(ended, 0, self.place + 1),
            memory=txl_jax.reset_memory(memory, ended),
        )


def make_model() -> txl_jax.TransformerXL:
    """Returns the model of the synthetic documents."""
    return txl_jax.TransformerXL(CONFIG, CompatConfig(), vocab_size=TOPICS + WORDS)


def start(key: jax.Array, mem_len: int, *, rows: int) -> Reading:
    """Returns new documents, all at their first passage."""
    topic = jax.random.randint(key, (rows,), 0, TOPICS)
    return Reading(topic, jnp.zeros(rows, jnp.int32), make_model().init_memory(batch_size=rows, mem_len=mem_len))


def topic_loss(params: Any, reading: Reading, key: jax.Array) -> tuple[jax.Array, Reading]:
    """Computes the nats of the topic's name at each word of a passage, and the state after it."""
    model, (words, fresh) = make_model(), jax.random.split(key)
    outputs: Any = model.apply({"params": params}, reading.draw(words), reading.memory)
    hidden, memory = outputs
    targets = jnp.broadcast_to(reading.topic[:, None], hidden.shape[:2])
    nats: Any = model.apply({"params": params}, hidden, targets, method=model.nll)
    return nats.mean(), reading.move_on(fresh, memory)


def train(*, updates: int, seed: int, log: Callable[[str], None]) -> Any:
    """Trains a model; returns its parameters."""
    init_key, text_key, key = jax.random.split(jax.random.key(seed), 3)
    reading = start(text_key, MEM_LEN, rows=ROWS)
    # Rows are at different places of their documents, so that each update has passages of all distances.
    reading = reading._replace(place=jnp.arange(ROWS) * PASSAGES // ROWS)
    params = make_model().init(init_key, reading.draw(text_key), reading.memory)["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.warmup_constant_schedule(0, 2e-3, 20)))

    @jax.jit
    def ten_updates(params: Any, moments: Any, reading: Reading, key: jax.Array) -> Any:
        def update(carry: Any, key: jax.Array) -> Any:
            params, moments, reading = carry
            (nats, reading), grads = jax.value_and_grad(topic_loss, has_aux=True)(params, reading, key)
            changes, moments = optimizer.update(grads, moments)
            return (optax.apply_updates(params, changes), moments, reading), nats

        carry, nats = jax.lax.scan(update, (params, moments, reading), jax.random.split(key, 10))
        return *carry, nats.mean()

    moments = optimizer.init(params)
    for number in range(updates // 10):
        params, moments, reading, nats = ten_updates(params, moments, reading, jax.random.fold_in(key, number))
        if (number + 1) % 5 == 0:
            log(f"update {10 * (number + 1):4}  nats {float(nats):.3f}")
    return params


def embed_documents(params: Any, mem_len: int, *, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the embeddings of new documents [PASSAGES, B, D], and their topics [B]."""

    def step(reading: Reading, key: jax.Array) -> tuple[Reading, jax.Array]:
        words, fresh = jax.random.split(key)
        embeddings, memory = read_passage(make_model(), params, reading.draw(words), reading.memory)
        return reading.move_on(fresh, memory), embeddings

    topic_key, key = jax.random.split(jax.random.key(seed))
    reading = start(topic_key, mem_len, rows=rows)
    embeddings = jax.jit(lambda state: jax.lax.scan(step, state, jax.random.split(key, PASSAGES))[1])(reading)
    return np.asarray(embeddings), np.asarray(reading.topic)


def fit_probe(embeddings: np.ndarray, topics: np.ndarray) -> np.ndarray:
    """Fits a linear classifier of the topics [B] to embeddings [PASSAGES, B, D]: weights [D + 1, TOPICS]."""
    inputs = _with_one(embeddings).reshape(-1, embeddings.shape[-1] + 1)
    targets = np.eye(TOPICS)[np.tile(topics, len(embeddings))]
    ridge = 0.1 * np.eye(inputs.shape[1])
    weights: np.ndarray = np.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ targets)
    return weights


def share_right(probe: np.ndarray, embeddings: np.ndarray, topics: np.ndarray) -> np.ndarray:
    """Returns the share of documents whose topic the probe finds from one passage: floats [PASSAGES]."""
    found = (_with_one(embeddings) @ probe).argmax(-1)
    share: np.ndarray = (found == topics).mean(axis=1)
    return share


def _with_one(embeddings: np.ndarray) -> np.ndarray:
    return np.concatenate([embeddings, np.ones((*embeddings.shape[:-1], 1))], axis=-1)


def accuracy(params: Any, mem_len: int, *, seed: int, documents: int) -> np.ndarray:
    """Fits a probe on some documents; returns the share of right topics by passage [PASSAGES] of others."""
    probe = fit_probe(*embed_documents(params, mem_len, rows=documents, seed=seed + 1))
    return share_right(probe, *embed_documents(params, mem_len, rows=documents, seed=seed + 2))


def measure_stream(tokens: int) -> list[dict[str, float]]:
    """Streams one document of random words; returns the time per token and the peak memory of the process at MARKS."""
    model, rng = make_model(), np.random.default_rng(0)
    memory = model.init_memory(batch_size=1, mem_len=MEM_LEN)
    params = model.init(jax.random.key(0), jnp.zeros((1, PASSAGE), jnp.int32), memory)["params"]
    read = jax.jit(functools.partial(read_passage, model, params))
    read(jnp.zeros((1, PASSAGE), jnp.int32), memory)  # Compiles it.
    records: list[dict[str, float]] = []
    marks = [mark for mark in MARKS if mark <= tokens]
    text = (rng.integers(TOPICS, TOPICS + WORDS, 1000) for _ in range(tokens // 1000))
    done, since, began = 0, 0, time.perf_counter()
    for _ in stream(read, memory, text):
        done += PASSAGE
        if marks and done >= marks[0]:
            now = time.perf_counter()
            record = {
                "tokens": marks.pop(0),
                "us_per_token": 1e6 * (now - began) / (done - since),
                "peak_mb": peak_mb(),
            }
            records.append(record)
            since, began = done, now
    return records


def peak_mb() -> float:
    """Returns the largest resident memory that the process had so far, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024  # Bytes there, KiB on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def embed_file(workdir: str, file: str, out: str) -> int:
    """Writes the embeddings of a text, read line by line, to embeddings.f32; returns how many there are.

    Raises:
      UserError: there is no such file, or `workdir` has no trained model.
    """
    if not Path(file).is_file():
        raise txl_jax.UserError(f"--file is {file}, which is no file; give a text")
    model = txl_jax.load(workdir)
    lengths: dict[str, Any] = {"clamp_len": model.config.eval.clamp_len, "same_length": model.config.eval.same_length}
    read = model.components.jit(functools.partial(read_passage, model.components.model, **lengths))
    folder, count = Path(as_path(out)), 0
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "embeddings.f32"
    with open(file, "rb") as lines, path.open("wb") as written:
        embeddings = stream(functools.partial(read, model.params), model.init_memory(1), map(model.encode, lines))
        for embedding in embeddings:
            count += 1
            written.write(embedding.astype(np.float32).tobytes())
    print(f"{count:,} passages of {PASSAGE} tokens, float32 [{count}, {model.config.model.d_model}], in {path}")
    return count


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """The folder, and how long it takes."""

    out: str = setting("runs/document_embeddings", "Folder of the result and the picture.", path=True)
    workdir: str | None = setting(None, "A trained run or a portable folder, which reads --file.", path=True)
    file: str | None = setting(None, "A text to embed; needs --workdir.", path=True)
    updates: int = setting(500, "Updates of the model.", at_least=10)
    tokens: int = setting(1_000_000, "Tokens of the document that is timed.", at_least=10_000)
    seed: int = setting(1, "Seed of weights and documents.")


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the example."""
    del job
    if (plan.workdir is None) != (plan.file is None):
        raise txl_jax.UserError("--workdir has the model that reads --file; give both of them, or none")
    if plan.file is not None and plan.workdir is not None:
        embed_file(plan.workdir, plan.file, plan.out)
        return
    stream_records = measure_stream(plan.tokens)  # First: training needs more memory and would hide it.
    for record in stream_records:
        print(
            "after {tokens:9,} tokens: {us_per_token:5.1f} us per token, peak memory {peak_mb:.1f} MB".format(**record)
        )
    params = train(updates=plan.updates, seed=plan.seed, log=print)
    shares = {
        name: accuracy(params, mem_len, seed=plan.seed, documents=128)
        for name, mem_len in (("with memory", MEM_LEN), ("without memory", 0))
    }
    _write(plan.out, stream_records, shares)


def _write(out: str, stream_records: list[dict[str, float]], shares: dict[str, np.ndarray]) -> None:
    """Writes results.json and reach.png, and prints the shares by distance of a passage to the topic's name."""
    folder = Path(as_path(out))
    folder.mkdir(parents=True, exist_ok=True)
    points = {
        name: {PASSAGE * number: round(float(value), 3) for number, value in enumerate(share)}
        for name, share in shares.items()
    }
    write_json(folder / "results.json", {"stream": stream_records, "right": points})
    reach = CONFIG.n_layer * MEM_LEN
    print(f"\nshare of right topics by distance in tokens (chance {1 / TOPICS}; N * M = {reach:,})")
    for name, values in points.items():
        print(f"  {name:<16} {'  '.join(f'{distance}: {value:.2f}' for distance, value in values.items())}")
    if plots.can_draw():
        title = f"Topic found from a passage ({CONFIG.n_layer} layers, memory {MEM_LEN}: reach {reach:,} tokens)"
        xlabel, ylabel = "tokens from the topic's name to the passage", "share of right topics"
        plots.curves(points, folder / "reach.png", title=title, xlabel=xlabel, ylabel=ylabel)
        print(f"picture {folder / 'reach.png'}")


if __name__ == "__main__":
    cli.main(run, Plan)
