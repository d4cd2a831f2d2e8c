"""A model's tensors by name, from a PyTorch file.

The file contains a state_dict, a dict around a state_dict, or a pickled module.
"""

import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from txl_jax.errors import UserError
from txl_jax.interop.leaves import Leaf
from txl_jax.interop.names import WRAPPERS, without_wrappers
from txl_jax.interop.pickles import Record
from txl_jax.interop.torch_files import Tensor, TorchFile

_MAX_DEPTH = 32  # Modules in modules, and dicts around a state_dict.
# Characters of all names of a pickled module, as a multiple of the pickle's bytes, and a number
# that is always allowed. A shared module is named each time that it is used. Without shared ones,
# names are shorter than the pickle, where every module and parameter takes a hundred bytes besides
# its name.
_NAMES_PER_BYTE, _NAMES_ALWAYS = 4, 1 << 16
# Bytes of all named tensors, as a multiple of the file's. Names may share numbers, such as tied
# tables, or the one layer of a model that repeats it: published models have 24 layers at most.
_MAX_SHARING = 32
# Keys of a dict around a state_dict, in order of preference.
_AROUND = ("model_state", "model_state_dict", "state_dict", "model", "module", "net")


def of(file: TorchFile) -> dict[str, Leaf]:
    """Returns a model's tensors by name, with one leaf for all names of a shared tensor.

    Raises `UserError` if no tensors are found.
    """
    model, named = model_in(file.root), {}
    if isinstance(model, Record):
        named = _Names(file).tensors(model)
    elif isinstance(model, dict):
        named = {name: value for name, value in model.items() if isinstance(name, str)}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if not tensors:
        found = reprlib.repr(file.root)
        raise UserError(
            f"{file.path} must contain tensors by name, got {found}. Pass a weights file."
        )
    total = sum(
        math.prod(tensor.shape) * tensor.storage.dtype.itemsize for tensor in tensors.values()
    )
    if total > _MAX_SHARING * file.size:
        raise UserError(
            f"{file.path}: its tensors share numbers so often that together they have {total:,} "
            f"bytes, over {_MAX_SHARING} times the file's {file.size:,}. "
            "Save them without sharing."
        )
    # Equal tensors by a text: the file could choose the sizes so that the hashes of all tensors are
    # equal.
    places = {
        name: repr((id(t.storage), t.begin, t.shape, t.strides)) for name, t in tensors.items()
    }
    leaves = {places[name]: file.leaf(tensor) for name, tensor in tensors.items()}
    return {name: leaves[place] for name, place in places.items()}


def model_in(root: Any) -> Any:
    """Returns the pickled module or state_dict in a file's value.

    This removes the dicts and the DataParallel around it.
    """
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        if isinstance(root, Record):
            parts = _dict_in(root.attributes(), "_modules")
            inner = (
                list(parts.values()) if len(parts) == 1 and not WRAPPERS.isdisjoint(parts) else []
            )
        elif isinstance(root, dict):
            inner = [root[name] for name in _AROUND if name in root]
        # A module records more than its tensors.
        found = next(
            (value for kind in (Record, dict) for value in inner if isinstance(value, kind)), None
        )
        if found is None:
            break
        root = found
    return root


class _Names:
    """Walks through a pickled module, and counts what it makes of the file."""

    def __init__(self, file: TorchFile):
        self._path = file.path
        self._left = _NAMES_PER_BYTE * file.pickle_size + _NAMES_ALWAYS

    def tensors(self, root: Record) -> dict[str, Any]:
        """Returns the parameters and buffers of a module and of the modules in it, by name."""
        found: dict[str, Any] = {}
        for prefix, parts in self.modules(root):
            omitted = parts.get("_non_persistent_buffers_set")
            for group in ("_parameters", "_buffers"):
                for name, value in self._entries(parts, group, prefix):
                    if not (isinstance(omitted, set) and name in omitted):
                        found[f"{prefix}{name}"] = value
        return found

    def modules(self, root: Record) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yields the attributes of a module and of the modules in it.

        Each module's attributes come after the prefix of its tensors' names.
        """
        pending = [("", root)]
        while pending:
            prefix, module = pending.pop()
            yield prefix, module.attributes()
            if prefix.count(".") >= _MAX_DEPTH:
                continue
            children = self._entries(module.attributes(), "_modules", prefix)
            pending += [
                (f"{prefix}{name}.", child)
                for name, child in children[::-1]
                if isinstance(child, Record)
            ]

    def _entries(self, parts: dict[Any, Any], group: str, prefix: str) -> list[tuple[str, Any]]:
        """Returns a dict's entries whose keys are texts.

        Raises `UserError` if names become longer than the file.
        """
        entries = _dict_in(parts, group)
        self._spend(len(entries) * (len(prefix) + 1))  # Before they are looked at one by one.
        named = [(name, value) for name, value in entries.items() if isinstance(name, str)]
        self._spend(sum(len(name) for name, _ in named))
        return named

    def _spend(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise UserError(
                f"{self._path}: its pickled modules share parts so often that the names of their "
                "tensors are longer than the file. Save the model's state_dict instead."
            )


def _dict_in(parts: Mapping[Any, Any], group: str) -> dict[Any, Any]:
    found = parts.get(group)
    return found if isinstance(found, dict) else {}


def facts_of_module(file: TorchFile) -> dict[str, Any]:
    """Returns the keyword arguments that a pickled MemTransformerLM still records."""
    module = model_in(file.root)
    if not isinstance(module, Record):
        return {}
    modules = {without_wrappers(prefix): parts for prefix, parts in _Names(file).modules(module)}
    own = modules[""].items()
    facts: dict[str, Any] = {
        name: value for name, value in own if isinstance(value, bool | int | float)
    }
    if isinstance(cutoffs := modules.get("word_emb.", {}).get("cutoffs"), list):
        facts["cutoffs"] = cutoffs[:-1]  # The last one is V.
    if attention := modules.get("layers.0.dec_attn."):
        facts["pre_lnorm"] = attention.get("pre_lnorm")
    return facts
