"""A model's tensors by other implementations' names, written out without the table of
`txl_jax.interop.original`.

A fault in that table cancels out where one and the same table writes a file and reads it.
"""

import numpy as np

from txl_jax.config import Encoding, ModelConfig
from txl_jax.interop.original import Format


def tensors(params: dict, config: ModelConfig, format: Format) -> dict[str, np.ndarray]:
    """Every name of an implementation's state_dict, those of shared tensors too."""
    found: dict[str, np.ndarray] = {}
    layers = params["stack"]["layers"]
    for layer in range(config.n_layer):
        found |= _of_layer(layers, layer, config)
    found |= _of_positions(params, config, format)
    if format is Format.HUGGINGFACE:
        found |= _embedding(params, config)
        found = {f"transformer.{name}": value for name, value in found.items()}
        return found | _softmax(params, config, tails_in_order=True)
    return (
        found
        | _embedding(params, config)
        | _softmax(params, config, tails_in_order=format is Format.TENSORFLOW)
    )


def _of_layer(layers: dict, layer: int, config: ModelConfig) -> dict[str, np.ndarray]:
    """Matrices are [out, in].

    Queries, keys and values are stacked in this order, with the heads of each together.
    """
    attention = {
        name: value[layer] for name, value in layers["attention"].items() if name != "positions"
    }

    def heads_first(name: str) -> np.ndarray:
        kernel = attention[name]  # [D, H, E]
        return kernel.reshape(config.d_model, -1).T

    if config.encoding in (Encoding.AL_RFOU, Encoding.VASWANI):
        projections = {
            "dec_attn.q_net.weight": heads_first("query"),
            "dec_attn.kv_net.weight": np.concatenate([heads_first("key"), heads_first("value")]),
        }
    else:
        stacked = [heads_first("query"), heads_first("key"), heads_first("value")]
        projections = {"dec_attn.qkv_net.weight": np.concatenate(stacked)}
    if config.encoding is Encoding.RELATIVE:
        projections["dec_attn.r_net.weight"] = heads_first("position_key")

    feed_forward = {name: value[layer] for name, value in layers["feed_forward"].items()}
    of_layer = projections | {
        "dec_attn.o_net.weight": attention["output"].reshape(-1, config.d_model).T,
        "dec_attn.layer_norm.weight": layers["attention_norm"]["scale"][layer],
        "dec_attn.layer_norm.bias": layers["attention_norm"]["bias"][layer],
        "pos_ff.CoreNet.0.weight": feed_forward["inner_kernel"].T,
        "pos_ff.CoreNet.0.bias": feed_forward["inner_bias"],
        "pos_ff.CoreNet.3.weight": feed_forward["outer_kernel"].T,
        "pos_ff.CoreNet.3.bias": feed_forward["outer_bias"],
        "pos_ff.layer_norm.weight": layers["feed_forward_norm"]["scale"][layer],
        "pos_ff.layer_norm.bias": layers["feed_forward_norm"]["bias"][layer],
    }
    return {f"layers.{layer}.{name}": value for name, value in of_layer.items()}


def _of_positions(params: dict, config: ModelConfig, format: Format) -> dict[str, np.ndarray]:
    """Biases and tables. The release's tables begin with the greatest distance, ours with 0."""
    layers = params["stack"]["layers"]
    found: dict[str, np.ndarray] = {}
    if config.encoding in (Encoding.RELATIVE, Encoding.VASWANI):
        exponents = np.arange(0, config.d_model, 2) / config.d_model
        found["pos_emb.inv_freq"] = (1 / 10000**exponents).astype(np.float32)
    if config.encoding is Encoding.SHAW:
        positions = layers["attention"]["positions"]
        found["r_emb"] = positions["key"][:, ::-1]
        found["r_bias"] = positions["score"][:, ::-1]
        found["r_w_bias"] = positions["content"]
    if config.encoding is Encoding.AL_RFOU:
        vectors = layers["positions"]["vector"][:, ::-1]  # [N, P, D]
        found["r_emb"] = vectors.reshape(*vectors.shape[:2], config.n_head, config.d_head)
    if config.encoding is not Encoding.RELATIVE:
        return found

    biases = layers["biases"] if config.untie_r else params["stack"]["biases"]
    u, v = biases["content"], biases["position"]
    if not config.untie_r or format is not Format.HUGGINGFACE:
        found |= {"r_w_bias": u, "r_r_bias": v}
    if format is Format.HUGGINGFACE:  # It has them in every layer, and the shared ones too.
        for layer in range(config.n_layer):
            found[f"layers.{layer}.dec_attn.r_w_bias"] = u[layer] if config.untie_r else u
            found[f"layers.{layer}.dec_attn.r_r_bias"] = v[layer] if config.untie_r else v
    return found


def _embedding(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    found = {}
    for name, value in params["embedding"].items():
        kind, _, cluster = name.partition("_")
        if kind == "table":
            found[f"word_emb.emb_layers.{cluster}.weight"] = value
        else:
            found[f"word_emb.emb_projs.{cluster}"] = value.T
    return found


def _softmax(params: dict, config: ModelConfig, *, tails_in_order: bool) -> dict[str, np.ndarray]:
    """With div_val 1 there is one table for all clusters, and one projection of the embedding."""
    softmax, embedding = params["softmax"], params["embedding"]
    n_table = 1 if config.div_val == 1 else len(config.cutoffs) + 1
    bounds = [0, *(config.cutoffs if n_table > 1 else ()), len(softmax["bias"])]
    found = {}
    for cluster in range(n_table):
        tables = embedding if config.tie_weight else softmax
        found[f"crit.out_layers.{cluster}.weight"] = tables[f"table_{cluster}"]
        found[f"crit.out_layers.{cluster}.bias"] = softmax["bias"][
            bounds[cluster] : bounds[cluster + 1]
        ]
    has_projections = "projection_0" in embedding
    for cluster in range(len(config.cutoffs) + 1 if has_projections else 0):
        is_tied = bool(config.tie_projs) and config.tie_projs[cluster]
        of_embedding = embedding[f"projection_{min(cluster, n_table - 1)}"]
        projection = of_embedding if is_tied else softmax[f"projection_{cluster}"]
        found[f"crit.out_projs.{cluster}"] = projection.T
    if config.cutoffs:
        order = slice(None) if tails_in_order else slice(None, None, -1)
        found["crit.cluster_weight"] = softmax["tail_table"][order]
        found["crit.cluster_bias"] = softmax["tail_bias"][order]
    return found
