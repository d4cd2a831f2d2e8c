"""Names of tensors, without what wrappers and frameworks put before and into them.

A model that was compiled, replicated, or made an attribute of something else has longer names than
its own class gives. This is the one place that removes what was added, for all kinds of files. A
model is recognized by the embedding's table or by a layer's first matrix, which every
Transformer-XL has.
"""

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
# Prefixes that are looked at. A file could have one for each of its names.
_MAX_PREFIXES = 1 + _SHOWN


class Named(NamedTuple):
    """Tensors by the names that an implementation's class gives them."""

    tensors: dict[str, Leaf]
    # What was removed from names, and which tensors were omitted: lines for the user.
    notes: list[str]
    # Whether the tensors are a Transformer-XL's.
    is_recognized: bool
    # Whether all names but the softmax's begin with `TRANSFORMER`, as Hugging Face's do.
    has_transformer: bool = False


def without_wrappers(name: str) -> str:
    """Returns a name without its parts that are wrappers.

    For example, "module.layers.0._orig_mod.u" becomes "layers.0.u".
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def known(tensors: Leaves) -> Named:
    """Returns a model's tensors by the names that its class gives them.

    Wrappers, and a prefix that all names share, are removed. Tensors without the prefix belong to
    something else, and are omitted with a note.

    Raises:
      UserError: If two names become one.
    """
    plain: dict[str, Leaf] = {}
    for name, leaf in tensors.items():
        short = without_wrappers(name)
        # Otherwise one of two tensors would silently be read as the other.
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

    prefixes = _prefixes(list(plain))
    if not prefixes:
        return Named(dict(tensors), [], is_recognized=False)
    prefix = prefixes[0]
    if len(prefixes) > 1:
        others = ", ".join(map(repr, prefixes[1:]))
        notes.append(
            f"there is a model behind each of the prefixes {prefix!r}, {others}: the first is read"
        )

    without_prefix: dict[str, Leaf] = {}
    omitted: list[str] = []
    for name, leaf in plain.items():
        if name.startswith(prefix):
            without_prefix[name.removeprefix(prefix)] = leaf
        else:
            omitted.append(name)
    if prefix:
        notes.append(f"names of tensors were read without the prefix {prefix!r}")
    if omitted:
        examples = ", ".join(omitted[:_SHOWN])
        notes.append(f"{len(omitted)} tensors without that prefix were omitted, such as {examples}")
    return Named(
        tensors=without_prefix,
        notes=notes,
        is_recognized=True,
        has_transformer=any(name.startswith(TRANSFORMER) for name in without_prefix),
    )


def _prefixes(names: list[str]) -> list[str]:
    """Returns what precedes the names that a model's class gives, for the first models.

    The result is empty if no name is a Transformer-XL's.
    """
    prefixes: list[str] = []
    for mark in _MARKS:
        for name in names:
            if name == mark or name.endswith(f".{mark}"):
                prefixes.append(name.removesuffix(mark))
        # The next mark is for models without this one.
        if prefixes:
            break
    return [_without_transformer(prefix, names) for prefix in prefixes[:_MAX_PREFIXES]]


def _without_transformer(prefix: str, names: list[str]) -> str:
    """Returns a prefix without the "transformer." that Hugging Face's names begin with.

    It stays if the softmax's names have it too: then the model is the attribute `transformer` of
    something else.
    """
    if any(name.startswith(f"{prefix}{_SOFTMAX}") for name in names):
        return prefix
    return prefix.removesuffix(TRANSFORMER)
