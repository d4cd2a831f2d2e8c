"""Times the softmax by vocabulary size and cutoffs, with the layers of own_words for comparison.

    python -m benchmarks.cutoffs --out=benchmarks/cutoffs.csv

A call computes the loss of a batch of own_words (64 x 32 tokens, D = 256) and its gradients, once
it has the last layer's hidden states. Tokens are random, as frequent as words are, with the most
frequent first. Weights are untrained. All calls of a vocabulary are interleaved, the layers' among
them, and the table has the median of five.
"""

import argparse
import csv
import dataclasses
import datetime
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import txl_jax
from experiments.bench.timing import draw_tokens
from txl_jax.runtime import environment

COLUMNS = (
    "machine",
    "date",
    "versions",
    "command",
    "V",
    "part",
    "cutoffs",
    "div_val",
    "parameters",
    "us per token",
    "slowest",
    "fastest",
)
FULL: tuple[int, ...] = ()  # No cutoffs: a full softmax.
# Cutoffs to try by vocabulary size, besides a full softmax: the first token of each tail.
CUTOFFS: dict[int, tuple[tuple[int, ...], ...]] = {
    1_000: ((200,),),
    10_000: ((2_000,), (1_000, 4_000)),
    50_000: ((5_000,), (4_000, 20_000)),
    267_735: ((20_000,), (20_000, 40_000, 200_000)),
}
DIV_VALS = (1, 4)  # Each is tried with all cutoffs. A full softmax does not depend on it.


@dataclasses.dataclass
class Timed:
    """Something to time, and the seconds of its calls."""

    part: str  # "softmax" or "layers".
    cutoffs: tuple[int, ...]
    div_val: int
    parameters: int
    call: Callable[[], Any]
    seconds: list[float] = dataclasses.field(default_factory=list)


def main(words: Sequence[str] | None = None) -> None:
    """Times all softmaxes, and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the CSV file, which is replaced")
    parser.add_argument("--calls", type=int, default=5, help="timed calls of each softmax")
    arguments = parser.parse_args(words)

    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for vocab_size, choices in CUTOFFS.items():
            for row in time_vocabulary(vocab_size, (FULL, *choices), calls=arguments.calls):
                print(*row.values(), sep=" | ")
                writer.writerow(row)
                file.flush()


def time_vocabulary(
    vocab_size: int, choices: Sequence[tuple[int, ...]], *, calls: int
) -> list[dict[str, Any]]:
    """Times the layers, and the softmaxes of one vocabulary.

    Args:
      vocab_size: Tokens in the vocabulary.
      choices: Cutoffs to try.
      calls: Timed calls of each softmax and of the layers.

    Returns:
      The rows of the table, first the layers'.
    """
    tasks = [_layers()]
    for cutoffs in choices:
        if cutoffs == FULL:
            tasks.append(_softmax(vocab_size, cutoffs, 1))
            continue
        for div_val in DIV_VALS:
            tasks.append(_softmax(vocab_size, cutoffs, div_val))

    for number in range(1 + calls):
        for task in tasks:
            start = time.perf_counter()
            task.call()
            # The first call compiles.
            if number > 0:
                task.seconds.append(time.perf_counter() - start)

    facts = environment.describe()
    shared = {
        "machine": f"{environment.device_kind()}, {facts['devices']} device",
        "date": datetime.date.today().isoformat(),
        "versions": f"jax {facts['jax']}, Python {facts['python']}",
        "command": "python -m benchmarks.cutoffs",
        "V": vocab_size,
    }
    return [shared | _row(task) for task in tasks]


def _row(task: Timed) -> dict[str, Any]:
    """Returns the columns of a task that has been timed."""
    config = txl_jax.preset("own_words")
    n_token = config.train.batch_size * config.train.segment_len
    per_token = [seconds / n_token * 1e6 for seconds in task.seconds]
    median = statistics.median(per_token)
    slowest = max(per_token)
    fastest = min(per_token)
    return {
        "part": task.part,
        "cutoffs": " ".join(map(str, task.cutoffs)),
        "div_val": task.div_val,
        "parameters": task.parameters,
        "us per token": f"{median:.1f}",
        "slowest": f"{slowest:.1f}",
        "fastest": f"{fastest:.1f}",
    }


def _model(vocab_size: int, cutoffs: tuple[int, ...], div_val: int) -> txl_jax.TransformerXL:
    sizes = txl_jax.preset("own_words").model
    sizes = dataclasses.replace(sizes, cutoffs=cutoffs, div_val=div_val)
    return txl_jax.TransformerXL(sizes, vocab_size=vocab_size)


def _inputs(vocab_size: int) -> jax.Array:
    """Returns the tokens of a batch, int [B, L]."""
    train = txl_jax.preset("own_words").train
    shape = (train.batch_size, train.segment_len)
    return jnp.asarray(draw_tokens(vocab_size, shape[0] * shape[1])).reshape(shape)


def _params(model: txl_jax.TransformerXL, tokens: jax.Array) -> Any:
    memory = model.init_memory(batch_size=tokens.shape[0], mem_len=0)
    return jax.jit(model.init)(jax.random.key(0), tokens, memory)["params"]


def _softmax(vocab_size: int, cutoffs: tuple[int, ...], div_val: int) -> Timed:
    """Returns the loss of a batch, with the gradients of hidden states, tables and biases."""
    model = _model(vocab_size, cutoffs, div_val)
    tokens = _inputs(vocab_size)
    params = _params(model, tokens)
    # The layers are the same for all softmaxes, and the loss does not need them.
    params = {name: params[name] for name in ("embedding", "softmax")}
    hidden = jax.random.normal(jax.random.key(1), (*tokens.shape, model.config.d_model))

    @jax.jit
    def loss_and_gradients(params: Any, hidden: jax.Array, tokens: jax.Array) -> Any:
        def loss(params: Any, hidden: jax.Array) -> jax.Array:
            nats: Any = model.apply({"params": params}, hidden, tokens, method=model.nll)
            return nats.mean()

        return jax.value_and_grad(loss, argnums=(0, 1))(params, hidden)

    n_parameter = sum(leaf.size for leaf in jax.tree.leaves(params))
    call = functools.partial(_finish, loss_and_gradients, params, hidden, tokens)
    return Timed("softmax", cutoffs, div_val, n_parameter, call)


def _layers() -> Timed:
    """Returns the layers of own_words, forward and backward, with a full memory.

    They read vectors, and do not depend on the vocabulary.
    """
    train = txl_jax.preset("own_words").train
    model = _model(8, (), 1)
    shape = (train.batch_size, train.segment_len, model.config.d_model)
    vectors = jax.random.normal(jax.random.key(1), shape)
    tokens = jnp.zeros(shape[:2], jnp.int32)
    params = _params(model, tokens)
    # Vectors need no embedding, and hidden states are not scored.
    params = {name: params[name] for name in params if name not in ("embedding", "softmax")}
    memory = model.init_memory(batch_size=train.batch_size, mem_len=train.mem_len)
    memory = dataclasses.replace(memory, valid=memory.valid + train.mem_len)

    @jax.jit
    def loss_and_gradients(params: Any, vectors: jax.Array) -> Any:
        def loss(params: Any, vectors: jax.Array) -> jax.Array:
            hidden, _ = model.apply({"params": params}, vectors, memory)
            return jnp.square(hidden).mean()

        return jax.value_and_grad(loss, argnums=(0, 1))(params, vectors)

    n_parameter = sum(leaf.size for leaf in jax.tree.leaves(params))
    return Timed(
        "layers",
        (),
        1,
        n_parameter,
        functools.partial(_finish, loss_and_gradients, params, vectors),
    )


def _finish(function: Callable[..., Any], *arguments: Any) -> None:
    jax.block_until_ready(function(*arguments))


if __name__ == "__main__":
    main()
