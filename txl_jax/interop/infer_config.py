"""Infers a model's configuration from its tensors' names and shapes, and from a file's metadata.

Names are the authors' PyTorch release's. Shapes give almost everything. The facts,
MemTransformerLM's keyword arguments as a file records them, add the place of the layer norm, the
cutoffs of a softmax whose clusters have one width, the number of heads with added sinusoids, and
the evaluation lengths. Reading the tensors finds contradictions.
"""

import itertools
import reprlib
from collections.abc import Mapping
from typing import Any

from txl_jax.config import Encoding, EvalConfig, ModelConfig, NormPlace
from txl_jax.errors import UserError
from txl_jax.interop.leaves import Leaves, is_same

# Cutoffs of the published models by vocabulary size. NVIDIA's files with other cutoffs record them.
_PUBLISHED_CUTOFFS = {267_735: (20_000, 40_000, 200_000), 793_470: (60_000, 100_000, 640_000)}
_SIZES = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "d_embed", "div_val")
_MAX_CLUSTERS = 1000  # Of the adaptive softmax. The sizes of clusters are powers of their number.
_LISTS = {"cutoffs": int, "tie_projs": bool}
_FLAGS = ("untie_r", "pre_lnorm", "tie_weight", "same_length", "proj_share_all_but_first")
_INTEGERS = (*_SIZES, "n_token", "mem_len", "clamp_len", "tgt_len")
_KINDS: dict[str, type] = dict.fromkeys(_INTEGERS, int) | dict.fromkeys(_FLAGS, bool) | _LISTS
_LEAST = dict.fromkeys((*_SIZES, "n_token"), 1) | {"mem_len": 0}
_OTHER_NAMES = {"n_token": "vocab_size", "tie_weight": "tie_word_embeddings"}


def infer(
    tensors: Leaves, facts: Mapping[str, Any]
) -> tuple[ModelConfig, int, EvalConfig, list[str]]:
    """Infers sizes, ties and encoding, V, the lengths, and one line per choice that is left open.

    Only tensors that may be shared are read. Raises `UserError` if a tensor that decides on a size
    is missing or has another rank, a fact has another type, or the facts lack something that the
    shapes leave open.
    """
    facts = _checked(facts)
    notes: list[str] = []
    tables = _tables(tensors)
    vocab_size = sum(rows for rows, _ in tables)
    d_inner, d_model = _shape(tensors, "layers.0.pos_ff.CoreNet.0.weight", 2)
    n_layer = _num_layers(tensors)
    values: dict[str, Any] = {
        "n_layer": n_layer,
        "d_model": d_model,
        "d_inner": d_inner,
        "d_embed": tables[0][1],
        "div_val": max(tables[0][1] // tables[1][1], 2) if len(tables) > 1 else 1,
        "cutoffs": _cutoffs(tensors, tables, facts, vocab_size),
        **_attention(tensors, facts),
    }
    values |= {size: facts[size] for size in (*_SIZES, "untie_r") if size in facts}
    # A huge number is wrong as soon as one layer is missing.
    values["n_layer"] = min(values["n_layer"], n_layer + 1)
    if values["d_embed"] == values["d_model"]:
        values["d_embed"] = None
    if "pre_lnorm" not in facts:
        notes.append(
            "the file does not record the place of the layer norm: "
            "post-norm, like all published models"
        )
    values["layer_norm"] = NormPlace.PRE if facts.get("pre_lnorm") else NormPlace.POST
    values |= _ties(tensors, ModelConfig(**values), facts)
    config = ModelConfig(**values)
    config.validate()
    vocab_size = facts.get("n_token", vocab_size)
    config.validate_vocabulary(vocab_size)
    return config, vocab_size, _lengths(facts, notes), notes


def _shape(tensors: Leaves, name: str, *ranks: int) -> tuple[int, ...]:
    """Returns a tensor's shape, which must have one of these ranks."""
    if name not in tensors:
        raise UserError(f"tensor {name} is missing. The names are not a Transformer-XL's.")
    shape = tensors[name].shape
    if len(shape) not in ranks or 0 in shape:
        wanted = " or ".join(map(str, ranks))
        raise UserError(
            f"tensor {name} must have rank {wanted} and no axis of 0, got shape {list(shape)}"
        )
    return shape


def _num_layers(tensors: Leaves) -> int:
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if missing := set(map(str, range(len(numbers)))) - numbers:
        raise UserError(
            f"there are tensors for {len(numbers)} layers, but not for layer {min(missing)}"
        )
    return len(numbers)


def _tables(tensors: Leaves) -> list[tuple[int, ...]]:
    """Returns the shapes of the embedding's tables, one per cluster or one for all."""
    names = (f"word_emb.emb_layers.{cluster}.weight" for cluster in itertools.count())
    found = [_shape(tensors, next(names), 2)]
    return found + [
        _shape(tensors, name, 2) for name in itertools.takewhile(tensors.__contains__, names)
    ]


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
    tails, width = _shape(tensors, "crit.cluster_weight", 2)
    known = _PUBLISHED_CUTOFFS.get(vocab_size, ())
    if len(known) == tails:
        return known
    raise UserError(
        f"tensor crit.cluster_weight has shape {[tails, width]}, but no shape gives the cutoffs "
        f"of {tails} clusters in {vocab_size} tokens. "
        'Put a config.json with {"cutoffs": [...]} next to it.'
    )


def _attention(tensors: Leaves, facts: Mapping[str, Any]) -> dict[str, Any]:
    heads = _shape(tensors, "layers.0.dec_attn.o_net.weight", 2)[1]
    if "layers.0.dec_attn.r_net.weight" in tensors:
        # Hugging Face's, which has the shared one too if all are equal.
        of_layer = "layers.0.dec_attn.r_w_bias"
        by_layer = of_layer in tensors and "r_w_bias" not in tensors
        *layers, n_head, d_head = (
            _shape(tensors, of_layer, 2) if by_layer else _shape(tensors, "r_w_bias", 2, 3)
        )
        untie_r = by_layer or bool(layers)
        return {
            "encoding": Encoding.RELATIVE,
            "n_head": n_head,
            "d_head": d_head,
            "untie_r": untie_r,
        }
    # Al-Rfou's is cut into heads too, though it is added to the input.
    if "r_bias" in tensors or "r_emb" in tensors:
        _, num_positions, n_head, d_head = _shape(tensors, "r_emb", 4)
        encoding = Encoding.SHAW if "r_bias" in tensors else Encoding.AL_RFOU
        return {
            "encoding": encoding,
            "n_head": n_head,
            "d_head": d_head,
            "num_positions": num_positions,
        }
    if "n_head" not in facts:
        missing = (
            "the model adds sinusoids to its input, so no shape determines the number of heads"
        )
        raise UserError(f'{missing}. Put a config.json with {{"n_head": ...}} next to it.')
    return {
        "encoding": Encoding.VASWANI,
        "n_head": facts["n_head"],
        "d_head": heads // facts["n_head"],
    }


def _ties(tensors: Leaves, config: ModelConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tables and projections that embedding and softmax share.

    They are determined by the facts, or else by equal values.
    """

    def tied(own: str, other: str) -> bool:
        return own not in tensors or (other in tensors and is_same(tensors[own], tensors[other]))

    tie_weight = facts.get("tie_weight")
    if tie_weight is None:
        tie_weight = tied("crit.out_layers.0.weight", "word_emb.emb_layers.0.weight")
    tie_projs = facts.get("tie_projs")
    if tie_projs is None and "proj_share_all_but_first" in facts:
        tie_projs = [False] + [facts["proj_share_all_but_first"]] * (config.n_cluster - 1)
    if tie_projs is None and config.has_projections:
        tables = range(config.n_cluster) if config.div_val > 1 else [0] * config.n_cluster
        tie_projs = [
            tied(f"crit.out_projs.{c}", f"word_emb.emb_projs.{table}")
            for c, table in enumerate(tables)
        ]
    return {
        "tie_weight": tie_weight,
        "tie_projs": tuple(tie_projs) if tie_projs and any(tie_projs) else (),
    }


def _lengths(facts: Mapping[str, Any], notes: list[str]) -> EvalConfig:
    """Returns the evaluation lengths from the facts, with our defaults for the rest."""
    config = EvalConfig()
    if "mem_len" not in facts:
        notes.append(
            f"the file does not record lengths: evaluation uses segments of {config.segment_len}, "
            f"a memory of {config.mem_len} and a clamp of {config.clamp_len}, unless "
            "you set others"
        )
        return config
    found = EvalConfig(
        segment_len=max(facts.get("tgt_len", 0), 0) or config.segment_len,
        mem_len=facts["mem_len"],
        clamp_len=max(facts.get("clamp_len", 0), 0) or None,
        same_length=facts["mem_len"] > 0 and facts.get("same_length", False),
    )
    found.validate()
    return found


def _checked(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that are used, by the release's names.

    Raises `UserError` for a fact of another type.
    """
    found: dict[str, Any] = {}
    for key, kind in _KINDS.items():
        value = facts.get(key, facts.get(_OTHER_NAMES.get(key, key)))
        if value is None or (key == "d_embed" and value == -1):
            continue
        values = value if key in _LISTS else [value]
        is_list = isinstance(values, list | tuple) and len(values) <= _MAX_CLUSTERS
        valid = is_list and {*map(type, values)} <= {kind} and max(values, default=0) < 1 << 63
        if not valid or (key in _LEAST and value < _LEAST[key]):
            raise UserError(
                f"{key} is {reprlib.repr(value)}, which is not a valid value. Correct or remove it."
            )
        found[key] = value
    return found
