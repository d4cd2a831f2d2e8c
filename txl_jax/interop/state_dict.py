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

# Most levels of modules in modules, and of dicts around a state_dict.
_MAX_DEPTH = 32
# Characters of all names of a pickled module, per byte of the pickle, and in any case. A shared
# module is named each time that it is used. Without shared ones, names are shorter than the pickle,
# where every module and parameter takes a hundred bytes besides its name.
_NAMES_PER_BYTE = 4
_NAMES_ALWAYS = 1 << 16
# Bytes of all named tensors, per byte of the file. Names may share numbers, such as tied tables, or
# the one layer of a model that repeats it: published models have 24 layers at most.
_MAX_SHARING = 32
# Keys of a dict around a state_dict, in order of preference.
_AROUND = ("model_state", "model_state_dict", "state_dict", "model", "module", "net")


def of(file: TorchFile) -> dict[str, Leaf]:
    """Returns a model's tensors by name, with one leaf for all names of a shared tensor.

    Raises:
      UserError: If no tensors are found, or they share numbers too often.
    """
    model = model_in(file.root)
    values: Mapping[Any, Any] = {}
    if isinstance(model, Record):
        values = _ModuleWalk(file).tensors(model)
    elif isinstance(model, dict):
        values = model

    # A file may have anything else among its tensors, such as a version or a step.
    tensors: dict[str, Tensor] = {
        name: value
        for name, value in values.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    if not tensors:
        raise UserError(
            f"{file.path} must contain tensors by name, got {reprlib.repr(file.root)}. "
            "Pass a weights file."
        )

    # A small file may name one matrix thousands of times, and a conversion would write each.
    total = 0
    for tensor in tensors.values():
        total += math.prod(tensor.shape) * tensor.storage.dtype.itemsize
    if total > _MAX_SHARING * file.size:
        raise UserError(
            f"{file.path}: its tensors share numbers so often that together they have {total:,} "
            f"bytes, over {_MAX_SHARING} times the file's {file.size:,}. "
            "Save them without sharing."
        )

    leaves: dict[str, Leaf] = {}
    leaf_at: dict[str, Leaf] = {}
    for name, tensor in tensors.items():
        # Equal tensors are found by a text of their places, not by the places: a file could choose
        # sizes whose hashes are all equal.
        place = repr((id(tensor.storage), tensor.begin, tensor.shape, tensor.strides))
        if place not in leaf_at:
            leaf_at[place] = file.leaf(tensor)
        leaves[name] = leaf_at[place]
    return leaves


def model_in(root: Any) -> Any:
    """Returns the pickled module or state_dict in a file's value.

    Dicts around it, and a DataParallel or another wrapper, are removed.
    """
    # A dict may contain itself, so that the search must end.
    for _ in range(_MAX_DEPTH):
        inner = _model_inside(root)
        if inner is None:
            break
        root = inner
    return root


def _model_inside(value: Any) -> Any:
    """Returns the value inside a wrapper, or a dict's value for a model, or None."""
    candidates: list[Any] = []
    if isinstance(value, Record):
        children = _dict_in(value.attributes(), "_modules")
        if len(children) == 1 and not WRAPPERS.isdisjoint(children):
            candidates = list(children.values())
    elif isinstance(value, dict):
        candidates = [value[key] for key in _AROUND if key in value]

    # A module records more than its tensors, so that it is preferred to a dict of them.
    for kind in (Record, dict):
        for candidate in candidates:
            if isinstance(candidate, kind):
                return candidate
    return None


class _ModuleWalk:
    """Walks through a pickled module, and counts the characters of the names that it makes."""

    def __init__(self, file: TorchFile):
        self._path = file.path
        self._characters_left = _NAMES_PER_BYTE * file.pickle_size + _NAMES_ALWAYS

    def tensors(self, root: Record) -> dict[str, Any]:
        """Returns the parameters and buffers of a module and of the modules in it, by name."""
        tensors: dict[str, Any] = {}
        for prefix, attributes in self.modules(root):
            omitted = attributes.get("_non_persistent_buffers_set")
            if not isinstance(omitted, set):
                omitted = set()
            for group in ("_parameters", "_buffers"):
                for name, value in self._entries(attributes, group, prefix):
                    if name not in omitted:
                        tensors[f"{prefix}{name}"] = value
        return tensors

    def modules(self, root: Record) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Yields a module and the modules in it, each before those in it.

        Each is the prefix of its tensors' names, and its attributes.
        """
        pending = [("", root)]
        while pending:
            prefix, module = pending.pop()
            attributes = module.attributes()
            yield prefix, attributes
            # A module may contain itself, so that the walk would not end.
            if prefix.count(".") >= _MAX_DEPTH:
                continue
            children = self._entries(attributes, "_modules", prefix)
            # The last one comes off the stack first.
            for name, child in reversed(children):
                if isinstance(child, Record):
                    pending.append((f"{prefix}{name}.", child))

    def _entries(
        self, attributes: dict[Any, Any], group: str, prefix: str
    ) -> list[tuple[str, Any]]:
        """Returns the entries of one of a module's dicts whose keys are texts.

        Args:
          attributes: The module's attributes.
          group: Name of the dict.
          prefix: What precedes the module's own names.

        Raises:
          UserError: If names become longer than the file.
        """
        entries = _dict_in(attributes, group)
        # Two modules that contain the next two twice, 32 levels deep, are 2**32 modules. Each name
        # is paid for, and a dict as a whole before its entries are looked at one by one.
        self._spend(len(entries) * (len(prefix) + 1))
        named: list[tuple[str, Any]] = []
        for name, value in entries.items():
            if isinstance(name, str):
                self._spend(len(name))
                named.append((name, value))
        return named

    def _spend(self, characters: int) -> None:
        self._characters_left -= characters
        if self._characters_left < 0:
            raise UserError(
                f"{self._path}: its pickled modules share parts so often that the names of their "
                "tensors are longer than the file. Save the model's state_dict instead."
            )


def _dict_in(attributes: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    """Returns an attribute that is a dict, or an empty dict: a file may have any value there."""
    value = attributes.get(name)
    if not isinstance(value, dict):
        return {}
    return value


def facts_of_module(file: TorchFile) -> dict[str, Any]:
    """Returns the keyword arguments that a pickled MemTransformerLM still records."""
    root = model_in(file.root)
    # A state_dict has no arguments.
    if not isinstance(root, Record):
        return {}
    # A wrapper, such as DataParallel, comes before the module in it, which replaces it here.
    modules: dict[str, dict[Any, Any]] = {}
    for prefix, attributes in _ModuleWalk(file).modules(root):
        modules[without_wrappers(prefix)] = attributes

    # The file chooses the attributes' names and values. `infer_config` takes those that it knows,
    # and checks them.
    facts: dict[str, Any] = {
        name: value for name, value in modules[""].items() if isinstance(value, bool | int | float)
    }
    # The model itself does not keep these two.
    cutoffs = modules.get("word_emb.", {}).get("cutoffs")
    if isinstance(cutoffs, list):
        facts["cutoffs"] = cutoffs[:-1]  # The last one is V.
    attention = modules.get("layers.0.dec_attn.")
    if attention:
        # None, if it is missing, counts as not recorded.
        facts["pre_lnorm"] = attention.get("pre_lnorm")
    return facts
