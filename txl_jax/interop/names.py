"""Names of tensors, without what wrappers and frameworks put before and into them.

A model that was compiled, replicated, or made an attribute of something else has other names than
its own. This is the one place that knows, for all kinds of files. Names are told by the embedding's
table, or by a layer's first matrix, which every Transformer-XL has.
"""

from collections.abc import Iterable
from typing import NamedTuple

from txl_jax.errors import UserError
from txl_jax.interop.leaves import Leaf, Leaves

# Attributes in which wrappers keep the module that they wrap, wherever it is in a model.
WRAPPERS = frozenset(
    {
        "_orig_mod",  # torch.compile
        "module",  # DataParallel, DistributedDataParallel, DeepSpeed
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_forward_module",  # Lightning's Fabric
    }
)
TRANSFORMER = "transformer."  # Hugging Face's name of everything but the softmax.
_SOFTMAX = "crit."
# Tensors by which a model is recognized, in order of preference.
_MARKS = (
    "word_emb.emb_layers.0.weight",
    "layers.0.pos_ff.CoreNet.0.weight",
    "layers.0.dec_attn.o_net.weight",
)
_SHOWN = 3  # Names in a note.


class Named(NamedTuple):
    """Tensors by an implementation's own names."""

    tensors: dict[str, Leaf]
    # What was taken off or omitted, for people.
    notes: list[str]
    # Whether they are a Transformer-XL's.
    is_recognized: bool
    # Whether all but the softmax begin with `TRANSFORMER`, as Hugging Face's do.
    has_transformer: bool = False


def without_wrappers(name: str) -> str:
    """Returns a name without its parts that are wrappers.

    For example, "module.layers.0._orig_mod.u" becomes "layers.0.u".
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def known(tensors: Leaves) -> Named:
    """Returns a model's tensors by its own names, without wrappers and without a shared prefix.

    Tensors that do not have the prefix belong to something else, and are omitted with a note.
    Raises `UserError` if two names become one.
    """
    plain: dict[str, Leaf] = {}
    for name, leaf in tensors.items():
        short = without_wrappers(name)
        if plain.setdefault(short, leaf) is not leaf:
            raise UserError(
                f"two tensors have the name {short} without the names of wrappers. "
                "Save only one of them."
            )
    notes = []
    if plain.keys() != tensors.keys():
        notes.append(
            "names of tensors were read without those of wrappers "
            "(torch.compile, DataParallel, ...)"
        )
    prefixes = _prefixes(plain)
    if not prefixes:
        return Named(dict(tensors), [], is_recognized=False)
    prefix = prefixes[0]
    if len(prefixes) > 1:
        others = ", ".join(map(repr, prefixes[1:]))
        notes.append(
            f"there is a model behind each of the prefixes {prefix!r}, {others}: the first is read"
        )
    found = {
        name.removeprefix(prefix): leaf for name, leaf in plain.items() if name.startswith(prefix)
    }
    if prefix:
        notes.append(f"names of tensors were read without the prefix {prefix!r}")
    if omitted := [name for name in plain if not name.startswith(prefix)]:
        some = ", ".join(omitted[:_SHOWN])
        notes.append(f"{len(omitted)} tensors without that prefix were omitted, such as {some}")
    return Named(found, notes, is_recognized=True, has_transformer=_has_transformer(found))


def _prefixes(names: Iterable[str]) -> list[str]:
    """Returns what precedes a model's own names, for the first models among them."""
    names = list(names)
    for mark in _MARKS:
        prefixes = [
            name.removesuffix(mark) for name in names if name == mark or name.endswith(f".{mark}")
        ]
        if prefixes:
            break
    whole = []
    for prefix in prefixes[: 1 + _SHOWN]:  # A file could have one for each of its names.
        outer = prefix.removesuffix(TRANSFORMER)
        # The softmax tells a model of Hugging Face from another one that is the attribute
        # `transformer`.
        is_inner = any(name.startswith(f"{prefix}{_SOFTMAX}") for name in names)
        whole.append(prefix if is_inner else outer)
    return whole


def _has_transformer(names: Iterable[str]) -> bool:
    return any(name.startswith(TRANSFORMER) for name in names)
