"""Trains and scores on meshes of eight made-up CPU devices; run as a program by test_sharding, prints JSON.

B = 8, D = 16, H = 2, E = 5, F = 12, L = 7, M = 9, N = 3, V = 14.
"""

import dataclasses
import json
import math
import re
from typing import Any

import jax
import numpy as np

from txl_jax import axes, config_tree, sharding
from txl_jax.assemble import Parts, assemble
from txl_jax.config import (
    DType,
    EvalConfig,
    ExperimentConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from txl_jax.data.segments import evaluation_segments, training_segments
from txl_jax.evaluation.streaming import evaluate
from txl_jax.metrics import Totals
from txl_jax.ops import adaptive

MESHES = {
    "one": MeshConfig(data=1),
    "data": MeshConfig(),
    "mixed": MeshConfig(data=2, fsdp=2, model=2),
    "fsdp": MeshConfig(fsdp=8),
}
B, L, V, CALLS, PER_CALL = 8, 7, 14, 3, 2
TOKENS = np.random.default_rng(0).integers(V, size=B * L * 4 + 1)  # An epoch of four segments.


def config(mesh: MeshConfig, **changes: Any) -> ExperimentConfig:
    """The run on a mesh, with settings changed: `model__d_model` for model.d_model, and so on."""
    steps = CALLS * PER_CALL
    base = ExperimentConfig(
        model=ModelConfig(
            n_layer=3, d_model=16, n_head=2, d_head=5, d_inner=12, dropout=0.2, init_std=0.3, dtype=DType.FLOAT64
        ),
        optimizer=OptimizerConfig(learning_rate=0.01),
        mesh=mesh,
        train=TrainConfig(
            steps=steps,
            batch_size=B,
            segment_len=L,
            mem_len=9,
            segments_per_call=PER_CALL,
            log_every=steps,
            eval_every=steps,
            checkpoint_every=steps,
        ),
        eval=EvalConfig(batch_size=1, segment_len=4, mem_len=11, clamp_len=0, segments_per_call=5),
    )
    return config_tree.replace(base, {name.replace("__", "."): value for name, value in changes.items()})


def run(parts: Parts) -> dict:
    """Losses of each update, scores of one row and of eight, and where the parameters lie."""
    train_step, compilation = parts.compile_train_step()
    state, losses, norms = parts.init_state(), [], []
    reader = training_segments(TOKENS, batch_size=B, segment_len=L)
    for call in range(CALLS):
        state, metrics = train_step(state, parts.place(reader.segments(call * PER_CALL, PER_CALL)))
        losses += metrics.nats.tolist()
        norms += metrics.grad_norm.tolist()
    totals, keys_per_device = score(parts, state.params)
    many_rows = dataclasses.replace(parts.config, eval=dataclasses.replace(parts.config.eval, batch_size=B))
    of_rows, keys_of_rows = score(dataclasses.replace(parts, config=many_rows), state.params)
    return {
        "losses": losses,
        "grad_norms": norms,
        "score": totals.nats,
        "scored": totals.tokens,
        "score_of_rows": of_rows.nats,
        "mesh": dict(parts.mesh.shape),
        "row_groups": parts.model.row_groups,
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)),
        "bytes_per_device": sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.params)),
        "moment_bytes_per_device": sum(
            leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim
        ),
        "query_per_device": state.params["stack"]["layers"]["attention"]["query"].addressable_shards[0].data.shape,
        "keys_per_device": {"one row": keys_per_device, "eight rows": keys_of_rows},
        "memory_per_device": state.memory.hidden.addressable_shards[0].data.shape,
        "temporary_bytes": compilation.temporary_bytes,
    }


def score(parts: Parts, params: Any) -> tuple[Totals, tuple[int, ...]]:
    """The totals of a short text, and the shape of a layer's stored keys on a device."""
    span, weights = parts.config.eval, parts.freeze(params)
    memory = parts.eval_memory(weights)
    keys_per_device = memory.keys[0].addressable_shards[0].data.shape  # Before the memory is donated.
    totals = evaluate(
        parts.eval_step,
        weights,
        memory,
        evaluation_segments(TOKENS[:50], batch_size=span.batch_size, segment_len=span.segment_len),
        segments_per_call=span.segments_per_call,
        place=parts.place,
    )
    return totals, keys_per_device


def uneven_vocabulary() -> dict:
    """Where the parameters lie that a vocabulary of 13 and a mesh axis of 2 give."""
    params = assemble(config(MESHES["mixed"]), vocab_size=13).init_state().params
    table, query = params["embedding"]["table_0"], params["stack"]["layers"]["attention"]["query"]
    return {
        "table_per_device": table.addressable_shards[0].data.shape,
        "table_spec": list(table.sharding.spec),
        "query_spec": list(query.sharding.spec),
    }


def tail_work() -> dict:
    """Of how many positions a device computes a tail's logits at a time, where 16 of its own are due, and what it fetches."""
    rows, mesh = 15_000, sharding.make_mesh(MESHES["data"])
    clusters = [
        adaptive.Cluster(jax.ShapeDtypeStruct((n, 6), "float32"), jax.ShapeDtypeStruct((n,), "float32"), None)
        for n in (10, rows)
    ]
    tails = adaptive.TailEntries(jax.ShapeDtypeStruct((1, 6), "float32"), jax.ShapeDtypeStruct((1,), "float32"))
    by_row, whole = sharding.named(mesh, axes.BATCH), sharding.named(mesh)

    def loss(clusters: Any, tails: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        nll = adaptive.negative_log_likelihood(hidden, targets, clusters, tails, (10,), groups=8, capacity=16)
        return nll.sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 2)), in_shardings=(whole, whole, by_row, by_row))
    shape = (16, 32)
    compiled = gradient.lower(
        clusters, tails, jax.ShapeDtypeStruct((*shape, 6), "float32"), jax.ShapeDtypeStruct(shape, "int32")
    ).compile()
    text = compiled.as_text()
    products = re.findall(r"= f32\[([0-9,]+)\]\S* dot\(", text)
    return {
        "positions": max(math.prod(map(int, shape.split(","))) // rows for shape in products),
        "all_gathers": text.count(" all-gather("),
    }


def refusal(mesh: MeshConfig, **changes: Any) -> str:
    """What is said of settings that do not fit."""
    try:
        assemble(config(mesh, **changes), vocab_size=V).check_training_rows()
    except ValueError as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    found = {name: run(assemble(config(mesh), vocab_size=V)) for name, mesh in MESHES.items()}
    for name in ("one", "mixed"):
        clusters = config(MESHES[name], model__cutoffs=(4, 10), model__div_val=2)
        found[f"adaptive, {name}"] = run(assemble(clusters, vocab_size=V))
    found["uneven"] = uneven_vocabulary()
    found["tail"] = tail_work()
    found["refusals"] = {
        "batch": refusal(MESHES["mixed"], train__batch_size=6),
        "remainder": refusal(MeshConfig(fsdp=3)),
        "too many": refusal(MeshConfig(data=3, fsdp=2, model=2)),
        "heads": refusal(MeshConfig(model=4)),
        "inner": refusal(MeshConfig(model=8), model__n_head=8),
        "width": refusal(MeshConfig(fsdp=4), model__d_model=18),
    }
    print(json.dumps(found))
