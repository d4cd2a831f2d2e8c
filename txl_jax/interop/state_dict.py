"""The tensors of a model by name, of what a PyTorch file holds: a state_dict, a dict around one, or a module."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from txl_jax.errors import UserError
from txl_jax.interop.pickles import Record
from txl_jax.interop.torch_files import Tensor, TorchFile

_MAX_DEPTH = 32  # Of modules in modules, and of dicts around a state_dict.
_MAX_MODULES = 100_000  # Of a model, counting a shared one each time.
# Names of a dict around a state_dict, in the order in which they are tried.
_AROUND = ("model_state", "model_state_dict", "state_dict", "model", "module", "net")
_REPLICA = "module."  # Put before every name by DataParallel.


class StateDict(Mapping[str, np.ndarray]):
    """The tensors of a model by name; each access maps one anew.

    Attributes:
      path: the file.
      shapes: the shape of each tensor.
    """

    def __init__(self, file: TorchFile, tensors: Mapping[str, Tensor]):
        """Keeps the places of the tensors."""
        self.path, self._file, self._tensors = file.path, file, dict(tensors)
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a tensor, read-only."""
        return self._file.array(self._tensors[name])

    def is_same(self, a: str, b: str) -> bool:
        """Returns whether two names have one tensor."""
        return self._tensors[a].is_same(self._tensors[b])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def of(file: TorchFile) -> StateDict:
    """Returns the tensors of a model: of a state_dict, of a dict around one, or of a pickled module.

    Raises:
      UserError: there are none.
    """
    tensors = _find(file.root, 0)
    if not tensors:
        raise UserError(f"{file.path} holds {_described(file.root)} and no tensors by name; give a file of weights")
    if all(name.startswith(_REPLICA) for name in tensors):
        tensors = {name.removeprefix(_REPLICA): tensor for name, tensor in tensors.items()}
    return StateDict(file, tensors)


def find_module(root: Any) -> Record | None:
    """Returns the pickled module of a file: its value, or what a dict holds under a usual name; None: there is none."""
    for _ in range(_MAX_DEPTH):
        if isinstance(root, Record):
            parts = root.attributes().get("_modules")
            wrapped = parts.get("module") if isinstance(parts, dict) and list(parts) == ["module"] else None
            if not isinstance(wrapped, Record):
                return root if "_parameters" in root.attributes() else None
            root = wrapped  # Of DataParallel.
        elif isinstance(root, dict):
            root = next((root[name] for name in _AROUND if isinstance(root.get(name), Record)), None)
    return None


def _find(value: Any, depth: int) -> dict[str, Tensor]:
    """Returns the tensors by name of a state_dict, of what is around it, or of a module."""
    if depth > _MAX_DEPTH:
        return {}
    if isinstance(value, Record):
        return _of_module(value)
    if not isinstance(value, dict):
        return {}
    for name in _AROUND:
        if isinstance(value.get(name), (dict, Record)):
            return _find(value[name], depth + 1)
    return {name: tensor for name, tensor in value.items() if isinstance(name, str) and isinstance(tensor, Tensor)}


def _of_module(root: Record) -> dict[str, Tensor]:
    """Returns the tensors by the names that the module's `state_dict` has, depth first."""
    found: dict[str, Tensor] = {}
    pending = [("", 0, root)]
    for _ in range(_MAX_MODULES):
        if not pending:
            break
        prefix, depth, module = pending.pop()
        parts = module.attributes()
        for group in ("_parameters", "_buffers"):
            for name, tensor in _entries(parts, group):
                if isinstance(tensor, Tensor) and name not in _names_left_out(parts):
                    found[f"{prefix}{name}"] = tensor
        children = [
            (f"{prefix}{name}.", depth + 1, child)
            for name, child in _entries(parts, "_modules")
            if isinstance(child, Record) and depth < _MAX_DEPTH
        ]
        pending += children[::-1]
    return found


def _entries(parts: Mapping[Any, Any], group: str) -> Iterator[tuple[str, Any]]:
    found = parts.get(group)
    yield from ((str(name), value) for name, value in found.items()) if isinstance(found, dict) else ()


def _names_left_out(parts: Mapping[Any, Any]) -> Any:
    found = parts.get("_non_persistent_buffers_set")
    return found if isinstance(found, set) else ()


def _described(root: Any) -> str:
    """Returns the kind of a file's value, for an error."""
    if isinstance(root, Record):
        return f"an object of {str(root.symbol)[:80]}"
    if isinstance(root, dict):
        return f"a dict of {', '.join(str(name)[:30] for name in list(root)[:5]) or 'nothing'}"
    return f"a value of type {type(root).__name__}"


def facts_of_module(root: Any) -> dict[str, Any]:
    """Returns the keyword arguments that a pickled MemTransformerLM was made with, as far as it has kept them."""
    module = find_module(root)
    if module is None:
        return {}
    facts: dict[str, Any] = {
        name: value for name, value in module.attributes().items() if isinstance(value, (bool, int, float))
    }
    parts = module.attributes().get("_modules")
    parts = parts if isinstance(parts, dict) else {}
    embedding = parts.get("word_emb")
    if isinstance(embedding, Record) and isinstance(cutoffs := embedding.attributes().get("cutoffs"), list):
        facts["cutoffs"] = cutoffs[:-1]  # The last one is V.
    for part in _below(module, "layers", "0", "dec_attn"):
        facts["pre_lnorm"] = part.attributes().get("pre_lnorm")
    return facts


def _below(module: Record, *path: str) -> Iterator[Record]:
    """Yields the submodule of a path, if there is one."""
    found: Any = module
    for name in path:
        parts = found.attributes().get("_modules") if isinstance(found, Record) else None
        found = parts.get(name) if isinstance(parts, dict) else None
    if isinstance(found, Record):
        yield found
