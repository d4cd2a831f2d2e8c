"""Exported models: functions serialized by `jax.export` (StableHLO), to use without txl_jax.

    score(weights, memory, tokens, targets, reset) -> (nats, memory)
    generate(weights, memory, token, key, temperature, reset) -> (token, logprobs, memory)

Weights and memory are dictionaries, {"layers.0.output": array}. A memory starts as zeros with
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
_MANIFEST = "manifest.json"
_DIGEST = "manifest.sha256"
_WEIGHTS = "weights.safetensors"
_TOKENS = "tokens.json"
_FORMAT_VERSION = 1


class Function(NamedTuple):
    """A function of weights, memory and its arguments in order.

    It returns its results in order, and the memory.
    """

    call: Callable[..., Any]
    arguments: Arrays  # Shapes and dtypes by name, in order.
    results: tuple[str, ...]  # Names of the results, without the memory.


class Functions(NamedTuple):
    """A model's functions, its weights, and the shapes and dtypes of its memory."""

    weights: Arrays  # Arrays by name. Leaves that are equal are one array.
    memory: Arrays  # Shapes and dtypes by name.
    functions: dict[str, Function]


class ExportedModel(NamedTuple):
    """The files of an exported model."""

    manifest: dict[str, Any]
    weights: dict[str, np.ndarray]
    functions: dict[str, export.Exported]


class _NamedTree(NamedTuple):
    """The names of a tree's leaves. Leaves that share an array share a name."""

    names: list[str]  # In the order of the leaves.
    structure: Any

    def nest(self, arrays: Arrays) -> Any:
        """Returns the tree of arrays by name."""
        return jax.tree.unflatten(self.structure, [arrays[name] for name in self.names])

    def flatten(self, tree: Any) -> Arrays:
        """Returns a tree's leaves by name."""
        return dict(zip(self.names, jax.tree.leaves(tree), strict=True))


def functions_of(
    model: AnyModel, eval_config: EvalConfig, weights: Any, *, generates: bool
) -> Functions:
    """Creates a model's functions on one device.

    Args:
      model: The model.
      eval_config: Lengths and batch size of the functions.
      weights: Prepared parameters on the host (`Scorer.prepare_params`).
      generates: Whether to include a generation step in addition to scoring.
    """
    scorer = make_scorer(model, eval_config)
    distinct_weights, weight_names = _named_once(weights)
    weight_tree = _NamedTree(weight_names, jax.tree.structure(weights))
    memory = jax.eval_shape(scorer.init_memory, weights)
    memory_tree = _NamedTree(_names(memory), jax.tree.structure(memory))

    def score(
        weights: Arrays, memory: Arrays, tokens: Any, targets: Any, reset: Any
    ) -> tuple[jax.Array, Arrays]:
        prepared = weight_tree.nest(weights)
        before = scorer.reset(prepared, memory_tree.nest(memory), reset)
        hidden, after = scorer.forward(prepared, before, tokens)
        return scorer.nll(prepared, hidden, targets), memory_tree.flatten(after)

    def generate(
        weights: Arrays, memory: Arrays, token: Any, key: Any, temperature: Any, reset: Any
    ) -> tuple[jax.Array, jax.Array, Arrays]:
        prepared = weight_tree.nest(weights)
        before = scorer.reset(prepared, memory_tree.nest(memory), reset)
        prepared = prepared.for_generation(mem_len=eval_config.mem_len)
        hidden, after = forward.forward(prepared, token[:, None], before)
        log_p = adaptive_softmax.log_probabilities(hidden[:, 0], prepared.clusters, None)
        return _sample(log_p, key, temperature), log_p, memory_tree.flatten(after)

    rows = eval_config.batch_size
    ids = ShapeDtypeStruct((rows, eval_config.segment_len), jnp.int32)
    reset = ShapeDtypeStruct((rows,), jnp.bool)
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
    return Functions(distinct_weights, memory_tree.flatten(memory), functions)


def _sample(log_p: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
    """Samples a token per row, int32 [B].

    At temperature 0 this is the most likely token, with the lowest id if there are ties.

    Args:
      log_p: Log-probabilities [B, V].
      key: Keys of jax's threefry generator, uint32 [B, 2].
      temperature: Temperatures [B].
    """
    # The generator is named, because another may be jax's default where the function runs.
    keys = jax.random.wrap_key_data(key, impl="threefry2x32")
    is_greedy = temperature <= 0
    divisor = jnp.where(is_greedy, 1, temperature)[:, None].astype(log_p.dtype)
    sampled = jax.vmap(jax.random.categorical)(keys, log_p / divisor)
    return jnp.where(is_greedy, jnp.argmax(log_p, axis=-1), sampled).astype(jnp.int32)


def _named_once(weights: Any) -> tuple[Arrays, list[str]]:
    """Returns the distinct leaves by name, and each leaf's name.

    For example, a tied softmax has the embedding's table.
    """
    name_of_content: dict[Any, str] = {}
    distinct: Arrays = {}
    names: list[str] = []
    for name, leaf in zip(_names(weights), jax.tree.leaves(weights), strict=True):
        array = np.ascontiguousarray(leaf)
        content = (array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).digest())
        first_name = name_of_content.setdefault(content, name)
        names.append(first_name)
        distinct.setdefault(first_name, array)
    return distinct, names


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

    Args:
      folder: An existing directory.
      model: The functions and the weights.
      vocabulary: The model's tokens.
      metadata: Entries of the manifest that describe the model.
    """
    safetensors.write(folder / _WEIGHTS, from_tree(model.weights))
    tokens = [vocabulary.decode([number]).hex() for number in range(vocabulary.size)]
    storage.write_json(folder / _TOKENS, tokens)

    functions = {}
    for name, function in model.functions.items():
        lower = export.export(jax.jit(function.call), platforms=PLATFORMS)
        exported = lower(model.weights, model.memory, *function.arguments.values())
        file = f"{name}.jax_export"
        (folder / file).write_bytes(exported.serialize())
        functions[name] = {
            "file": file,
            "calling_convention_version": exported.calling_convention_version,
            "arguments": _described(function.arguments),
            "results": [*function.results, "memory"],
        }

    manifest = {
        "txl_jax_export": _FORMAT_VERSION,
        **metadata,
        "platforms": PLATFORMS,
        "vocabulary": {
            "file": _TOKENS,
            "kind": vocabulary.kind,
            "size": vocabulary.size,
            "start": list(map(int, vocabulary.start)),
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
    """Returns whether a directory contains an exported model's files, judging by their names."""
    return all(storage.exists(os.path.join(path, name)) for name in (_MANIFEST, _DIGEST))


def read(folder: Path) -> ExportedModel:
    """Reads an exported model.

    All files that are read are in the directory's own list and have a sha256 in the manifest.

    Raises:
      CheckpointError: If a file was changed, or does not match the manifest.
    """
    damaged = (
        f"{folder / _MANIFEST} or a file that it lists was changed (%s). Export the model again."
    )
    # For a corrupted function jax.export raises nearly any exception.
    with rephrased(damaged, Exception, to=CheckpointError):
        # The manifest has the sha256 of all other files, so that its own comes first.
        if storage.read(folder / _DIGEST) != _digest_line(storage.read(folder / _MANIFEST)):
            raise ValueError(f"its sha256 is not the one in {_DIGEST}")
        manifest = storage.read_json(folder / _MANIFEST)

        # A file that was changed, added or removed. A function runs whatever its file says.
        others = set(storage.names(folder)) - {_MANIFEST, _DIGEST}
        sums = {name: storage.sha256(folder / name) for name in others}
        changed = sums.items() ^ manifest["sha256"].items()
        if changed:
            raise ValueError(f"sha256 of {min(changed)[0]}")
        # A path such as ../other leads out of the directory, to a file without a sha256.
        files = {name: function["file"] for name, function in manifest["functions"].items()}
        foreign = {*files.values(), _WEIGHTS} - others
        if foreign:
            raise ValueError(f"{foreign} is not listed in it")

        functions: dict[str, export.Exported] = {}
        for name, file in files.items():
            functions[name] = export.deserialize(bytearray((folder / file).read_bytes()))
        leaves = safetensors.read(folder / _WEIGHTS)
        weights = {name: leaf.read() for name, leaf in leaves.items()}
    return ExportedModel(manifest, weights, functions)


def _digest_line(content: bytes) -> bytes:
    """Returns the content of manifest.sha256, as the program sha256sum writes it."""
    return f"{hashlib.sha256(content).hexdigest()}  {_MANIFEST}\n".encode()


def _described(arrays: Arrays) -> dict[str, dict[str, Any]]:
    """Returns the manifest's entries about arrays, or about shapes and dtypes."""
    return {
        name: {"shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in arrays.items()
    }
