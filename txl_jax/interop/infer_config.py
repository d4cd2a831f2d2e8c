"""Infers a model's configuration from its tensors' names and shapes, and from a file's metadata.

Names are the authors' PyTorch release's. Shapes determine almost everything. The facts,
MemTransformerLM's keyword arguments as a file records them, add the place of the layer norm, the
cutoffs of a softmax whose clusters have one width, the number of heads with added sinusoids, and
the evaluation lengths. Reading the tensors finds contradictions.
"""

import itertools
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from txl_jax.config import Encoding, EvalConfig, ModelConfig, NormPlace
from txl_jax.errors import UserError
from txl_jax.interop.leaves import Leaves, is_same

# Cutoffs of the published models by vocabulary size. NVIDIA's files with other cutoffs record them.
_PUBLISHED_CUTOFFS = {267_735: (20_000, 40_000, 200_000), 793_470: (60_000, 100_000, 640_000)}
_SIZES = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "d_embed", "div_val")
# Longest list of a file. The sizes of clusters are powers of their number.
_MAX_CLUSTERS = 1000
_MAX_INTEGER = (1 << 63) - 1  # Of int64.
_LISTS = {"cutoffs": int, "tie_projs": bool}
_FLAGS = ("untie_r", "pre_lnorm", "tie_weight", "same_length", "proj_share_all_but_first")
_INTEGERS = (*_SIZES, "n_token", "mem_len", "clamp_len", "tgt_len")
# Types of the facts that are used, or of their elements.
_KINDS: dict[str, type] = dict.fromkeys(_INTEGERS, int) | dict.fromkeys(_FLAGS, bool) | _LISTS
# Minimum values of facts.
_LEAST = dict.fromkeys((*_SIZES, "n_token"), 1) | {"mem_len": 0}
# Hugging Face's names of facts.
_OTHER_NAMES = {"n_token": "vocab_size", "tie_weight": "tie_word_embeddings"}


class InferredConfig(NamedTuple):
    """The configuration of a model that another implementation trained."""

    model: ModelConfig  # Sizes, ties and encoding.
    vocab_size: int
    lengths: EvalConfig
    notes: list[str]  # A line for the user per choice that the file leaves open.


def infer(tensors: Leaves, facts: Mapping[str, Any]) -> InferredConfig:
    """Infers the configuration. Only tensors that may be shared are read.

    Args:
      tensors: Tensors by the names of the authors' PyTorch release.
      facts: Keyword arguments of MemTransformerLM, as a file records them.

    Raises:
      UserError: If a tensor that decides on a size is missing or has another rank, a fact has
        another type, or the facts lack something that the shapes leave open.
    """
    facts = _checked(facts)
    notes: list[str] = []
    tables = _tables(tensors)
    rows_in_tables = sum(rows for rows, _ in tables)
    d_inner, d_model = _shape(tensors, "layers.0.pos_ff.CoreNet.0.weight", 2)
    layers_with_tensors = _num_layers(tensors)

    values: dict[str, Any] = {
        "n_layer": layers_with_tensors,
        "d_model": d_model,
        "d_inner": d_inner,
        "d_embed": tables[0][1],
        "div_val": _div_val(tables),
        "cutoffs": _cutoffs(tensors, tables, facts, rows_in_tables),
    }
    values |= _attention(tensors, facts)
    values |= {name: facts[name] for name in (*_SIZES, "untie_r") if name in facts}
    # A file can claim any number of layers, and a parameter is named per layer. One layer too many
    # is enough to find that its tensors are missing.
    values["n_layer"] = min(values["n_layer"], layers_with_tensors + 1)
    if values["d_embed"] == values["d_model"]:
        values["d_embed"] = None

    if "pre_lnorm" not in facts:
        notes.append(
            "the file does not record the place of the layer norm: "
            "post-norm, like all published models"
        )
    values["layer_norm"] = NormPlace.PRE if facts.get("pre_lnorm") else NormPlace.POST

    # Ties depend on the clusters, which the configuration so far determines.
    values |= _ties(tensors, ModelConfig(**values), facts)
    config = ModelConfig(**values)
    config.validate()
    vocab_size = facts.get("n_token", rows_in_tables)
    config.validate_vocabulary(vocab_size)
    return InferredConfig(config, vocab_size, _lengths(facts, notes), notes)


def _shape(tensors: Leaves, name: str, *ranks: int) -> tuple[int, ...]:
    """Returns a tensor's shape, which must have one of these ranks."""
    if name not in tensors:
        raise UserError(f"tensor {name} is missing. The names do not belong to a Transformer-XL.")
    # A file may have any shape for it, and sizes are unpacked, divided and used as divisors.
    shape = tensors[name].shape
    if len(shape) not in ranks or 0 in shape:
        raise UserError(
            f"tensor {name} must have rank {' or '.join(map(str, ranks))} and no axis of 0, "
            f"got shape {list(shape)}"
        )
    return shape


def _num_layers(tensors: Leaves) -> int:
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    # A file that was cut or put together from parts may lack a layer.
    missing = set(map(str, range(len(numbers)))) - numbers
    if missing:
        raise UserError(
            f"tensors of layer {min(missing)} are missing, but {len(numbers)} other layers exist"
        )
    return len(numbers)


def _tables(tensors: Leaves) -> list[tuple[int, ...]]:
    """Returns the shapes of the embedding's tables, one per cluster or one for all."""
    shapes = [_shape(tensors, "word_emb.emb_layers.0.weight", 2)]
    for cluster in itertools.count(1):
        name = f"word_emb.emb_layers.{cluster}.weight"
        if name not in tensors:
            break
        shapes.append(_shape(tensors, name, 2))
    return shapes


def _div_val(tables: list[tuple[int, ...]]) -> int:
    """Returns the factor by which each cluster is narrower than the one before."""
    if len(tables) == 1:
        return 1
    _, head_width = tables[0]
    _, tail_width = tables[1]
    return max(head_width // tail_width, 2)


def _cutoffs(
    tensors: Leaves, tables: list[tuple[int, ...]], facts: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """Returns the cutoffs: from the tables, or from the facts if all clusters have one table."""
    if len(tables) > 1:
        return tuple(itertools.accumulate(rows for rows, _ in tables[:-1]))
    if "cutoffs" in facts:
        return tuple(facts["cutoffs"])
    if "crit.cluster_weight" not in tensors:
        return ()
    num_tails, width = _shape(tensors, "crit.cluster_weight", 2)
    published = _PUBLISHED_CUTOFFS.get(vocab_size, ())
    if len(published) == num_tails:
        return published
    raise UserError(
        f"tensor crit.cluster_weight has shape {[num_tails, width]}, but no shape gives the "
        f"cutoffs of {num_tails} clusters in {vocab_size} tokens. "
        'Put a config.json with {"cutoffs": [...]} next to it.'
    )


def _attention(tensors: Leaves, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the encoding, the heads' sizes and whether layers have their own u and v."""
    _, width_of_heads = _shape(tensors, "layers.0.dec_attn.o_net.weight", 2)
    if "layers.0.dec_attn.r_net.weight" in tensors:
        # u is [H, E] if the layers share it, and otherwise [N, H, E], or [H, E] by layer in
        # Hugging Face's files. Those have the shared one too if all are equal.
        u_of_layer = "layers.0.dec_attn.r_w_bias"
        if u_of_layer in tensors and "r_w_bias" not in tensors:
            n_head, d_head = _shape(tensors, u_of_layer, 2)
            untie_r = True
        else:
            shape = _shape(tensors, "r_w_bias", 2, 3)
            n_head, d_head = shape[-2:]
            untie_r = len(shape) == 3
        return {
            "encoding": Encoding.RELATIVE,
            "n_head": n_head,
            "d_head": d_head,
            "untie_r": untie_r,
        }

    # Al-Rfou's table is cut into heads like Shaw's, though it is added to the input.
    if "r_bias" in tensors or "r_emb" in tensors:
        _, num_positions, n_head, d_head = _shape(tensors, "r_emb", 4)
        return {
            "encoding": Encoding.SHAW if "r_bias" in tensors else Encoding.AL_RFOU,
            "n_head": n_head,
            "d_head": d_head,
            "num_positions": num_positions,
        }

    if "n_head" not in facts:
        raise UserError(
            "the model adds sinusoids to its input, so no shape determines the number of heads. "
            'Put a config.json with {"n_head": ...} next to it.'
        )
    return {
        "encoding": Encoding.VASWANI,
        "n_head": facts["n_head"],
        "d_head": width_of_heads // facts["n_head"],
    }


def _ties(tensors: Leaves, config: ModelConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tables and projections that embedding and softmax share.

    They are determined by the facts, or else by equal values.
    """
    tie_weight = facts.get("tie_weight")
    if tie_weight is None:
        tie_weight = _is_tied(
            tensors, "crit.out_layers.0.weight", first="word_emb.emb_layers.0.weight"
        )

    tie_projs = facts.get("tie_projs")
    if tie_projs is None and "proj_share_all_but_first" in facts:
        tie_projs = [False] + [facts["proj_share_all_but_first"]] * (config.n_cluster - 1)
    if tie_projs is None and config.has_projections:
        tie_projs = []
        for cluster in range(config.n_cluster):
            # With div_val 1, all clusters have one table and one projection of the embedding.
            table = cluster if config.div_val > 1 else 0
            is_tied = _is_tied(
                tensors, f"crit.out_projs.{cluster}", first=f"word_emb.emb_projs.{table}"
            )
            tie_projs.append(is_tied)
    # An empty list is how the config says that no projection is shared.
    if not tie_projs or not any(tie_projs):
        tie_projs = ()
    return {"tie_weight": tie_weight, "tie_projs": tuple(tie_projs)}


def _is_tied(tensors: Leaves, name: str, *, first: str) -> bool:
    """Returns whether a tensor of the softmax is omitted, or equal to the embedding's."""
    if name not in tensors:
        return True
    return first in tensors and is_same(tensors[name], tensors[first])


def _lengths(facts: Mapping[str, Any], notes: list[str]) -> EvalConfig:
    """Returns the evaluation lengths from the facts, with our defaults for the rest.

    Adds a note to `notes` if the facts have no lengths.
    """
    defaults = EvalConfig()
    if "mem_len" not in facts:
        notes.append(
            "the file does not record lengths: evaluation uses segments of "
            f"{defaults.segment_len}, a memory of {defaults.mem_len} and a clamp of "
            f"{defaults.clamp_len}, unless you set others"
        )
        return defaults
    lengths = EvalConfig(
        segment_len=max(facts.get("tgt_len", 0), 0) or defaults.segment_len,
        mem_len=facts["mem_len"],
        clamp_len=max(facts.get("clamp_len", 0), 0) or None,
        same_length=facts["mem_len"] > 0 and facts.get("same_length", False),
    )
    lengths.validate()
    return lengths


def _checked(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that are used, by the release's names.

    Raises:
      UserError: If a fact has another type, or a value that is not possible.
    """
    checked: dict[str, Any] = {}
    for key in _KINDS:
        other_name = _OTHER_NAMES.get(key, key)
        value = facts.get(key, facts.get(other_name))
        # The authors' default of d_embed is -1, for d_model.
        if value is None or (key == "d_embed" and value == -1):
            continue
        if not _is_valid(key, value):
            raise UserError(
                f"{key} must be a valid value, got {reprlib.repr(value)}. Correct or remove it."
            )
        checked[key] = value
    return checked


def _is_valid(key: str, value: Any) -> bool:
    """Returns whether a fact has its type, and a value that can be computed with."""
    numbers = [value]
    if key in _LISTS:
        # A long list would make as many clusters, whose sizes are powers.
        if not isinstance(value, list | tuple) or len(value) > _MAX_CLUSTERS:
            return False
        numbers = list(value)
    for number in numbers:
        # JSON and pickles may have any value here. True, which Python takes for 1, is not a size.
        has_type = type(number) is _KINDS[key]
        # Arithmetic with integers of a million digits takes long.
        if not has_type or number > _MAX_INTEGER:
            return False
    return key not in _LEAST or value >= _LEAST[key]
