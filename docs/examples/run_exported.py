"""Scores and continues token ids with an exported model.

    python run_exported.py DIRECTORY 84 104 101

It needs only jax, numpy, safetensors and flatbuffers. Copy it, and start from there.

An exported function reads a batch of B rows, of which this program uses the first. L is the length
of a segment, and T the number of tokens in a text.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from safetensors.numpy import load_file

COUNT = 50  # Tokens that continue the prompt.


class Model(NamedTuple):
    """An exported model, as it was read from its directory."""

    manifest: dict[str, Any]  # Sizes, shapes, dtypes, and the names of the files.
    weights: dict[str, jax.Array]
    memory: dict[str, np.ndarray]  # Zeros, to pass to the first call.
    functions: dict[str, Callable[..., Any]]  # "score" and, for most models, "generate".


def read_manifest(folder):
    """Reads manifest.json and checks that no file has changed since the export.

    manifest.sha256 has the digest of manifest.json, which has the digests of all other files.

    Args:
      folder: Path of the directory.

    Returns:
      The manifest, a dict.

    Raises:
      ValueError: If a file was changed, added or removed.
    """
    digests = {}
    for path in folder.iterdir():
        digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    del digests["manifest.sha256"]

    # The line is in the format of sha256sum.
    line = f"{digests.pop('manifest.json')}  manifest.json\n"
    if (folder / "manifest.sha256").read_bytes() != line.encode():
        raise ValueError(f"manifest.json of {folder} has changed since the export")

    manifest = json.loads((folder / "manifest.json").read_bytes())
    if digests != manifest.get("sha256"):
        raise ValueError(f"a file of {folder} has changed since the export")

    # A function is code, so it must be in one of the files that were checked.
    for function in manifest["functions"].values():
        if function["file"] not in digests:
            raise ValueError(f"a function of {folder} has changed since the export")
    return manifest


def load(folder):
    """Loads an exported model.

    Args:
      folder: Path of the directory that `experiments.export` wrote.

    Returns:
      A `Model`.

    Raises:
      ValueError: If a file was changed, added or removed since the export.
    """
    manifest = read_manifest(folder)

    functions = {}
    for name, function in manifest["functions"].items():
        serialized = bytearray((folder / function["file"]).read_bytes())
        exported = export.deserialize(serialized)
        # The next memory takes the place of the memory that is passed, argument 1.
        functions[name] = jax.jit(exported.call, donate_argnums=1)

    memory = {}
    for name, array in manifest["memory"].items():
        memory[name] = np.zeros(array["shape"], array["dtype"])

    weights = jax.device_put(load_file(folder / "weights.safetensors"))
    return Model(manifest, weights, memory, functions)


def score(model, ids):
    """Computes the loss of each token of a text, given the tokens before it.

    Args:
      model: A `Model`.
      ids: Ids of the tokens [T], two or more.

    Returns:
      Losses in nats of all tokens except the first: floats [T - 1].
    """
    n_row = model.manifest["rows"]
    segment_len = model.manifest["segment_len"]
    n_target = len(ids) - 1

    losses = []
    memory = model.memory
    reset = np.ones(n_row, bool)  # The first call empties the memory.
    for start in range(0, n_target, segment_len):
        # The target of a token is the token that follows it. In the last segment, the positions
        # after the end of the text stay 0.
        end = min(start + segment_len, n_target)
        tokens = np.zeros((n_row, segment_len), np.int32)  # [B, L]
        tokens[0, : end - start] = ids[start:end]
        targets = np.zeros((n_row, segment_len), np.int32)  # [B, L]
        targets[0, : end - start] = ids[start + 1 : end + 1]

        nats, memory = model.functions["score"](model.weights, memory, tokens, targets, reset)
        losses.append(np.asarray(nats[0])[: end - start])
        reset = np.zeros(n_row, bool)
    return np.concatenate(losses)


def generate(model, ids, count, temperature=0.0, seed=0):
    """Continues a prompt. Both are read token by token.

    Args:
      model: A `Model` with the function "generate".
      ids: Ids of the prompt's tokens [T].
      count: How many tokens to generate.
      temperature: Temperature of sampling, or 0 for the most likely token.
      seed: Seed of the random numbers.

    Returns:
      Ids of the new tokens, a list of `count`.
    """
    n_row = model.manifest["rows"]
    temperatures = np.full(n_row, temperature, np.float32)
    # The exported function takes threefry2x32 keys, whatever the default is.
    seed_key = jax.random.key(seed, impl="threefry2x32")

    written = list(ids)
    memory = model.memory
    for i in range(len(ids) + count - 1):
        token = np.full(n_row, written[i], np.int32)
        keys = jax.random.split(jax.random.fold_in(seed_key, i), n_row)
        reset = np.full(n_row, i == 0)  # The first call empties the memory.
        sampled, _, memory = model.functions["generate"](
            model.weights, memory, token, jax.random.key_data(keys), temperatures, reset
        )
        # Inside the prompt the next token is known, and the sample is ignored.
        if i >= len(ids) - 1:
            written.append(int(sampled[0]))
    return written[len(ids) :]


def main(arguments):
    """Prints the loss of each id, and a text that continues them.

    Args:
      arguments: The words of the command line: the directory, then the ids.
    """
    if len(arguments) < 3 or not all(word.isdigit() for word in arguments[1:]):
        sys.exit("the arguments must be a directory and two or more ids")
    folder = Path(arguments[0])
    ids = [int(word) for word in arguments[1:]]
    if not (folder / "manifest.sha256").is_file():
        sys.exit(
            f"{folder} does not contain an exported model (manifest.sha256 is missing). "
            "Pass the directory that experiments.export wrote"
        )

    model = load(folder)
    vocabulary = folder / model.manifest["vocabulary"]["file"]
    pieces = json.loads(vocabulary.read_bytes())  # The bytes of each token, in hexadecimal.
    if max(ids) >= len(pieces):
        sys.exit(f"ids must be from 0 to {len(pieces) - 1}, got {max(ids)}")

    print("nats", score(model, ids).tolist())
    if "generate" in model.functions:
        generated = generate(model, ids, COUNT)
        text = b"".join(bytes.fromhex(pieces[token]) for token in generated)
        print("text", text.decode(errors="replace"))


if __name__ == "__main__":
    main(sys.argv[1:])
