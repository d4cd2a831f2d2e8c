"""A model's tensors by name from a PyTorch file: a state_dict, a dict around one, or a pickled module."""

from collections.abc import Mapping
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
    """Returns a model's tensors by name, with one leaf for all names of a shared one.

    Raises:
      UserError: If the file has none.
    """
    model, tensors = model_in(file.root), {}
    if isinstance(model, Record):
        tensors = _of_module(model)
    elif isinstance(model, dict):
        tensors = {name: value for name, value in model.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if not tensors:
        raise UserError(f"{file.path} contains {_described(file.root)} and no tensors by name. Pass a file of weights.")
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
    module = model_in(root)
    if not isinstance(module, Record):
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
