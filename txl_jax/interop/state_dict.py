"""A model's tensors by name from a PyTorch file: a state_dict, a dict around one, or a pickled module."""

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from txl_jax.errors import UserError
from txl_jax.interop.leaves import Leaf
from txl_jax.interop.pickles import Record
from txl_jax.interop.torch_files import Tensor, TorchFile

_MAX_DEPTH = 32  # Modules in modules, and dicts around a state_dict.
_MAX_MODULES = 100_000  # Modules of a model, counting a shared one each time.
# Keys of a dict around a state_dict, in order of preference.
_AROUND = ("model_state", "model_state_dict", "state_dict", "model", "module", "net")
_REPLICA = "module."  # DataParallel puts it before every name.


def of(file: TorchFile) -> dict[str, Leaf]:
    """Returns a model's tensors by name, one leaf for all names of a shared one, or raises `UserError` without any."""
    model, named = model_in(file.root), {}
    if isinstance(model, Record):
        named = {f"{prefix}{name}": value for prefix, parts in _modules(model) for name, value in _own_values(parts)}
    elif isinstance(model, dict):
        named = {name: value for name, value in model.items() if isinstance(name, str)}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if not tensors:
        found = reprlib.repr(file.root)
        raise UserError(f"{file.path} must contain tensors by name, got {found}. Pass a weights file.")
    if all(name.startswith(_REPLICA) for name in tensors):
        tensors = {name.removeprefix(_REPLICA): tensor for name, tensor in tensors.items()}
    leaves = {tensor: file.leaf(tensor) for tensor in tensors.values()}
    return {name: leaves[tensor] for name, tensor in tensors.items()}


def model_in(root: Any) -> Any:
    """Returns the pickled module or state_dict in a file's value, without the dicts and the DataParallel around it."""
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        if isinstance(root, Record):
            parts = _dict_in(root.attributes(), "_modules")
            inner = list(parts.values()) if list(parts) == ["module"] else []
        elif isinstance(root, dict):
            inner = [root[name] for name in _AROUND if name in root]
        # A module records more than its tensors.
        found = next((value for kind in (Record, dict) for value in inner if isinstance(value, kind)), None)
        if found is None:
            break
        root = found
    return root


def _modules(root: Record) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yields the attributes of a module and of those in it, each after what its tensors' names begin with."""
    pending = [("", root)]
    for _ in range(_MAX_MODULES):
        if not pending:
            return
        prefix, module = pending.pop()
        yield prefix, module.attributes()
        children = list(_dict_in(module.attributes(), "_modules").items()) if prefix.count(".") < _MAX_DEPTH else []
        pending += [(f"{prefix}{name}.", child) for name, child in children[::-1] if isinstance(child, Record)]


def _own_values(parts: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields a module's own parameters and buffers that a `state_dict` has, by name."""
    omitted = parts.get("_non_persistent_buffers_set")
    for name, value in (_dict_in(parts, "_parameters") | _dict_in(parts, "_buffers")).items():
        if not (isinstance(omitted, set) and name in omitted):
            yield name, value


def _dict_in(parts: Mapping[Any, Any], group: str) -> dict[Any, Any]:
    found = parts.get(group)
    return found if isinstance(found, dict) else {}


def facts_of_module(root: Any) -> dict[str, Any]:
    """Returns the keyword arguments that a pickled MemTransformerLM still records."""
    module = model_in(root)
    if not isinstance(module, Record):
        return {}
    modules = dict(_modules(module))
    own = modules[""].items()
    facts: dict[str, Any] = {name: value for name, value in own if isinstance(value, bool | int | float)}
    if isinstance(cutoffs := modules.get("word_emb.", {}).get("cutoffs"), list):
        facts["cutoffs"] = cutoffs[:-1]  # The last one is V.
    if attention := modules.get("layers.0.dec_attn."):
        facts["pre_lnorm"] = attention.get("pre_lnorm")
    return facts
