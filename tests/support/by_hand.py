"""A model's tensors by other implementations' names, written out without the table of
`txl_jax.interop.original`.

A fault in that table would cancel out if it both wrote a file and read it.
"""

import numpy as np

from txl_jax.config import Encoding, ModelConfig
from txl_jax.interop.original import Format


def tensors(params: dict, config: ModelConfig, format: Format) -> dict[str, np.ndarray]:
    """Every name in an implementation's state_dict, also the further names of shared tensors."""
    by_name: dict[str, np.ndarray] = {}
    layers = params["stack"]["layers"]
    for layer in range(config.n_layer):
        by_name |= _of_layer(layers, layer, config)
    by_name |= _of_positions(params, config, format)
    by_name |= _embedding(params, config)
    if format is Format.HUGGINGFACE:
        by_name = {f"transformer.{name}": value for name, value in by_name.items()}
    tails_in_order = format in (Format.HUGGINGFACE, Format.TENSORFLOW)
    return by_name | _softmax(params, config, tails_in_order=tails_in_order)


def _of_layer(layers: dict, layer: int, config: ModelConfig) -> dict[str, np.ndarray]:
    """Matrices are [out, in].

    Queries, keys and values are stacked in this order, with the heads of each together.
    """
    attention = layers["attention"]
    feed_forward = layers["feed_forward"]

    def heads_first(name: str) -> np.ndarray:
        kernel = attention[name][layer]  # [D, H, E]
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

    output = attention["output"][layer]  # [H, E, D]
    attention_block = {
        "dec_attn.o_net.weight": output.reshape(-1, config.d_model).T,
        "dec_attn.layer_norm.weight": layers["attention_norm"]["scale"][layer],
        "dec_attn.layer_norm.bias": layers["attention_norm"]["bias"][layer],
    }
    feed_forward_block = {
        "pos_ff.CoreNet.0.weight": feed_forward["inner_kernel"][layer].T,
        "pos_ff.CoreNet.0.bias": feed_forward["inner_bias"][layer],
        "pos_ff.CoreNet.3.weight": feed_forward["outer_kernel"][layer].T,
        "pos_ff.CoreNet.3.bias": feed_forward["outer_bias"][layer],
        "pos_ff.layer_norm.weight": layers["feed_forward_norm"]["scale"][layer],
        "pos_ff.layer_norm.bias": layers["feed_forward_norm"]["bias"][layer],
    }
    by_name = projections | attention_block | feed_forward_block
    return {f"layers.{layer}.{name}": value for name, value in by_name.items()}


def _of_positions(params: dict, config: ModelConfig, format: Format) -> dict[str, np.ndarray]:
    """Biases and tables. The release's tables begin with the greatest distance, ours with 0."""
    layers = params["stack"]["layers"]
    by_name: dict[str, np.ndarray] = {}
    if config.encoding in (Encoding.RELATIVE, Encoding.VASWANI):
        exponents = np.arange(0, config.d_model, 2) / config.d_model
        by_name["pos_emb.inv_freq"] = (1 / 10000**exponents).astype(np.float32)
    if config.encoding is Encoding.SHAW:
        positions = layers["attention"]["positions"]
        by_name["r_emb"] = positions["key"][:, ::-1]
        by_name["r_bias"] = positions["score"][:, ::-1]
        by_name["r_w_bias"] = positions["content"]
    if config.encoding is Encoding.AL_RFOU:
        vectors = layers["positions"]["vector"][:, ::-1]  # [N, P, D]
        by_name["r_emb"] = vectors.reshape(*vectors.shape[:2], config.n_head, config.d_head)
    if config.encoding is Encoding.RELATIVE:
        by_name |= _biases(params["stack"], config, format)
    return by_name


def _biases(stack: dict, config: ModelConfig, format: Format) -> dict[str, np.ndarray]:
    """The biases u and v. Hugging Face has them in every layer, and the shared ones too."""
    in_layers = format is Format.HUGGINGFACE
    by_name: dict[str, np.ndarray] = {}
    if config.untie_r:
        biases = stack["layers"]["biases"]  # [N, H, E]
        if not in_layers:
            return {"r_w_bias": biases["content"], "r_r_bias": biases["position"]}
        for layer in range(config.n_layer):
            by_name[f"layers.{layer}.dec_attn.r_w_bias"] = biases["content"][layer]
            by_name[f"layers.{layer}.dec_attn.r_r_bias"] = biases["position"][layer]
        return by_name

    biases = stack["biases"]  # [H, E]
    by_name = {"r_w_bias": biases["content"], "r_r_bias": biases["position"]}
    if in_layers:
        for layer in range(config.n_layer):
            by_name[f"layers.{layer}.dec_attn.r_w_bias"] = biases["content"]
            by_name[f"layers.{layer}.dec_attn.r_r_bias"] = biases["position"]
    return by_name


def _embedding(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    by_name = {}
    for name, value in params["embedding"].items():
        kind, _, cluster = name.partition("_")
        if kind == "table":
            by_name[f"word_emb.emb_layers.{cluster}.weight"] = value
        else:
            by_name[f"word_emb.emb_projs.{cluster}"] = value.T
    return by_name


def _softmax(params: dict, config: ModelConfig, *, tails_in_order: bool) -> dict[str, np.ndarray]:
    """With div_val 1 there is one table for all clusters, and one projection of the embedding."""
    softmax = params["softmax"]
    embedding = params["embedding"]
    n_cluster = len(config.cutoffs) + 1
    by_name = {}

    # A table and a slice of the bias per cluster, or one of each for all clusters.
    tables = embedding if config.tie_weight else softmax
    ends = [len(softmax["bias"])]
    if config.div_val > 1:
        ends = [*config.cutoffs, *ends]
    start = 0
    for number, end in enumerate(ends):
        by_name[f"crit.out_layers.{number}.weight"] = tables[f"table_{number}"]
        by_name[f"crit.out_layers.{number}.bias"] = softmax["bias"][start:end]
        start = end

    if "projection_0" in embedding:
        for cluster in range(n_cluster):
            if config.tie_projs and config.tie_projs[cluster]:
                projection = embedding[f"projection_{min(cluster, len(ends) - 1)}"]
            else:
                projection = softmax[f"projection_{cluster}"]
            by_name[f"crit.out_projs.{cluster}"] = projection.T

    if config.cutoffs:
        order = slice(None, None, 1 if tails_in_order else -1)
        by_name["crit.cluster_weight"] = softmax["tail_table"][order]
        by_name["crit.cluster_bias"] = softmax["tail_bias"][order]
    return by_name
