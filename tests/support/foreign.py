"""Files of other implementations, written from our own parameters without those implementations."""

import dataclasses
import json
from pathlib import Path

import flax.traverse_util
import jax
import numpy as np

from support import tiny, torch_bytes
from support.tiny_run import assert_equal
from txl_jax.config import EvalConfig, ModelConfig, NormPlace
from txl_jax.interop import huggingface, leaves, original
from txl_jax.interop.formats import Model
from txl_jax.interop.original import Format

V = tiny.V
CUTOFFS = (4, 9)
# Combinations of the settings that decide on names, except tie_projs, which a file without
# projections does not store.
CONFIGS = {
    "full softmax": {},
    "nothing tied": {"tie_weight": False, "untie_r": True},
    "pre-norm": {"layer_norm": NormPlace.PRE},
    "d_embed, tied projection": {"d_embed": 8, "tie_projs": (True,)},
    "d_embed": {"d_embed": 8},
    "div_val 1": {"cutoffs": CUTOFFS, "d_embed": 8, "tie_projs": (False, True, True)},
    "div_val 1, no projections": {"cutoffs": CUTOFFS, "untie_r": True},
    "div_val 2": {
        "cutoffs": CUTOFFS,
        "div_val": 2,
        "tie_projs": (False, True, True),
        "untie_r": True,
    },
    "div_val 4, nothing tied": {
        "cutoffs": CUTOFFS,
        "d_embed": 16,
        "div_val": 4,
        "tie_weight": False,
    },
}
LENGTHS = EvalConfig(mem_len=7, clamp_len=5, same_length=True)
WORDS = ("<eos>", "the", "<unk>", "of", ",", "a", "Ünder", "@-@", "b", "c", "d", "e", "f")


def to_tree(found: leaves.Leaves) -> dict:
    """Reads all leaves into nested parameters."""
    arrays = {path: leaf.read() for path, leaf in found.items()}
    return flax.traverse_util.unflatten_dict(arrays, sep="/")


def to_flax(tensors: dict[str, np.ndarray], config: ModelConfig, **options) -> dict:
    """The nested parameters of tensors by the names of a release.

    `options` are passed to `to_leaves`.
    """
    return to_tree(original.to_leaves(leaves.from_tree(tensors), config, **options))


def make(preset: str, **changes) -> tuple[ModelConfig, dict]:
    """A config and random parameters of float32."""
    model = tiny.make(compat=tiny.compat_config(preset), **changes)
    return model.config, jax.tree.map(np.asarray, tiny.variables(model)["params"])


def check(found: Model, config: ModelConfig, params: dict) -> None:
    """Asserts that the parameters, and the settings that follow from them, are as written."""
    assert_equal(to_tree(found.leaves), params)
    inferred = found.info.config.model
    not_inferred = {"dropout", "init_std", "projection_init_std", "compat"}
    for field in dataclasses.fields(ModelConfig):
        if field.name not in not_inferred:
            assert getattr(inferred, field.name) == getattr(config, field.name), field.name
    assert found.info.vocabulary.size == V


def huggingface_folder(
    folder: Path, config: ModelConfig, params: dict, *, write=torch_bytes.write_legacy
) -> Path:
    """The directory of `save_pretrained`, with its weights as torch writes them.

    Shared tensors share storages.
    """
    folder.mkdir(exist_ok=True)
    tensors = original.from_flax(params, config, format=Format.HUGGINGFACE)
    arguments = huggingface.config_of(config, LENGTHS, vocab_size=V)
    arguments["model_type"] = "transfo-xl"
    (folder / "config.json").write_text(json.dumps(arguments))
    write(folder / "pytorch_model.bin", tensors)
    return folder


def facts_of(config: ModelConfig) -> dict:
    """The keyword arguments of MemTransformerLM, with two that our reader does not know."""
    lengths = dataclasses.replace(LENGTHS, segment_len=3)
    arguments = original.arguments_of(config, lengths, vocab_size=V)
    return arguments | {"dtype": None, "sample_softmax": -1}


# Arguments that MemTransformerLM keeps as attributes, in its order.
_KEPT = (
    "n_token",
    "d_embed",
    "d_model",
    "n_head",
    "d_head",
    "n_layer",
    "tgt_len",
    "mem_len",
    "ext_len",
    "attn_type",
    "same_length",
    "clamp_len",
)


def pickled_module(config: ModelConfig, params: dict) -> torch_bytes.Object:
    """The module that the release pickles to model.pt, with the attributes that it keeps."""
    facts = facts_of(config)
    clusters = {"cutoffs": [*config.cutoffs, V], "div_val": config.div_val, "n_token": V}
    tree: dict = {"word_emb": dict(clusters), "crit": dict(clusters), "layers": {}}
    tree |= {name: facts[name] for name in _KEPT}
    for layer in range(config.n_layer):
        attention = {"pre_lnorm": facts["pre_lnorm"], "n_head": config.n_head}
        tree["layers"][str(layer)] = {"dec_attn": attention}

    for name, tensor in original.from_flax(params, config).items():
        *path, last = name.split(".")
        part = tree
        for step in path:
            part = part.setdefault(step, {})
        kind = "_buffers" if last == "inv_freq" else "_parameters"
        part.setdefault(kind, {})[last] = tensor
    return _module(tree)


def _module(tree: dict) -> torch_bytes.Object:
    """A module from its attributes, its submodules as such trees, `_parameters` and `_buffers`."""
    parts = {}
    others = {}
    for name, value in tree.items():
        if not isinstance(value, dict):
            others[name] = value
        elif not name.startswith("_"):
            parts[name] = _module(value)
    return torch_bytes.module(
        "mem_transformer.Part",
        parameters=tree.get("_parameters"),
        buffers=tree.get("_buffers"),
        **parts,
        **others,
    )


def nvidia_checkpoint(config, params) -> dict:
    """A checkpoint as NVIDIA's train.py saves it, with the optimizer."""
    state = {}
    shared = original.aliases(config)
    for name, value in original.from_flax(params, config).items():
        if name not in shared:
            state[_nvidia_name(name)] = value
        if name.startswith("word_emb.emb_projs."):
            cluster = name.rpartition(".")[2]
            state[f"crit.shared_out_projs.{cluster}"] = value
    state["pos_emb.inv_freq"] = state["pos_emb.inv_freq"].astype(np.float16).astype(np.float32)
    vocab = torch_bytes.Object(
        torch_bytes.Name("utils.vocabulary", "Vocab"),
        {"special": ["<eos>"], "lower_case": False, "idx2sym": list(WORDS), "unk_idx": 2},
    )
    arguments = torch_bytes.Object(
        torch_bytes.Name("argparse", "Namespace"), {"lr": 0.01, "n_head": 99}
    )
    return {
        "args": arguments,
        "model_config": facts_of(config),
        "model_state": state,
        "optimizer_state": {"state": {0: {"exp_avg": np.zeros((2, 2), np.float32)}}},
        "vocab": vocab,
        "amp_state": None,
        "train_step": 3,
    }


def _nvidia_name(name: str) -> str:
    """NVIDIA's name of a tensor: its clusters' weights and biases are in two lists."""
    if not name.startswith("crit.out_layers."):
        return name
    _, _, cluster, kind = name.split(".")
    if kind == "bias":
        return f"crit.out_layers_biases.{cluster}"
    return f"crit.out_layers_weights.{cluster}"
