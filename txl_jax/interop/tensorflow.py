"""Checkpoints of the authors' TensorFlow release, read with TensorFlow (the extra `tensorflow`).

Each variable becomes the PyTorch release's tensor: matrices are transposed, and the clusters'
biases are joined if they share one table. A cluster as wide as the model without projections (One
Billion Word) gets identities. The optimizer's moments, averages and counters are omitted.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.errors import UserError, rephrased
from txl_jax.interop.leaves import Leaf, leaf_of

_ROOT = "transformer/"
_MARK = "adaptive_embed/"  # Every model has variables below it.
_INDEX = ".index"
_LATEST = "checkpoint"  # A text file that names the last prefix.
_FILE = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")  # What follows the prefix.
_STEP = re.compile(r"-(\d{1,18})$")
# Suffixes of the optimizer's and averages' variables.
_LEFT_OUT = re.compile(r".*/(Adam|Adam_1|ExponentialMovingAverage|adam_[mv])")
# The PyTorch release's names. "#" is the first number of a name, the layer or the cluster.
_NAMES = {
    "layer_#/rel_attn/qkv/kernel": "layers.#.dec_attn.qkv_net.weight",
    "layer_#/rel_attn/r/kernel": "layers.#.dec_attn.r_net.weight",
    "layer_#/rel_attn/o/kernel": "layers.#.dec_attn.o_net.weight",
    "layer_#/rel_attn/LayerNorm/gamma": "layers.#.dec_attn.layer_norm.weight",
    "layer_#/rel_attn/LayerNorm/beta": "layers.#.dec_attn.layer_norm.bias",
    "layer_#/ff/layer_1/kernel": "layers.#.pos_ff.CoreNet.0.weight",
    "layer_#/ff/layer_1/bias": "layers.#.pos_ff.CoreNet.0.bias",
    "layer_#/ff/layer_2/kernel": "layers.#.pos_ff.CoreNet.3.weight",
    "layer_#/ff/layer_2/bias": "layers.#.pos_ff.CoreNet.3.bias",
    "layer_#/ff/LayerNorm/gamma": "layers.#.pos_ff.layer_norm.weight",
    "layer_#/ff/LayerNorm/beta": "layers.#.pos_ff.layer_norm.bias",
    "r_w_bias": "r_w_bias",
    "r_r_bias": "r_r_bias",
    "adaptive_embed/lookup_table": "word_emb.emb_layers.0.weight",
    "adaptive_embed/proj_W": "word_emb.emb_projs.0",
    "adaptive_embed/cutoff_#/lookup_table": "word_emb.emb_layers.#.weight",
    "adaptive_embed/cutoff_#/proj_W": "word_emb.emb_projs.#",
    "adaptive_softmax/bias": "crit.out_layers.0.bias",
    "adaptive_softmax/cutoff_0/cluster_W": "crit.cluster_weight",
    "adaptive_softmax/cutoff_0/cluster_b": "crit.cluster_bias",
    "adaptive_softmax/cutoff_#/proj": "crit.out_projs.#",
    "adaptive_softmax/cutoff_#/b": "crit.out_layers.#.bias",
}
_NUMBER = re.compile(r"(layer|cutoff)_(\d+)")
# Segment, memory and clamp lengths of the published evaluations, by the corpus in corpus-info.json.
_LENGTHS = {
    "enwik8": (128, 3800, 1000),
    "text8": (128, 3800, 1000),
    "wt103": (128, 1600, 1000),
    "lm1b": (32, 128, -1),
}


def read(prefix: Path) -> tuple[dict[str, Leaf], dict[str, Any], str]:
    """Opens a checkpoint, by its path without ".index".

    Returns the PyTorch release's tensors, the arguments of its MemTransformerLM that names and
    sizes give, and a note on what is omitted. Raises `UserError` if TensorFlow is missing, a
    checkpoint is corrupted or a variable unknown.
    """
    variables = _open(prefix)
    root = _root_of(variables)
    kept = {
        name.removeprefix(root): leaf for name, leaf in variables.items() if name.startswith(root)
    }
    kept = {name: leaf for name, leaf in kept.items() if not _LEFT_OUT.fullmatch(name)}
    tensors: dict[str, Leaf] = {}
    for name, leaf in kept.items():
        number = _NUMBER.search(name)
        found = _NAMES.get(name) or _NAMES.get(_NUMBER.sub(r"\1_#", name, count=1))
        if found is None:
            raise UserError(
                f"{prefix}: variable {root}{name} is not in the TensorFlow release's Transformer-XL"
            )
        tensors[found.replace("#", number[2]) if number else found] = leaf
    sizes: list[int] = []
    while (bias := f"adaptive_softmax/cutoff_{len(sizes)}/b") in kept:
        sizes.append(math.prod(kept[bias].shape))
    if "adaptive_embed/lookup_table" in kept and len(sizes) > 1:
        # The PyTorch release has one bias if there is one table.
        biases = [tensors.pop(f"crit.out_layers.{c}.bias") for c in range(len(sizes))]
        tensors["crit.out_layers.0.bias"] = Leaf(
            (sum(sizes),),
            biases[0].dtype,
            lambda index: np.concatenate([bias.read() for bias in biases])[index],
        )
    table, second = (tensors.get(f"word_emb.emb_layers.{c}.weight") for c in range(2))
    # If only the other clusters have projections, the first is as wide as the model.
    if second and table and len(table.shape) == 2 and "word_emb.emb_projs.0" not in tensors:
        identity = leaf_of(np.eye(table.shape[1], dtype=np.float32))
        tensors = {"word_emb.emb_projs.0": identity, "crit.out_projs.0": identity} | tensors
    facts: dict[str, Any] = {"pre_lnorm": False, "cutoffs": list(itertools.accumulate(sizes[:-1]))}
    if "word_emb.emb_projs.0" in tensors:
        facts["tie_projs"] = [
            f"crit.out_projs.{c}" not in tensors for c in range(max(len(sizes), 1))
        ]
    return (
        tensors,
        facts,
        f"{len(variables) - len(kept)} variables of the optimizer and of averages were omitted",
    )


def _root_of(names: Iterable[str]) -> str:
    """Returns the prefix of the names of the model's variables.

    It is "transformer/", perhaps inside the scopes of a wrapper.
    """
    for name in names:
        outer, scope, _ = name.partition(f"{_ROOT}{_MARK}")
        if scope and (not outer or outer.endswith("/")) and not _LEFT_OUT.fullmatch(name):
            return f"{outer}{_ROOT}"
    return _ROOT


def _open(prefix: Path) -> dict[str, Leaf]:
    """Returns all variables by name, matmuls' matrices transposed."""
    missing = (
        f"{prefix} is a checkpoint of TensorFlow, which is not installed. "
        "Run pip install 'txl_jax[tensorflow]'"
    )
    with rephrased(missing, ImportError):
        import tensorflow

    damaged = f"{prefix} is a corrupted or incomplete checkpoint (%s). Download it again."
    reading = functools.partial(
        rephrased, damaged, tensorflow.errors.OpError, ValueError, RuntimeError
    )

    def leaf(name: str) -> Leaf:
        shape, dtype = tuple(shapes[name]), np.dtype(dtypes[name].as_numpy_dtype)
        transposed = name.endswith(("/kernel", "/proj", "/proj_W"))

        def part(index: Any) -> np.ndarray:
            with reading():
                array = np.asarray(reader.get_tensor(name))
            return (array.T if transposed else array)[index]

        return Leaf(shape[::-1] if transposed else shape, dtype, part)

    with reading():
        reader: Any = tensorflow.train.load_checkpoint(str(prefix))
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    return {name: leaf(name) for name in sorted(shapes)}


def find(path: Path) -> Path | None:
    """Returns a checkpoint's prefix, or None if there is none.

    `path` is the prefix, any of the checkpoint's files, or a directory with one, itself or in its
    "model". The file `checkpoint`, and a directory with several, stand for the last step. Raises
    `UserError` if the index is missing.
    """
    if path.is_dir():
        return _latest_in(path)
    if path.name == _LATEST and path.is_file():
        return _latest_in(path.parent)
    name = _FILE.sub("", path.name)
    if not name:
        return None
    prefix = path.with_name(name)
    if prefix.with_name(prefix.name + _INDEX).is_file():
        return prefix
    if prefix != path and path.is_file():
        raise UserError(
            f"{prefix}{_INDEX} is missing. A checkpoint of TensorFlow consists of .index and "
            ".data-* files."
        )
    return None


def _latest_in(folder: Path) -> Path | None:
    found = [
        file.name.removesuffix(_INDEX) for file in folder.iterdir() if file.name.endswith(_INDEX)
    ]
    if found:
        return folder / max(
            found, key=lambda name: (max(map(int, _STEP.findall(name)), default=-1), name)
        )
    inner = folder / "model"  # As published.
    return _latest_in(inner) if folder.name != "model" and inner.is_dir() else None


def lengths(dataset: Any) -> dict[str, Any]:
    """Returns the published evaluation lengths of a corpus by the release's names.

    The result is empty if the corpus is unknown.
    """
    if str(dataset) not in _LENGTHS:
        return {}
    segment_len, mem_len, clamp_len = _LENGTHS[str(dataset)]
    return {"tgt_len": segment_len, "mem_len": mem_len, "clamp_len": clamp_len, "same_length": True}
