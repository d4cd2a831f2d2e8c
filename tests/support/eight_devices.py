"""Trains and scores on meshes of eight fake CPU devices: a program of tests/sharding and
tests/runs, which prints JSON.

B = 16, D = 16, H = 8, E = 6, F = 24, L = 7, M = 9, N = 3, V = 42, or with clusters 41, cut at 16
and 27: 16, 11 and 14 tokens, of which the second and third divide among neither 8 devices nor (the
second) 2.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from support import drawn_run, tiny, tiny_run
from txl_jax.config import (
    AttentionPath,
    CacheDType,
    DropoutConfig,
    DynamicConfig,
    DynamicRule,
    ExperimentConfig,
    MeshConfig,
    ModelConfig,
)
from txl_jax.data.corpus import Corpus
from txl_jax.data.segments import evaluation_segments, training_segments
from txl_jax.evaluation import dynamic
from txl_jax.evaluation.streaming import evaluate
from txl_jax.metrics import Totals
from txl_jax.modules.dropout import Dropout
from txl_jax.modules.embedding import Embedding
from txl_jax.ops import adaptive_softmax
from txl_jax.runs import warm_start as warm_start_lib
from txl_jax.runs.build import Built, build
from txl_jax.runs.convert import convert
from txl_jax.runs.dynamic import DynamicModel, built_with_rule
from txl_jax.runs.run import Run
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.sharding.mesh import bind_mesh, make_mesh
from txl_jax.training.step import TrainState, TrainStep

MESHES = {
    "one": MeshConfig(data=1),
    "data": MeshConfig(),
    "mixed": MeshConfig(data=2, fsdp=2, tensor=2),
    "fsdp": MeshConfig(fsdp=8),
    "tensor": MeshConfig(tensor=8),
}
SOFTMAX = {"plain": {}, "adaptive": {"model__cutoffs": (16, 27), "model__div_val": 2}}
VOCABULARY = {"plain": 42, "adaptive": 41}
# Runs that are also scored.
SCORED = [
    ("plain", "one"),
    ("plain", "mixed"),
    ("plain", "fsdp"),
    ("adaptive", "one"),
    ("adaptive", "mixed"),
    ("adaptive", "tensor"),
]
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
B = 16
L = 7
STEPS = 20
PER_CALL = 2
TOKENS = np.random.default_rng(0).integers(41, size=B * L * 4 + 1)  # An epoch of four segments.


def config(mesh: MeshConfig, **changes: Any) -> ExperimentConfig:
    """The config of all runs here, on a mesh, with some settings changed."""
    model = {
        "model__n_layer": 3,
        "model__d_model": 16,
        "model__n_head": 8,
        "model__d_head": 6,
        "model__d_inner": 24,
        "model__dropout__rate": 0.2,
        "model__dtype": jnp.result_type(float).name,
    }
    train = {
        "train__steps": STEPS,
        "train__log_every": STEPS,
        "train__eval_every": STEPS,
        "train__checkpoint_every": STEPS,
        "train__batch_size": B,
        "train__segment_len": L,
        "train__mem_len": 9,
        "train__segments_per_call": PER_CALL,
    }
    evaluation = {
        "eval__batch_size": 1,
        "eval__segment_len": 4,
        "eval__mem_len": 11,
        "eval__clamp_len": None,
    }
    settings = {"mesh": mesh} | model | train | evaluation | changes
    return tiny.changed(ExperimentConfig(), **settings)


def build_run(kind: str, mesh: str | MeshConfig, **changes: Any) -> Built:
    """The parts of a run with this kind of softmax on a mesh."""
    if isinstance(mesh, str):
        mesh = MESHES[mesh]
    return build(config(mesh, **SOFTMAX[kind], **changes), vocab_size=VOCABULARY[kind])


def train_steps(parts: Built, train_step: TrainStep, state: TrainState, steps: range) -> tuple:
    """The state after these training steps, and the loss and gradient norm of each step."""
    losses = []
    norms = []
    reader = training_segments(TOKENS, batch_size=B, segment_len=L)
    for step in steps[::PER_CALL]:
        state, metrics = train_step(state, parts.place(reader.segments(step, PER_CALL)))
        losses += (metrics.nats / metrics.tokens).tolist()
        norms += metrics.grad_norm.tolist()
    return state, losses, norms


def run(parts: Built, *, scores: bool) -> dict:
    """Trains, and returns losses, parameters, bytes per device, and what devices gather and send.

    The trained model is also scored if `scores` is set.
    """
    compilation = parts.compile_step()
    train_step = compilation.program
    text = compilation.executable.as_text()
    state, losses, norms = train_steps(parts, train_step, parts.init_state(), range(STEPS))
    results = {
        "losses": losses,
        "grad_norms": norms,
        "params": flat(state.params),
        "mesh": dict(parts.mesh.shape),
        "gathered": gathered(text),
        "sent": sent_by_layers(text),
    }
    results |= on_devices(state)
    if scores:
        results |= scored(parts, state.params)
    return results


def flat(tree: Any) -> list[float]:
    """All numbers of a tree of arrays."""
    leaves = jax.tree.leaves(jax.device_get(tree))
    return np.concatenate([np.ravel(leaf) for leaf in leaves]).tolist()


def n_byte(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def on_devices(state: TrainState) -> dict:
    """The bytes of a state, and the shapes of some of its arrays, on one device."""
    tables = []
    for name, table in sorted(state.params["embedding"].items()):
        if name.startswith("table"):
            tables.append(shard_of(table))
    return {
        "bytes": n_byte(state.params),
        "bytes_per_device": on_one_device(state.params),
        "moment_bytes_per_device": on_one_device(state.opt_state),
        "query_per_device": shard_of(state.params["stack"]["layers"]["attention"]["query"]),
        "tables_per_device": tables,
        "memory_per_device": shard_of(state.memory.hidden),
    }


def gathered(text: str) -> list[dict]:
    """The arrays that a program, as XLA's text, gathers from other devices.

    With each, its dtype and shape, and whether a layer or the embedding gathers it.
    """
    arrays = []
    for line in text.splitlines():
        instruction = re.search(r"= (.*?) all-gather\(", line)
        if instruction is None:
            continue
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", instruction[1]):
            array = {
                "dtype": dtype,
                "shape": shape_of(sizes),
                "in_stack": "/stack/" in line,
                "in_embedding": "/embedding/" in line,
            }
            arrays.append(array)
    return arrays


def shape_of(sizes: str) -> list[int]:
    """A shape in XLA's text, such as "3,4", which is empty for a scalar."""
    return [int(size) for size in sizes.split(",") if size]


def sent_by_layers(text: str) -> dict[str, list[list[int]]]:
    """The shapes of arrays that devices send in a training step's layers, by collective.

    `text` is the step's program as XLA's text.
    """
    sent: dict[str, list[list[int]]] = {name: [] for name in COLLECTIVES}
    for line in text.splitlines():
        instruction = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})\(", line)
        if instruction is None or "/stack/" not in line:
            continue
        for sizes in re.findall(r"\w\[([\d,]*)\]", instruction[1]):
            sent[instruction[2]].append(shape_of(sizes))
    return sent


def on_one_device(tree: Any) -> int:
    """The bytes of a tree's arrays on one device, without scalars."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
    return sum(array.addressable_shards[0].data.nbytes for array in arrays)


def shard_of(array: jax.Array) -> tuple[int, ...]:
    return array.addressable_shards[0].data.shape


def scored(parts: Built, params: Any) -> dict:
    """Scores of a short text in one row and in sixteen, and of a longer text in sixteen.

    The longer text is also scored with an int8 cache.
    """

    def with_settings(**changes: Any) -> Built:
        changes = {f"eval__{name}": value for name, value in changes.items()}
        return dataclasses.replace(parts, config=tiny.changed(parts.config, **changes))

    one_row, keys_per_device = score(parts, params)
    of_rows, keys_of_rows = score(with_settings(batch_size=B), params)
    longer, _ = score(with_settings(batch_size=B), params, 12 * B)
    in_int8, _ = score(with_settings(batch_size=B, cache_dtype=CacheDType.INT8), params, 12 * B)
    return {
        "score": one_row.nats,
        "scored": one_row.tokens,
        "score_of_rows": of_rows.nats,
        "score_of_longer": longer.nats,
        "score_in_int8": in_int8.nats,
        "keys_per_device": {"one row": keys_per_device, "sixteen rows": keys_of_rows},
    }


def score(parts: Built, params: Any, n_target: int = 49) -> tuple[Totals, tuple[int, ...]]:
    """The totals of a text, and the shape of a layer's stored keys on a device."""
    span = parts.config.eval
    weights = parts.prepare_params(params)
    memory = parts.init_memory(weights)
    keys_per_device = shard_of(jax.tree.leaves(memory.keys[0])[0])  # Before the memory is donated.
    reader = evaluation_segments(
        TOKENS[: n_target + 1], batch_size=span.batch_size, segment_len=span.segment_len
    )
    return evaluate(parts.eval_step, weights, memory, reader, place=parts.place), keys_per_device


def host_time() -> dict[str, float]:
    """Milliseconds of a training step in the thread that runs the loop, by mesh: medians of 50.

    The batch grows with the number of devices.

    As the loop does, it cuts segments, puts them on the devices, starts the step, and fetches the
    metrics of the step before. Other threads' time, such as the devices', does not count.
    """
    medians = {}
    for name, mesh in MESHES.items():
        rows = 4 if name == "one" else 32
        parts = build_run("plain", mesh, train__batch_size=rows, train__segments_per_call=1)
        step = parts.compile_step().program
        state = parts.init_state()
        reader = training_segments(np.tile(TOKENS, 20), batch_size=rows, segment_len=L)
        metrics_before = None
        times = []
        for number in range(60):
            began = time.thread_time()
            state, metrics = step(state, parts.place(reader.segments(number, 1)))
            jax.device_get(metrics_before)
            metrics_before = metrics
            times.append(1e3 * (time.thread_time() - began))
        medians[name] = statistics.median(times[10:])
    return medians


# Steps of a run, and the mesh on which they are done.
MOVES: list[tuple[range, str | MeshConfig]] = [
    (range(8), "fsdp"),
    (range(8, 14), MeshConfig(data=1, fsdp=2, tensor=2)),
    (range(14, STEPS), "one"),
]


def moved() -> list[float]:
    """The losses of a run that resumes on other devices.

    It begins on eight, and resumes on four with another mesh, and then on one.
    """
    losses = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(folder, keep=2, log=print) as checkpoints,
    ):
        for steps, mesh in MOVES:
            parts = build_run("adaptive", mesh)
            restored = checkpoints.restore(parts.abstract_state)
            state = parts.init_state() if restored is None else restored[1]
            state, losses_here, _ = train_steps(parts, parts.compile_step().program, state, steps)
            losses += losses_here
            checkpoints.save(steps.stop, state, {})
    return losses


def tail_work() -> dict:
    """The number of positions for which a device computes a tail's logits, and of all-gathers.

    The positions should be the 16 of the device's own rows.
    """
    rows = 15_000
    mesh = make_mesh(MESHES["data"])
    array = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    clusters = [adaptive_softmax.Cluster(array((n, 6)), array((n,)), None) for n in (10, rows)]
    tails = adaptive_softmax.TailEntries(array((1, 6)), array((1,)))

    def loss(clusters: Any, tails: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        nll = adaptive_softmax.negative_log_likelihood(
            hidden, targets, clusters, tails, (10,), chunk_size=16
        )
        return nll.sum()

    gradients = bind_mesh(mesh, jax.jit(jax.grad(loss, argnums=(0, 2))))
    lowered = gradients.lower(
        clusters, tails, array((16, 32, 6)), jax.ShapeDtypeStruct((16, 32), "int32")
    )
    text = lowered.compile().as_text()
    matmuls = map(shape_of, re.findall(r"= f32\[([0-9,]+)\]\S* dot\(", text))
    positions = max(math.prod(shape) // rows for shape in matmuls if rows in shape)
    return {"positions": positions, "all_gathers": text.count(" all-gather(")}


def odd_targets() -> dict[str, list[float]]:
    """Losses of ignored targets, of tokens, and of targets beyond the vocabulary, by mesh.

    nan, which JSON cannot store, becomes -1.
    """
    targets = np.array([[-1, 0, 40, 41], [-100, 20, 47, 1000]] * (B // 2), np.int32)
    by_mesh = {}
    for mesh in ("one", "mixed", "tensor"):
        parts = build_run("adaptive", mesh)
        # From the host: a program of only the loss would go from fsdp's shards of a table to the
        # rows of tensor through the whole table, of which jax 0.12 warns. Training and evaluation
        # do not. And initializing parameters would be another program to compile for each mesh.
        params = tiny_run.params(parts.model)
        hidden = np.random.default_rng(0).normal(size=(*targets.shape, 16))
        nll = parts.jit(functools.partial(parts.model.apply, method=parts.model.nll))
        losses = nll({"params": params}, hidden, targets)
        by_mesh[mesh] = np.nan_to_num(losses[:2], nan=-1.0).ravel().tolist()
    return by_mesh


def masks() -> dict[str, dict[str, Any]]:
    """By kind of mask and mesh, the number of different parts of the mask and of its zeros.

    And how many of its numbers differ from the mask on one device.
    """
    drop = Dropout(0.3, deterministic=False)
    rngs = {"dropout": jax.random.key(4)}
    tokens = jnp.asarray(TOKENS[: B * L].reshape(B, L))
    words = Embedding(ModelConfig(d_model=16, dropout=DropoutConfig(embedding=0.3)), 41)
    tables = {"params": {"table_0": jnp.ones((41, 16))}}

    def activations() -> jax.Array:
        return drop.apply({}, jnp.ones((B, L, 24)), rngs=rngs)

    def heads() -> jax.Array:
        return drop.apply({}, jnp.ones((B, 8, L, 5)), rngs=rngs)

    def embeddings() -> jax.Array:
        return words.apply(tables, tokens, deterministic=False, rngs=rngs)

    rows = ("data", "fsdp")
    kinds = {
        "activations": (activations, PartitionSpec(rows, None, "tensor")),
        "heads": (heads, PartitionSpec(rows, "tensor")),
        "embeddings": (embeddings, PartitionSpec(rows, None, "tensor")),
    }
    counts: dict[str, dict[str, Any]] = {}
    for name, (compute, spec) in kinds.items():
        expected = np.asarray(jax.jit(compute)())
        for mesh_name in ("data", "mixed", "tensor"):
            mesh = make_mesh(MESHES[mesh_name])
            jitted = jax.jit(compute, out_shardings=NamedSharding(mesh, spec))
            on_mesh = bind_mesh(mesh, jitted)()
            places = {str(shard.index) for shard in on_mesh.addressable_shards}
            counts[f"{name}, {mesh_name}"] = {
                "parts": len(places),
                "zeros": int((expected == 0).sum()),
                "different": int((np.asarray(on_mesh) != expected).sum()),
            }
    return counts


def optimizers() -> dict[str, Any]:
    """Compares the mixed mesh with one device, for the optimizers that look at whole tensors.

    Returns the error of their updates, and the bytes of their states.
    """
    sizes = {"model__d_model": 128, "model__d_head": 17, "model__d_inner": 144, "model__n_layer": 2}
    results: dict[str, Any] = {}
    for kind in ("lamb", "lamb_nvidia", "adafactor", "muon"):
        changes = sizes | {"optimizer__name": kind, "optimizer__weight_decay": 0.1}
        before, on_one, _ = updated(build_run("adaptive", "one", **changes))
        _, on_mixed, opt_state = updated(build_run("adaptive", "mixed", **changes))
        errors = jax.tree.map(relative_error, on_mixed, on_one, before)
        results[kind] = {
            "error": max(jax.tree.leaves(errors)),
            "bytes": n_byte(opt_state),
            "bytes_per_device": on_one_device(opt_state),
        }
    return results


def relative_error(after: Any, expected: Any, before: Any) -> Any:
    """The largest error of an updated array, as a part of its largest change."""
    return np.abs(expected - after).max() / np.abs(expected - before).max()


def updated(parts: Built) -> tuple[Any, Any, Any]:
    """Parameters before and after two updates by drawn gradients, and the optimizer's state.

    The parameters are on the host.
    """
    abstract = parts.abstract_state
    rng = np.random.default_rng(0)

    def draw() -> Any:
        return jax.tree.map(
            lambda leaf: jax.device_put(rng.normal(size=leaf.shape), leaf.sharding), abstract.params
        )

    def update(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        updates, opt_state = parts.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (abstract.params, abstract.opt_state))
    params = before = draw()
    opt_state = parts.jit(parts.optimizer.init, out_shardings=shardings[1])(params)
    step = parts.jit(update, out_shardings=shardings)
    for _ in range(2):
        params, opt_state = step(params, opt_state, draw())
    return jax.device_get(before), jax.device_get(params), opt_state


def runs(*names: str, scored: bool = True) -> dict[str, Any]:
    """The results of `run` for these names, such as "plain, mixed", or for all without names."""
    cases = [tuple(name.split(", ")) for name in names] or itertools.product(SOFTMAX, MESHES)
    results = {}
    for kind, mesh in cases:
        scores = scored and (kind, mesh) in SCORED
        results[f"{kind}, {mesh}"] = run(build_run(kind, mesh), scores=scores)
    return results


def mixed() -> dict[str, Any]:
    """The mixed mesh with tiles, to be compared with the reference on one device."""
    parts = build_run("adaptive", "mixed", model__attention=AttentionPath.TILED)
    return {"runs": {"adaptive, mixed": run(parts, scores=False)}}


def programs() -> dict[str, Any]:
    """Small programs, without training."""
    return {"tail": tail_work(), "odd": odd_targets(), "masks": masks()}


def rest() -> dict[str, Any]:
    """The cases of the slower tests."""
    whole = build_run("plain", "one", model__dropout__rate=0.0)
    in_chunks = build_run("plain", "mixed", model__dropout__rate=0.0, train__grad_accum_steps=4)
    return {
        "runs": runs("adaptive, one", "adaptive, mixed"),
        "microbatches": [run(parts, scores=False) for parts in (whole, in_chunks)],
        "moved": moved(),
        "optimizers": optimizers(),
    }


def warm_start() -> list[dict]:
    """The records of warm starts on one device and on eight, and the sha256 of their parameters.

    They start from a portable checkpoint, whose vocabulary has 11 words, and have another
    vocabulary: 13 words in clusters cut at 3 and 7.
    """
    words = [f"w{i}" for i in range(9)]
    folder = Path(tempfile.mkdtemp())
    clusters = {"cutoffs": (3, 7), "div_val": 2, "tie_projs": (False,) * 3}
    sizes = ModelConfig(n_layer=2, d_model=16, n_head=4, d_head=5, d_inner=24, **clusters)
    changes = {
        "model": sizes,
        "data__tokenizer__kind": "word",
        "train__batch_size": 16,
        "mesh": MESHES["one"],
    }
    old_text = on_words(folder / "old", words, **changes)
    drawn_run.make(folder / "run", *old_text)
    convert(folder / "run", folder / "portable", log=lambda line: None)

    new_config, corpus = on_words(folder / "new", [*words[::-1], "x", "y"], **changes)
    records = []
    for mesh in (MESHES["one"], MESHES["mixed"]):
        on_mesh = tiny.changed(new_config, mesh=mesh, init_from=str(folder / "portable"))
        parts = build(on_mesh, vocab_size=corpus.vocabulary.size)
        weights = warm_start_lib.load(parts, corpus.vocabulary, Run(folder / "new-run"))
        after = weights.state(parts.init_params())
        records.append({**weights.record, "after": warm_start_lib.digest(after.params)})
    return records


def on_words(folder: Path, words: list[str], **changes: Any) -> tuple[ExperimentConfig, Corpus]:
    """The config and the text of a run on lines of these words, the last of which are frequent."""
    folder.mkdir()
    lines = [" ".join(words[first:]) for first in range(len(words))]
    content = "\n".join(lines) * 9
    return drawn_run.on_text(folder, content.encode(), **changes)


def dynamic_scores() -> dict[str, dict[str, Any]]:
    """Losses and last parameters of dynamic evaluations, by mesh and number of rows."""
    rule = DynamicConfig(rule=DynamicRule.RMSPROP, learning_rate=0.01, decay=0.1, epsilon=1e-6)
    changes = SOFTMAX["adaptive"] | {"eval__dynamic": rule}
    results = {}
    for mesh in ("one", "mixed", "fsdp"):
        for rows in (1, B):
            on_mesh = config(MESHES[mesh], **changes, eval__batch_size=rows)
            parts = build(
                dynamic.training_config(on_mesh),
                vocab_size=VOCABULARY["adaptive"],
                uses=["training"],
            )
            model = DynamicModel(built_with_rule(parts), parts.init_params())
            reader = evaluation_segments(TOKENS[:150], batch_size=rows, segment_len=4)
            segments = model.built.place(reader.segments(0, reader.n_segments))
            state, losses = model.step(None, model.start(), segments)
            results[f"{mesh}, {rows}"] = {
                "nats": losses.nats.tolist(),
                "params": flat(state.params),
            }
    return results


KINDS = {
    "mixed": mixed,
    "data": lambda: {"runs": runs("adaptive, data", scored=False)},
    "programs": programs,
    "dynamic": dynamic_scores,
    "rest": rest,
    "exact": lambda: {"runs": runs()},
    "host time": host_time,
    "warm start": warm_start,
}

if __name__ == "__main__":
    print(json.dumps(KINDS[sys.argv[1]]()))
