"""The folder of an exported model: functions as `jax.export` serializes them (StableHLO), to be run without txl_jax.

manifest.json         sizes, arguments and results, weights, tokens, versions, and the sha256 of the other files
manifest.sha256       the sha256 of manifest.json, as `sha256sum` writes it
score.jax_export      scoring of segments
generate.jax_export   a generation step, of models that generate
weights.safetensors   the arrays that both take, by name
tokens.json           the bytes of each token, in hexadecimal, by id
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export

from txl_jax.data.vocabulary import Vocabulary, digest
from txl_jax.errors import CheckpointError, MissingPackageError, UserError
from txl_jax.inference.flat_functions import Arrays, FlatModel
from txl_jax.interop import safetensors
from txl_jax.interop.leaves import leaf_of
from txl_jax.interop.safetensors import SafeTensors
from txl_jax.runtime import storage

MANIFEST, MANIFEST_DIGEST, WEIGHTS, TOKENS = "manifest.json", "manifest.sha256", "weights.safetensors", "tokens.json"
# Of one file for all: the functions hold no kernels, and XLA compiles them where they run.
PLATFORMS = ("cpu", "tpu", "cuda")
_KIND, _KIND_VERSION = "txl_jax_export", 1


class ExportedModel(NamedTuple):
    """An exported model that was read."""

    manifest: dict[str, Any]
    weights: dict[str, np.ndarray]
    functions: dict[str, export.Exported]


def check_flatbuffers() -> None:
    """Raises `MissingPackageError` unless functions can be serialized."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise MissingPackageError("jax.export serializes with the package flatbuffers; pip install '.[export]'")


def file_of(function: str) -> str:
    """Returns the name of a function's file."""
    return f"{function}.jax_export"


def write(folder: Path, model: FlatModel, vocabulary: Vocabulary, facts: Mapping[str, Any]) -> None:
    """Lowers the functions for all platforms and writes the files into a folder that exists; the manifest last.

    Args:
      folder: of this machine.
      model: the functions, and weights on the host.
      vocabulary: of the model.
      facts: what the manifest has besides.

    Raises:
      OSError, LogError: the files cannot be written.
    """
    safetensors.write(folder / WEIGHTS, {name: leaf_of(array) for name, array in model.weights.items()})
    storage.write_json(folder / TOKENS, [vocabulary.decode([i]).hex() for i in range(vocabulary.size)])
    functions = {}
    for name, function in model.functions.items():
        weights, memory = ({n: _shape(a) for n, a in arrays.items()} for arrays in (model.weights, model.memory))
        exported = export.export(jax.jit(function.call), platforms=PLATFORMS)(
            weights, memory, *function.arguments.values()
        )
        (folder / file_of(name)).write_bytes(exported.serialize())
        functions[name] = {
            "file": file_of(name),
            "calling_convention_version": exported.calling_convention_version,
            "arguments": _described(function.arguments),
            "results": [*function.results, "memory"],
        }
    manifest = {
        _KIND: _KIND_VERSION,
        **facts,
        "platforms": PLATFORMS,
        "vocabulary": {
            "file": TOKENS,
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
    storage.write_json(folder / MANIFEST, manifest)
    storage.write(folder / MANIFEST_DIGEST, _digest_line((folder / MANIFEST).read_bytes()).encode())


def is_exported(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is the folder of an exported model, by the names of its files."""
    return all(storage.exists(os.path.join(path, name)) for name in (MANIFEST, MANIFEST_DIGEST))


def read(folder: Path) -> ExportedModel:
    """Reads an exported model whose files are all as they were written.

    Raises:
      UserError: this is no exported model, or one of another version.
      CheckpointError: a file was changed, is missing, or is one too many.
    """
    try:
        content, line = (folder / MANIFEST).read_bytes(), (folder / MANIFEST_DIGEST).read_bytes()
    except OSError as error:
        raise UserError(f"{folder} is no exported model ({error.strerror}: {error.filename})") from error
    if line != _digest_line(content).encode():
        raise CheckpointError(f"{folder / MANIFEST} is not the file that {MANIFEST_DIGEST} names; export it again")
    manifest = json.loads(content)
    if manifest.get(_KIND) != _KIND_VERSION:
        raise UserError(
            f"{folder / MANIFEST} has version {manifest.get(_KIND)!r}, not {_KIND_VERSION}; export it again"
        )
    found = {
        name: storage.sha256(folder / name) for name in os.listdir(folder) if name not in (MANIFEST, MANIFEST_DIGEST)
    }
    expected = manifest["sha256"]
    if changed := sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)):
        raise CheckpointError(f"{folder / changed[0]} is not as {MANIFEST} has it (sha256); export the model again")
    functions = {name: entry["file"] for name, entry in manifest["functions"].items()}
    return ExportedModel(
        manifest,
        dict(SafeTensors(folder / WEIGHTS)),
        {name: export.deserialize(bytearray((folder / file).read_bytes())) for name, file in functions.items()},
    )


def _digest_line(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n"


def _described(arrays: Arrays) -> dict[str, dict[str, Any]]:
    """Returns shapes and types of arrays for the manifest."""
    return {name: {"shape": list(array.shape), "dtype": str(array.dtype)} for name, array in arrays.items()}


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
