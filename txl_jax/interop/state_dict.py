"""A model's tensors by name from a PyTorch file: a state_dict, a dict around one, or a pickled module."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from txl_jax.errors import UserError
from txl_jax.interop.pickles import Record
from txl_jax.interop.torch_files import Tensor, TorchFile

_MAX_DEPTH = 32  # Modules in modules, and dicts around a state_dict.
_MAX_MODULES = 100_000  # Modules of a model, counting a shared one each time.
# Keys of a dict around a state_dict, in order of preference.
_AROUND = ("model_state", "model_state_dict", "state_dict", "model", "module", "net")
_REPLICA = "module."  # DataParallel puts it before every name.


class StateDict(Mapping[str, np.ndarray]):
    """The tensors of a model by name. Each access maps one anew.

    Attributes:
      shapes: The shape of each tensor.
    """

    def __init__(self, file: TorchFile, tensors: Mapping[str, Tensor]):
        self._file, self._tensors = file, dict(tensors)
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a tensor, read-only."""
        return self._file.array(self._tensors[name])

    def is_same(self, a: str, b: str) -> bool:
        """Returns whether two names share one tensor."""
        return self._tensors[a].is_same(self._tensors[b])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def of(file: TorchFile) -> StateDict:
    """Returns a model's tensors by name, or raises `UserError` if the file has none."""
    tensors = _find(file.root, 0)
    if not tensors:
        raise UserError(f"{file.path} contains {_described(file.root)} and no tensors by name. Pass a file of weights.")
    if all(name.startswith(_REPLICA) for name in tensors):
        tensors = {name.removeprefix(_REPLICA): tensor for name, tensor in tensors.items()}
    return StateDict(file, tensors)


def find_module(root: Any) -> Record | None:
    """Returns a file's pickled module, by itself or in a dict under a usual key, or None if absent."""
    for _ in range(_MAX_DEPTH):
        if isinstance(root, Record):
            parts = root.attributes().get("_modules")
            wrapped = parts.get("module") if isinstance(parts, dict) and list(parts) == ["module"] else None
            if not isinstance(wrapped, Record):
                return root if "_parameters" in root.attributes() else None
            root = wrapped  # DataParallel's model.
        elif isinstance(root, dict):
            root = next((root[name] for name in _AROUND if isinstance(root.get(name), Record)), None)
    return None


def _find(value: Any, depth: int) -> dict[str, Tensor]:
    if isinstance(value, Record):
        return _of_module(value)
    if not isinstance(value, dict) or depth > _MAX_DEPTH:
        return {}
    for name in _AROUND:
        if isinstance(value.get(name), (dict, Record)):
            return _find(value[name], depth + 1)
    return {name: tensor for name, tensor in value.items() if isinstance(name, str) and isinstance(tensor, Tensor)}


def _of_module(root: Record) -> dict[str, Tensor]:
    """Returns a module's tensors by the names in its `state_dict`, depth first."""
    found: dict[str, Tensor] = {}
    pending = [("", 0, root)]
    for _ in range(_MAX_MODULES):
        if not pending:
            break
        prefix, depth, module = pending.pop()
        parts = module.attributes()
        omitted = parts.get("_non_persistent_buffers_set")
        for name, tensor in (_dict_in(parts, "_parameters") | _dict_in(parts, "_buffers")).items():
            if isinstance(tensor, Tensor) and not (isinstance(omitted, set) and name in omitted):
                found[f"{prefix}{name}"] = tensor
        children = [
            (f"{prefix}{name}.", depth + 1, child)
            for name, child in _dict_in(parts, "_modules").items()
            if isinstance(child, Record) and depth < _MAX_DEPTH
        ]
        pending += children[::-1]
    return found


def _dict_in(parts: Mapping[Any, Any], group: str) -> dict[Any, Any]:
    found = parts.get(group)
    return found if isinstance(found, dict) else {}


def _described(root: Any) -> str:
    """Describes a file's value for an error."""
    if isinstance(root, Record):
        return f"an object of {str(root.symbol)[:80]}"
    if isinstance(root, dict):
        return f"a dict of {', '.join(str(name)[:30] for name in list(root)[:5]) or 'nothing'}"
    return f"a value of type {type(root).__name__}"


def facts_of_module(root: Any) -> dict[str, Any]:
    """Returns the keyword arguments that a pickled MemTransformerLM still records."""
    module = find_module(root)
    if module is None:
        return {}
    facts: dict[str, Any] = {
        name: value for name, value in module.attributes().items() if isinstance(value, (bool, int, float))
    }
    if isinstance(cutoffs := _attributes_below(module, "word_emb").get("cutoffs"), list):
        facts["cutoffs"] = cutoffs[:-1]  # The last one is V.
    if attention := _attributes_below(module, "layers", "0", "dec_attn"):
        facts["pre_lnorm"] = attention.get("pre_lnorm")
    return facts


def _attributes_below(module: Record, *path: str) -> dict[Any, Any]:
    """Returns the attributes of the submodule at a path, empty if it does not exist."""
    found: Any = module
    for name in path:
        found = _dict_in(found.attributes(), "_modules").get(name) if isinstance(found, Record) else None
    return found.attributes() if isinstance(found, Record) else {}
