"""Checkpoints of the authors' TensorFlow release, read with TensorFlow (the extra `tensorflow`).

Each variable becomes the PyTorch release's tensor: matrices are transposed, and the clusters' biases are joined if they
share one table. The rows of the head's clusters are in order. A cluster as wide as the model may have no projections
(One Billion Word): it gets identities, which give the same numbers. The optimizer's moments, averages and counters are
omitted.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from txl_jax.errors import UserError

_ROOT = "transformer/"
_INDEX = ".index"
# Suffixes of the optimizer's and averages' variables.
_LEFT_OUT = re.compile(r".*/(Adam|Adam_1|ExponentialMovingAverage|adam_[mv])")
_LAYER = {
    "rel_attn/qkv/kernel": "dec_attn.qkv_net.weight",
    "rel_attn/r/kernel": "dec_attn.r_net.weight",
    "rel_attn/o/kernel": "dec_attn.o_net.weight",
    "rel_attn/LayerNorm/gamma": "dec_attn.layer_norm.weight",
    "rel_attn/LayerNorm/beta": "dec_attn.layer_norm.bias",
    "ff/layer_1/kernel": "pos_ff.CoreNet.0.weight",
    "ff/layer_1/bias": "pos_ff.CoreNet.0.bias",
    "ff/layer_2/kernel": "pos_ff.CoreNet.3.weight",
    "ff/layer_2/bias": "pos_ff.CoreNet.3.bias",
    "ff/LayerNorm/gamma": "pos_ff.layer_norm.weight",
    "ff/LayerNorm/beta": "pos_ff.layer_norm.bias",
}
_NAMES = {
    "r_w_bias": "r_w_bias",
    "r_r_bias": "r_r_bias",
    "adaptive_embed/lookup_table": "word_emb.emb_layers.0.weight",
    "adaptive_embed/proj_W": "word_emb.emb_projs.0",
    "adaptive_softmax/bias": "crit.out_layers.0.bias",
    "adaptive_softmax/cutoff_0/cluster_W": "crit.cluster_weight",
    "adaptive_softmax/cutoff_0/cluster_b": "crit.cluster_bias",
}
_CLUSTER = {
    "adaptive_embed/cutoff_{}/lookup_table": "word_emb.emb_layers.{}.weight",
    "adaptive_embed/cutoff_{}/proj_W": "word_emb.emb_projs.{}",
    "adaptive_softmax/cutoff_{}/proj": "crit.out_projs.{}",
    "adaptive_softmax/cutoff_{}/b": "crit.out_layers.{}.bias",
}
_LAYER_OF = re.compile(r"layer_(\d+)/(.*)")
_CLUSTER_OF = re.compile(r"/cutoff_(\d+)/")
# Segment, memory and clamp lengths of the published evaluations, by the corpus in corpus-info.json.
_LENGTHS = {
    "enwik8": (128, 3800, 1000),
    "text8": (128, 3800, 1000),
    "wt103": (128, 1600, 1000),
    "lm1b": (32, 128, -1),
}


class Checkpoint(Mapping[str, np.ndarray]):
    """A checkpoint's tensors by the PyTorch release's names, in its layouts. Each access reads one.

    Attributes:
      prefix: The checkpoint's path without ".index".
      shapes: The shape of each tensor.
      left_out: Number of variables that are not weights.
      cutoffs: Cutoffs of the clusters, from the sizes of their biases.
    """

    def __init__(self, prefix: Path):
        """Opens the checkpoint.

        Raises:
          UserError: If TensorFlow is not installed, the checkpoint is damaged, or a variable is unknown.
        """
        self.prefix = prefix
        self._reader, self._errors, variables = _open(prefix)
        kept = {name: shape for name, shape in variables.items() if name.startswith(_ROOT)}
        kept = {name.removeprefix(_ROOT): shape for name, shape in kept.items() if not _LEFT_OUT.fullmatch(name)}
        self.left_out = len(variables) - len(kept)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._reads: dict[str, Callable[[], np.ndarray]] = {}
        for name, shape in kept.items():
            self._add(self._original_name(name), name, shape)
        self.cutoffs = self._cutoffs(kept)
        if "adaptive_embed/lookup_table" in kept and self.cutoffs:
            self._join_biases(len(self.cutoffs) + 1)
        self._add_identities()

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a tensor."""
        return self._reads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _original_name(self, name: str) -> str:
        """Returns a variable's name in the PyTorch release."""
        if (match := _LAYER_OF.fullmatch(name)) and match[2] in _LAYER:
            return f"layers.{match[1]}.{_LAYER[match[2]]}"
        if name in _NAMES:
            return _NAMES[name]
        match = _CLUSTER_OF.search(name)
        if match and (general := _CLUSTER_OF.sub("/cutoff_{}/", name)) in _CLUSTER:
            return _CLUSTER[general].format(match[1])
        raise UserError(f"{self.prefix}: variable {_ROOT}{name} is not in the TensorFlow release's Transformer-XL")

    def _add(self, own: str, name: str, shape: tuple[int, ...]) -> None:
        """Adds a variable. Matmuls' matrices are transposed."""
        transposed = name.endswith(("/kernel", "/proj", "/proj_W"))
        variable = _ROOT + name

        def read() -> np.ndarray:
            try:
                array: np.ndarray = self._reader.get_tensor(variable)
            except (self._errors, ValueError, RuntimeError) as error:
                raise _damaged(self.prefix, error) from error
            return array.T if transposed else array

        self.shapes[own], self._reads[own] = shape[::-1] if transposed else shape, read

    def _cutoffs(self, kept: Mapping[str, tuple[int, ...]]) -> list[int]:
        sizes: list[int] = []
        while (bias := f"adaptive_softmax/cutoff_{len(sizes)}/b") in kept:
            sizes.append(kept[bias][0] if kept[bias] else 0)
        return [sum(sizes[:end]) for end in range(1, len(sizes))]

    def _join_biases(self, n_cluster: int) -> None:
        """Joins the clusters' biases, which the PyTorch release has as one if there is one table."""
        reads = [self._reads.pop(f"crit.out_layers.{c}.bias") for c in range(n_cluster)]
        size = sum(self.shapes.pop(f"crit.out_layers.{c}.bias")[0] for c in range(n_cluster))
        name = "crit.out_layers.0.bias"
        self.shapes[name], self._reads[name] = (size,), lambda: np.concatenate([read() for read in reads])

    def _add_identities(self) -> None:
        """Adds the first cluster's projections if only the others have some, because it is as wide as the model."""
        table, own, out = "word_emb.emb_layers.0.weight", "word_emb.emb_projs.0", "crit.out_projs.0"
        if "word_emb.emb_layers.1.weight" in self.shapes and own not in self.shapes and len(self.shapes[table]) == 2:
            width = self.shapes[table][1]
            for name in (own, out):
                if name not in self.shapes:
                    self.shapes[name], self._reads[name] = (width, width), lambda: np.eye(width, dtype=np.float32)


def find(path: Path) -> Path | None:
    """Returns a checkpoint's prefix: `path` itself, or one in this directory or its "model", or None if there is none.

    Of several, the file "checkpoint" names one. Otherwise it is the last step's.
    """
    if path.name.endswith(_INDEX):
        return path.with_name(path.name.removesuffix(_INDEX)) if path.is_file() else None
    if not path.is_dir():
        return path if path.with_name(path.name + _INDEX).is_file() else None
    found = [file.name.removesuffix(_INDEX) for file in path.glob(f"*{_INDEX}")]
    if not found:
        return find(path / "model") if (path / "model").is_dir() and path.name != "model" else None
    named = path / "checkpoint"
    text = named.read_text("utf-8", "replace") if named.is_file() else ""
    match = re.search(r'^model_checkpoint_path: "(.*)"$', text, re.MULTILINE)
    if match and (name := match[1].rpartition("/")[2]) in found:
        return path / name
    return path / max(found, key=lambda name: (int(name.rpartition("-")[2]) if name[-1:].isdecimal() else -1, name))


def folders_of_vocabulary(prefix: Path) -> list[Path]:
    """Returns where a vocabulary may be: next to the checkpoint, or as published in the neighbouring "data"."""
    return [prefix.parent, prefix.parent.parent / "data"]


def lengths(dataset: Any) -> dict[str, Any]:
    """Returns the published evaluation lengths of a corpus by the release's names, empty if it is unknown."""
    if not isinstance(dataset, str) or dataset not in _LENGTHS:
        return {}
    segment_len, mem_len, clamp_len = _LENGTHS[dataset]
    return {"tgt_len": segment_len, "mem_len": mem_len, "clamp_len": clamp_len, "same_length": True}


def _open(prefix: Path) -> tuple[Any, Any, dict[str, tuple[int, ...]]]:
    """Returns TensorFlow's reader, its error class, and the shapes of all variables."""
    try:
        import tensorflow
    except ImportError as error:
        raise UserError(
            f"{prefix} is a checkpoint of TensorFlow, which is not installed. pip install 'txl_jax[tensorflow]'"
        ) from error
    try:
        reader = tensorflow.train.load_checkpoint(str(prefix))
        shapes = reader.get_variable_to_shape_map()
    except (tensorflow.errors.OpError, ValueError, RuntimeError) as error:
        raise _damaged(prefix, error) from error
    return reader, tensorflow.errors.OpError, {name: tuple(shape) for name, shape in sorted(shapes.items())}


def _damaged(prefix: Path, error: Exception) -> UserError:
    return UserError(f"{prefix} is a damaged or incomplete checkpoint ({type(error).__name__}). Download it again.")
