"""Exported models: functions serialized by `jax.export` (StableHLO), for programs without txl_jax.

    score(weights, memory, tokens, targets, reset) -> (nats, memory)
    generate(weights, memory, token, key, temperature, reset) -> (token, logprobs, memory)

Weights and memory are dictionaries, {"layers.0.output": array}. A memory begins as zeros with
`reset` set in every row. docs/export.md describes the files.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct, export

from txl_jax.config import EvalConfig
from txl_jax.data.vocabulary import Vocabulary, digest
from txl_jax.errors import CheckpointError, rephrased
from txl_jax.inference import forward
from txl_jax.inference.scorer import make_scorer
from txl_jax.interop import safetensors
from txl_jax.interop.leaves import from_tree
from txl_jax.modules import AnyModel
from txl_jax.ops import adaptive_softmax
from txl_jax.runtime import storage

Arrays = dict[str, Any]  # Arrays by name, or their shapes and dtypes.
# One file serves all of them: the functions have no kernels, and XLA compiles them where they run.
PLATFORMS = ("cpu", "tpu", "cuda")
_MANIFEST, _DIGEST, _WEIGHTS, _TOKENS = (
    "manifest.json",
    "manifest.sha256",
    "weights.safetensors",
    "tokens.json",
)


class Function(NamedTuple):
    """A function of weights, memory and its arguments in order.

    It returns its results in order, and the memory.
    """

    call: Callable[..., Any]
    arguments: Arrays  # Shapes and dtypes.
    results: tuple[str, ...]


class Functions(NamedTuple):
    """A model's functions, its weights, and the shapes and dtypes of its memory."""

    weights: Arrays
    memory: Arrays
    functions: dict[str, Function]


def functions_of(
    model: AnyModel, eval_config: EvalConfig, weights: Any, *, generates: bool
) -> Functions:
    """Makes a model's functions on one device: scoring, and a generation step if `generates`.

    `weights` are prepared parameters on the host (`Scorer.prepare_params`).
    """
    scorer = make_scorer(model, eval_config)
    named, weight_names = _named_once(weights)
    memory = jax.eval_shape(scorer.init_memory, weights)
    names = _names(memory)

    def nest(named_weights: Arrays, named_memory: Arrays, reset: jax.Array) -> tuple[Any, Any]:
        nested = jax.tree.unflatten(
            jax.tree.structure(weights), [named_weights[name] for name in weight_names]
        )
        before = jax.tree.unflatten(
            jax.tree.structure(memory), [named_memory[name] for name in names]
        )
        return nested, scorer.reset(nested, before, reset)

    def flatten(after: Any) -> Arrays:
        return dict(zip(names, jax.tree.leaves(after), strict=True))

    def score(
        weights: Arrays, memory: Arrays, tokens: Any, targets: Any, reset: Any
    ) -> tuple[jax.Array, Arrays]:
        nested, before = nest(weights, memory, reset)
        hidden, after = scorer.forward(nested, before, tokens)
        return scorer.nll(nested, hidden, targets), flatten(after)

    def generate(
        weights: Arrays, memory: Arrays, token: Any, key: Any, temperature: Any, reset: Any
    ) -> tuple[jax.Array, jax.Array, Arrays]:
        nested, before = nest(weights, memory, reset)
        nested = nested.for_generation(mem_len=eval_config.mem_len)
        hidden, after = forward.forward(nested, token[:, None], before)
        log_p = adaptive_softmax.log_probabilities(hidden[:, 0], nested.clusters, None)
        return _sample(log_p, key, temperature), log_p, flatten(after)

    rows = eval_config.batch_size
    ids, reset = (
        ShapeDtypeStruct((rows, eval_config.segment_len), jnp.int32),
        ShapeDtypeStruct((rows,), jnp.bool),
    )
    functions = {
        "score": Function(score, {"tokens": ids, "targets": ids, "reset": reset}, ("nats",))
    }
    if generates:
        arguments = {
            "token": ShapeDtypeStruct((rows,), jnp.int32),
            "key": ShapeDtypeStruct((rows, 2), jnp.uint32),
            "temperature": ShapeDtypeStruct((rows,), jnp.float32),
            "reset": reset,
        }
        functions["generate"] = Function(generate, arguments, ("token", "logprobs"))
    return Functions(named, flatten(memory), functions)


def _sample(log_p: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
    """Samples a token per row of [B, V] at temperatures [B].

    At 0 it is the most likely, the lowest id among equals.
    """
    # Whatever jax's default is where the function runs.
    keys = jax.random.wrap_key_data(key, impl="threefry2x32")
    greedy = temperature <= 0
    warm = jnp.where(greedy, 1, temperature)[:, None].astype(log_p.dtype)
    sampled = jax.vmap(jax.random.categorical)(keys, log_p / warm)
    return jnp.where(greedy, jnp.argmax(log_p, axis=-1), sampled).astype(jnp.int32)


def _named_once(weights: Any) -> tuple[Arrays, list[str]]:
    """Returns the distinct leaves by name, and each leaf's name.

    For example, a tied softmax has the embedding's table.
    """
    first: dict[Any, str] = {}
    named: Arrays = {}
    names = []
    for name, leaf in zip(_names(weights), jax.tree.leaves(weights), strict=True):
        array = np.ascontiguousarray(leaf)
        content = array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).digest()
        names.append(first.setdefault(content, name))
        named.setdefault(names[-1], array)
    return named, names


def _names(tree: Any) -> list[str]:
    """Returns the names of a tree's leaves, such as "layers.0.output"."""
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree.leaves_with_path(tree)
    ]


def write(
    folder: Path, model: Functions, vocabulary: Vocabulary, metadata: Mapping[str, Any]
) -> None:
    """Lowers the functions for all platforms and writes the files into a local directory.

    The manifest is written last.
    """
    safetensors.write(folder / _WEIGHTS, from_tree(model.weights))
    storage.write_json(
        folder / _TOKENS, [vocabulary.decode([i]).hex() for i in range(vocabulary.size)]
    )
    functions = {}
    for name, function in model.functions.items():
        lower = export.export(jax.jit(function.call), platforms=PLATFORMS)
        exported = lower(model.weights, model.memory, *function.arguments.values())
        (folder / f"{name}.jax_export").write_bytes(exported.serialize())
        functions[name] = {
            "file": f"{name}.jax_export",
            "calling_convention_version": exported.calling_convention_version,
            "arguments": _described(function.arguments),
            "results": [*function.results, "memory"],
        }
    manifest = {
        "txl_jax_export": 1,  # The format's version.
        **metadata,
        "platforms": PLATFORMS,
        "vocabulary": {
            "file": _TOKENS,
            "kind": vocabulary.kind,
            "size": vocabulary.size,
            "start": [int(i) for i in vocabulary.start],
            "sha256": digest(vocabulary),
        },
        "functions": functions,
        "memory": _described(model.memory),
        "weights": _described(model.weights),
        "sha256": {path.name: storage.sha256(path) for path in sorted(folder.iterdir())},
    }
    storage.write_json(folder / _MANIFEST, manifest)
    storage.write(folder / _DIGEST, _digest_line((folder / _MANIFEST).read_bytes()))


def is_exported(path: str | os.PathLike[str]) -> bool:
    """Returns whether a directory has an exported model's files, by their names."""
    return all(storage.exists(os.path.join(path, name)) for name in (_MANIFEST, _DIGEST))


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, export.Exported]]:
    """Returns an exported model's manifest, weights and functions.

    All files that are read are in the directory's own list and have a sha256 in the manifest.
    Raises `CheckpointError` if a file was changed, or does not match the manifest.
    """
    damaged = (
        f"{folder / _MANIFEST} or a file that it lists was changed (%s). Export the model again."
    )
    # For a corrupted function jax.export raises nearly any.
    with rephrased(damaged, Exception, to=CheckpointError):
        if storage.read(folder / _DIGEST) != _digest_line(storage.read(folder / _MANIFEST)):
            raise ValueError(f"its sha256 is not the one in {_DIGEST}")
        manifest, others = (
            storage.read_json(folder / _MANIFEST),
            set(storage.names(folder)) - {_MANIFEST, _DIGEST},
        )
        sums = {name: storage.sha256(folder / name) for name in others}
        if changed := sums.items() ^ manifest["sha256"].items():
            raise ValueError(f"sha256 of {min(changed)[0]}")
        files = {name: function["file"] for name, function in manifest["functions"].items()}
        if foreign := {*files.values(), _WEIGHTS} - others:
            raise ValueError(f"{foreign} is not listed in it")
        functions = {
            name: export.deserialize(bytearray((folder / file).read_bytes()))
            for name, file in files.items()
        }
        weights = {name: leaf.read() for name, leaf in safetensors.read(folder / _WEIGHTS).items()}
    return manifest, weights, functions


def _digest_line(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  {_MANIFEST}\n".encode()


def _described(arrays: Arrays) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in arrays.items()
    }
