"""Checkpoints of the authors' TensorFlow release, read with TensorFlow (the extra `tensorflow`).

Each variable becomes the PyTorch release's tensor: matrices are transposed, and the clusters'
biases are joined if they share one table. A cluster as wide as the model without projections (One
Billion Word) gets identities. The optimizer's moments, averages and counters are omitted.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_jax.errors import UserError, rephrased
from txl_jax.interop.leaves import Leaf, leaf_of

_ROOT = "transformer/"
_MARK = "adaptive_embed/"  # Every model has variables below it.
_INDEX = ".index"
_LATEST = "checkpoint"  # A text file that names the last prefix.
# A file's name after the prefix.
_FILE = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
_STEP = re.compile(r"-(\d{1,18})$")
# Variables of the optimizer and of averages.
_OMITTED = re.compile(r".*/(Adam|Adam_1|ExponentialMovingAverage|adam_[mv])")
# Variables whose matrices the PyTorch release stores transposed.
_TRANSPOSED = ("/kernel", "/proj", "/proj_W")
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
# The PyTorch release's names of the first cluster's projections.
_FIRST_INPUT_PROJECTION = "word_emb.emb_projs.0"
_FIRST_OUTPUT_PROJECTION = "crit.out_projs.0"
# Segment, memory and clamp lengths of the published evaluations, by the corpus in corpus-info.json.
_LENGTHS = {
    "enwik8": (128, 3800, 1000),
    "text8": (128, 3800, 1000),
    "wt103": (128, 1600, 1000),
    "lm1b": (32, 128, -1),
}


class ReleasedModel(NamedTuple):
    """A checkpoint's model."""

    # Tensors by the PyTorch release's names.
    tensors: dict[str, Leaf]
    # Arguments of its MemTransformerLM, as far as names and sizes determine them.
    facts: dict[str, Any]
    # What was omitted: a line for the user.
    note: str


def read(prefix: Path) -> ReleasedModel:
    """Opens a checkpoint, by its path without ".index".

    Raises:
      UserError: If TensorFlow is missing, the checkpoint is corrupted or a variable is unknown.
    """
    variables = _open(prefix)
    root = _root_of(variables)
    kept: dict[str, Leaf] = {}
    for name, leaf in variables.items():
        short = name.removeprefix(root)
        if name.startswith(root) and not _OMITTED.fullmatch(short):
            kept[short] = leaf

    tensors: dict[str, Leaf] = {}
    for name, leaf in kept.items():
        released_name = _released_name(name)
        # A variable that is not read could be one that changes the model's losses.
        if released_name is None:
            raise UserError(
                f"{prefix}: variable {root}{name} is not in the TensorFlow release's Transformer-XL"
            )
        tensors[released_name] = leaf

    cluster_sizes = _cluster_sizes(kept)
    if "adaptive_embed/lookup_table" in kept and len(cluster_sizes) > 1:
        tensors = _with_one_bias(tensors, cluster_sizes)
    tensors = _with_identities(tensors)

    facts: dict[str, Any] = {
        "pre_lnorm": False,
        "cutoffs": list(itertools.accumulate(cluster_sizes[:-1])),
    }
    if _FIRST_INPUT_PROJECTION in tensors:
        # Without variables by cluster, there is one cluster.
        clusters = range(max(len(cluster_sizes), 1))
        facts["tie_projs"] = [f"crit.out_projs.{c}" not in tensors for c in clusters]
    num_omitted = len(variables) - len(kept)
    note = f"{num_omitted} variables of the optimizer and of averages were omitted"
    return ReleasedModel(tensors, facts, note)


def _released_name(name: str) -> str | None:
    """Returns the PyTorch release's name of a variable, or None if the variable is unknown."""
    number = _NUMBER.search(name)
    # Some names of the first cluster are written out.
    released_name = _NAMES.get(name)
    if released_name is None:
        released_name = _NAMES.get(_NUMBER.sub(r"\1_#", name, count=1))
    if released_name is None or number is None:
        return released_name
    return released_name.replace("#", number[2])


def _cluster_sizes(variables: Mapping[str, Leaf]) -> list[int]:
    """Returns the numbers of tokens of clusters that have their own bias."""
    sizes: list[int] = []
    while (bias := variables.get(f"adaptive_softmax/cutoff_{len(sizes)}/b")) is not None:
        sizes.append(math.prod(bias.shape))
    return sizes


def _with_one_bias(tensors: dict[str, Leaf], cluster_sizes: list[int]) -> dict[str, Leaf]:
    """Returns the tensors with one bias, as the PyTorch release has if all clusters have one table.

    Args:
      tensors: Tensors by the PyTorch release's names, with a bias per cluster.
      cluster_sizes: Number of tokens of each cluster.
    """
    others = dict(tensors)
    biases = [others.pop(f"crit.out_layers.{c}.bias") for c in range(len(cluster_sizes))]

    def part(index: Any) -> np.ndarray:
        return np.concatenate([bias.read() for bias in biases])[index]

    bias = Leaf((sum(cluster_sizes),), biases[0].dtype, part)
    return others | {"crit.out_layers.0.bias": bias}


def _with_identities(tensors: dict[str, Leaf]) -> dict[str, Leaf]:
    """Returns the tensors with identities as the first cluster's projections, if it has none.

    This is so if only the other clusters have projections: the first is as wide as the model.
    """
    table = tensors.get("word_emb.emb_layers.0.weight")
    has_clusters = "word_emb.emb_layers.1.weight" in tensors
    if _FIRST_INPUT_PROJECTION in tensors or table is None or not has_clusters:
        return tensors
    # A table of another rank is an error that is found with the sizes.
    if len(table.shape) != 2:
        return tensors
    identity = leaf_of(np.eye(table.shape[1], dtype=np.float32))
    return {_FIRST_INPUT_PROJECTION: identity, _FIRST_OUTPUT_PROJECTION: identity} | tensors


def _root_of(names: Iterable[str]) -> str:
    """Returns the prefix of the names of the model's variables.

    It is "transformer/", perhaps inside the scopes of a wrapper.
    """
    for name in names:
        outer, scope, _ = name.partition(f"{_ROOT}{_MARK}")
        if scope and (not outer or outer.endswith("/")) and not _OMITTED.fullmatch(name):
            return f"{outer}{_ROOT}"
    return _ROOT


def _open(prefix: Path) -> dict[str, Leaf]:
    """Returns all variables by name, matmuls' matrices transposed."""
    missing = (
        f"{prefix} is a checkpoint of TensorFlow, which is not installed. "
        "Run pip install tensorflow-cpu."
    )
    with rephrased(missing, ImportError):
        import tensorflow

    # TensorFlow checks the index and each tensor by checksums, and raises one of these for bytes
    # that changed or are missing.
    damaged = f"{prefix} is a corrupted or incomplete checkpoint (%s). Download it again."
    reading = functools.partial(
        rephrased, damaged, tensorflow.errors.OpError, ValueError, RuntimeError
    )

    def leaf(name: str) -> Leaf:
        shape = tuple(shapes[name])
        dtype = np.dtype(dtypes[name].as_numpy_dtype)
        is_transposed = name.endswith(_TRANSPOSED)

        def part(index: Any) -> np.ndarray:
            with reading():
                array = np.asarray(reader.get_tensor(name))
            if is_transposed:
                array = array.T
            return array[index]

        return Leaf(shape[::-1] if is_transposed else shape, dtype, part)

    with reading():
        reader: Any = tensorflow.train.load_checkpoint(str(prefix))
        shapes = reader.get_variable_to_shape_map()
        dtypes = reader.get_variable_to_dtype_map()
    return {name: leaf(name) for name in sorted(shapes)}


def find(path: Path) -> Path | None:
    """Returns a checkpoint's prefix, or None if the path is not a checkpoint.

    Args:
      path: The prefix, any of the checkpoint's files, or a directory with a checkpoint, itself or
        in its "model". The file `checkpoint`, and a directory with several, stand for the last
        step.

    Raises:
      UserError: If the index is missing.
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
    # Files with the numbers of a checkpoint do not contain their names.
    if prefix != path and path.is_file():
        raise UserError(
            f"{prefix}{_INDEX} is missing. A checkpoint of TensorFlow consists of .index and "
            ".data-* files."
        )
    return None


def _latest_in(folder: Path) -> Path | None:
    """Returns the prefix of the last step in a directory, or None if it has no checkpoint."""
    prefixes = [
        file.name.removesuffix(_INDEX) for file in folder.iterdir() if file.name.endswith(_INDEX)
    ]
    if prefixes:
        return folder / max(prefixes, key=_step_and_name)
    # The release's archives have the checkpoint in the directory "model".
    inner = folder / "model"
    if folder.name != "model" and inner.is_dir():
        return _latest_in(inner)
    return None


def _step_and_name(prefix: str) -> tuple[int, str]:
    """Returns the step of a prefix, or -1 without a step, and the prefix."""
    step = _STEP.search(prefix)
    return (int(step[1]) if step else -1, prefix)


def lengths(dataset: Any) -> dict[str, Any]:
    """Returns the published evaluation lengths of a corpus by the release's names.

    Args:
      dataset: The corpus in corpus-info.json, which may be anything. The result is empty if it is
        unknown.
    """
    if str(dataset) not in _LENGTHS:
        return {}
    segment_len, mem_len, clamp_len = _LENGTHS[str(dataset)]
    return {"tgt_len": segment_len, "mem_len": mem_len, "clamp_len": clamp_len, "same_length": True}
