"""Scores and continues token ids with an exported model.

It needs only jax, numpy, safetensors and flatbuffers.

python run_exported.py DIRECTORY 84 104 101
"""

import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax import export
from safetensors.numpy import load_file


def load(folder):
    """Returns the manifest, the weights, an empty memory, and the functions.

    Raises ValueError if a file was changed.
    """
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()
    }
    del digests["manifest.sha256"]
    line = f"{digests.pop('manifest.json')}  manifest.json\n"
    unchanged = (folder / "manifest.sha256").read_bytes() == line.encode()
    manifest = json.loads((folder / "manifest.json").read_bytes()) if unchanged else {}
    if (
        digests != manifest.get("sha256")
        or not {of["file"] for of in manifest["functions"].values()} <= digests.keys()
    ):
        raise ValueError(f"a file of {folder} has changed since the export")
    functions = {}
    for name, function in manifest["functions"].items():
        exported = export.deserialize(bytearray((folder / function["file"]).read_bytes()))
        functions[name] = jax.jit(exported.call, donate_argnums=1)
    memory = {name: np.zeros(of["shape"], of["dtype"]) for name, of in manifest["memory"].items()}
    return manifest, jax.device_put(load_file(folder / "weights.safetensors")), memory, functions


def score(model, ids):
    """Returns the loss in nats of each of the ids [T] except the first: floats [T - 1].

    The ids are read in segments, in the first row of the batch.
    """
    manifest, weights, memory, functions = model
    rows, length = manifest["rows"], manifest["segment_len"]
    found, reset = [], np.ones(rows, bool)  # The first call empties the memory.
    for start in range(0, len(ids) - 1, length):
        # Inputs and targets. Positions after the end of the text stay 0.
        both = np.zeros((2, rows, length), np.int32)
        for each, part in zip(both, (ids[start:-1], ids[start + 1 :]), strict=True):
            each[0, : len(part[:length])] = part[:length]
        nats, memory = functions["score"](weights, memory, *both, reset)
        found.append(np.asarray(nats[0]))
        reset = np.zeros(rows, bool)
    return np.concatenate(found)[: len(ids) - 1]


def generate(model, ids, count, temperature=0.0, seed=0):
    """Returns `count` ids that continue the prompt `ids`.

    The prompt is read token by token, in the first row of the batch.
    """
    manifest, weights, memory, functions = model
    rows, written = manifest["rows"], list(ids)
    for i in range(len(ids) + count - 1):
        token, reset = np.full(rows, written[i], np.int32), np.full(rows, i == 0)
        keys = jax.random.split(
            jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), i), rows
        )
        drawn, _, memory = functions["generate"](
            weights,
            memory,
            token,
            jax.random.key_data(keys),
            np.full(rows, temperature, np.float32),
            reset,
        )
        if i >= len(ids) - 1:
            written.append(int(drawn[0]))
    return written[len(ids) :]


if __name__ == "__main__":
    if len(sys.argv) < 4 or not all(word.isdigit() for word in sys.argv[2:]):
        sys.exit("the arguments must be a directory and two or more ids")
    if not (Path(sys.argv[1]) / "manifest.sha256").is_file():
        sys.exit(
            f"{sys.argv[1]} does not contain an exported model (manifest.sha256 is missing). "
            "Pass the directory that experiments.export wrote"
        )
    model, ids = load(Path(sys.argv[1])), [int(word) for word in sys.argv[2:]]
    pieces = json.loads((Path(sys.argv[1]) / model[0]["vocabulary"]["file"]).read_bytes())
    if max(ids) >= len(pieces):
        sys.exit(f"ids must be from 0 to {len(pieces) - 1}, got {max(ids)}")
    print("nats", score(model, ids).tolist())
    if "generate" in model[3]:
        text = b"".join(bytes.fromhex(pieces[i]) for i in generate(model, ids, 50))
        print("text", text.decode(errors="replace"))
