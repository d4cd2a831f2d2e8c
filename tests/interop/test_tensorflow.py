"""Tests of the TensorFlow release's checkpoints: with a reader of the test's own, and with
TensorFlow if it is installed.
"""

import dataclasses
import functools
import itertools
import json
import pickle
import sys
import types

import jax
import numpy as np
import pytest

from support import foreign, oracles, tiny
from support.cases import full_but
from txl_jax.config import DType, EvalConfig
from txl_jax.errors import UserError
from txl_jax.interop import formats, leaves, original, tensorflow
from txl_jax.interop.original import Format
from txl_jax.modules.transformer_xl import TransformerXL

CUTOFFS = foreign.CUTOFFS
# With a full softmax, the release always shares the projection of the table.
CONFIGS = {
    "full softmax": {},
    "d_embed": {"d_embed": 8, "tie_projs": (True,)},
    "div_val 1": {"cutoffs": CUTOFFS, "untie_r": True},
    "div_val 1, projections": {"cutoffs": CUTOFFS, "d_embed": 8, "tie_projs": (False, True, True)},
    "div_val 2, as WikiText-103": {
        "cutoffs": CUTOFFS,
        "div_val": 2,
        "tie_projs": (False, True, True),
        "untie_r": True,
    },
    "div_val 2, as One Billion Word": {"cutoffs": CUTOFFS, "div_val": 2, "untie_r": True},
}
by_config = pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)


def split_bias(bias, cutoffs) -> dict[str, np.ndarray]:
    """One bias for each cluster, by our reader's names."""
    parts = np.split(bias, cutoffs)
    return {f"crit.out_layers.{c}.bias": part for c, part in enumerate(parts)}


def names_of_variables(config) -> dict[str, str]:
    """Names of our tensors by the variables that a checkpoint of this model can have.

    `#` is the number of a layer or cluster.
    """
    # With div_val 1 all clusters have one table, and otherwise each has its own.
    if config.div_val > 1:
        absent = {"adaptive_embed/lookup_table", "adaptive_embed/proj_W"}
    else:
        absent = {"adaptive_embed/cutoff_#/lookup_table", "adaptive_embed/cutoff_#/proj_W"}
    absent.add("adaptive_softmax/bias" if config.cutoffs else "adaptive_softmax/cutoff_#/b")
    names = tensorflow._NAMES.items()
    return {variable: name for variable, name in names if variable not in absent}


def variables_of(config, params, *, same_dim=True) -> dict[str, np.ndarray]:
    """The variables of the release, which has matrices as [in, out] like us, and one bias for each
    cluster.

    Names are our reader's. `Oracle` has its own, so that its losses show which variable is which.
    """
    tensors = original.from_leaves(leaves.from_tree(params), config, format=Format.TENSORFLOW)
    if config.cutoffs and config.div_val == 1:
        bias = tensors.pop("crit.out_layers.0.bias").read()
        tensors |= leaves.from_tree(split_bias(bias, config.cutoffs))

    variables = {}
    for variable, name in names_of_variables(config).items():
        is_transposed = variable.endswith(("/kernel", "/proj", "/proj_W"))
        for number in map(str, range(max(config.n_layer, config.n_cluster))):
            leaf = tensors.get(name.replace("#", number))
            if leaf is not None:
                value = leaf.read()
                variables[variable.replace("#", number)] = value.T if is_transposed else value
    if not same_dim:
        del variables["adaptive_embed/cutoff_0/proj_W"]
        del variables["adaptive_softmax/cutoff_0/proj"]
    return with_optimizer(variables)


def with_optimizer(variables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The variables in the scope of the release, and the optimizer's variables."""
    whole = {"global_step": np.int64(3), "beta1_power": np.float32(0.9)}
    for name, value in variables.items():
        contiguous = np.ascontiguousarray(value)
        whole[f"transformer/{name}"] = contiguous
        whole[f"transformer/{name}/Adam"] = contiguous
        whole[f"transformer/{name}/Adam_1"] = contiguous
    # One average stands for those of all variables.
    whole["transformer/r_w_bias/ExponentialMovingAverage"] = variables["r_w_bias"]
    return whole


class Reader:
    """A checkpoint in an npz file that is called an index."""

    def __init__(self, prefix):
        with np.load(f"{prefix}.index") as arrays:
            self.arrays = dict(arrays)

    def get_variable_to_shape_map(self):
        return {name: list(value.shape) for name, value in self.arrays.items()}

    def get_variable_to_dtype_map(self):
        dtypes = {}
        for name, value in self.arrays.items():
            dtypes[name] = types.SimpleNamespace(as_numpy_dtype=value.dtype)
        return dtypes

    def get_tensor(self, name):
        return self.arrays[name]


def write_with_stub(prefix, variables, monkeypatch):
    """Writes variables for a module of the test instead of TensorFlow."""
    with open(f"{prefix}.index", "wb") as file:
        np.savez(file, **variables)
    stub = types.ModuleType("tensorflow")
    stub.train = types.SimpleNamespace(load_checkpoint=Reader)  # type: ignore[attr-defined]
    stub.errors = types.SimpleNamespace(OpError=OSError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow", stub)


class Oracle:
    """The release's model in numpy, from its variables: the losses of one text, segment after
    segment.

    Its memory begins with zeros that are attended to, a query sees M + 1 keys with same_length, the
    layer norm adds 1e-12 to the variance, and the tail clusters follow the head's tokens in order.
    """

    def __init__(self, variables, *, cutoffs, n_layer, mem_len, clamp_len, same_length):
        self.variables = {}
        for name, value in variables.items():
            self.variables[name.removeprefix("transformer/")] = np.float64(value)
        self.cutoffs = cutoffs
        self.bounds = [0, *cutoffs, foreign.V]
        self.n_layer = n_layer
        self.mem_len = mem_len
        self.clamp_len = clamp_len
        self.window = mem_len + 1 if same_length else None
        self.d_model = self.variables["layer_0/ff/layer_1/kernel"].shape[0]

    def losses(self, tokens: np.ndarray, segment_len: int) -> np.ndarray:
        memory = [np.zeros((1, self.mem_len, self.d_model)) for _ in range(self.n_layer)]
        embedding, softmax = self.clusters()
        tail_table = self.variables.get("adaptive_softmax/cutoff_0/cluster_W")
        tail_bias = self.variables.get("adaptive_softmax/cutoff_0/cluster_b")
        nats = []
        for start in range(0, len(tokens) - 1, segment_len):
            inputs = tokens[None, start : start + segment_len]
            targets = tokens[None, start + 1 : start + 1 + segment_len]
            hidden = oracles.embed(inputs, embedding, self.cutoffs, self.d_model)
            hidden = hidden * self.d_model**0.5
            for layer in range(self.n_layer):
                before = memory[layer]
                memory[layer] = np.concatenate([before, hidden], 1)[:, -self.mem_len :]
                hidden = self.layer(layer, hidden, before)
            of_segment = oracles.adaptive_nll(
                hidden, targets, softmax, tail_table, tail_bias, self.cutoffs
            )
            nats += of_segment[0].tolist()
        return np.array(nats)

    def clusters(self) -> tuple[list[oracles.Cluster], list[oracles.Cluster]]:
        """The clusters of the embedding and of the softmax, whose projection is its own or the
        embedding's.
        """
        variables = self.variables
        embedding = []
        softmax = []
        for c, (begin, end) in enumerate(itertools.pairwise(self.bounds)):
            if "adaptive_embed/lookup_table" in variables:
                table = variables["adaptive_embed/lookup_table"][begin:end]
                projection = variables.get("adaptive_embed/proj_W")
            else:
                table = variables[f"adaptive_embed/cutoff_{c}/lookup_table"]
                projection = variables.get(f"adaptive_embed/cutoff_{c}/proj_W")
            embedding.append(oracles.Cluster(table, None, projection))

            name = f"adaptive_softmax/cutoff_{c}/b" if self.cutoffs else "adaptive_softmax/bias"
            own_projection = variables.get(f"adaptive_softmax/cutoff_{c}/proj", projection)
            softmax.append(oracles.Cluster(table, variables[name], own_projection))
        return embedding, softmax

    def layer(self, i: int, x: np.ndarray, memory: np.ndarray) -> np.ndarray:
        def get(name):
            return self.variables[f"layer_{i}/{name}"]

        u = self.variables["r_w_bias"]
        v = self.variables["r_r_bias"]
        if u.ndim == 3:  # Each layer has its own.
            u = u[i]
            v = v[i]
        heads, size = u.shape
        length = x.shape[1]
        offset = self.mem_len

        # [1, K, 3 * H * E] to queries, keys and values of [1, H, K, E].
        projected = np.concatenate([memory, x], 1) @ get("rel_attn/qkv/kernel")
        projected = projected.reshape(1, -1, 3, heads, size).transpose(2, 0, 3, 1, 4)
        query, key, value = projected

        distances = np.minimum(range(offset + length - 1, -1, -1), self.clamp_len)
        codes = np.stack([oracles.sinusoid(distance, self.d_model) for distance in distances])
        position_key = (codes @ get("rel_attn/r/kernel")).reshape(-1, heads, size).swapaxes(0, 1)
        mask = oracles.attention_mask(
            [offset], segment_len=length, mem_len=offset, window=self.window
        )
        attended = oracles.relative_attention(
            query[:, :, offset:], key, value, position_key, u, v, mask
        )
        attended = attended.swapaxes(1, 2).reshape(1, length, -1)
        x = norm(x + attended @ get("rel_attn/o/kernel"), get, "rel_attn")

        inner = np.maximum(x @ get("ff/layer_1/kernel") + get("ff/layer_1/bias"), 0)
        return norm(x + inner @ get("ff/layer_2/kernel") + get("ff/layer_2/bias"), get, "ff")


def norm(x: np.ndarray, get, scope: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return scaled * get(f"{scope}/LayerNorm/gamma") + get(f"{scope}/LayerNorm/beta")


def write_with_tensorflow(prefix, variables, monkeypatch):
    import tensorflow

    names, values = zip(*sorted(variables.items()), strict=True)
    tensorflow.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(names),
        shape_and_slices=[""] * len(names),
        tensors=list(values),
    )


with_tensorflow = pytest.param(
    write_with_tensorflow, id="TensorFlow", marks=pytest.mark.nightly(part="tensorflow")
)
by_writer = pytest.mark.parametrize(
    "write", [pytest.param(write_with_stub, id="stub"), with_tensorflow]
)


@by_config
@by_writer
def test_a_checkpoint(write, changes, tmp_path, monkeypatch):
    """The variables of the optimizer are skipped, with a note."""
    config, params = foreign.make("tf", **changes)
    variables = variables_of(config, params)
    write(tmp_path / "model.ckpt-3", variables, monkeypatch)

    model = formats.read(tmp_path / "model.ckpt-3")

    assert model.format is Format.TENSORFLOW
    foreign.check(model, config, params)
    assert model.info.config.model.compat == tiny.compat_config("tf")
    assert model.info.config.model.compat.layer_norm_eps == 1e-12
    assert model.info.config.eval == EvalConfig()
    # Two moments of each parameter, the step, the power and the average.
    n_parameters = (len(variables) - 3) // 3
    n_skipped = 2 * n_parameters + 3
    assert any(f"{n_skipped} variables of the optimizer" in note for note in model.notes)


@by_writer
def test_a_first_cluster_without_projections_gets_identities(write, tmp_path, monkeypatch):
    """As One Billion Word has it: proj_same_dim is off."""
    config, params = foreign.make("tf", **CONFIGS["div_val 2, as One Billion Word"])
    identity = np.eye(config.d_model, dtype=np.float32)
    params["embedding"]["projection_0"] = identity
    params["softmax"]["projection_0"] = identity
    write(tmp_path / "model.ckpt-3", variables_of(config, params, same_dim=False), monkeypatch)

    foreign.check(formats.read(tmp_path), config, params)


def test_the_published_layout(tmp_path, monkeypatch):
    """Directories "model" and "data": the corpus gives vocabulary and lengths, and of two steps the
    last is read.
    """
    config, params = foreign.make("tf", untie_r=True)
    older_params = jax.tree.map(lambda value: value + 1, params)
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    write_with_stub(model_dir / "model.ckpt-9", variables_of(config, older_params), monkeypatch)
    write_with_stub(model_dir / "model.ckpt-10", variables_of(config, params), monkeypatch)
    # They name no step.
    for name in ("weights1", "a-b1", "model.ckpt-\N{ARABIC-INDIC DIGIT THREE}"):
        (model_dir / f"{name}.index").touch()
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    corpus = {"dataset": "wt103", "vocab": {"idx2sym": list(foreign.WORDS), "lower_case": False}}
    (data_dir / "cache.pkl").write_bytes(pickle.dumps(corpus, 2))
    facts = {"dataset": "wt103", "vocab_size": foreign.V}
    (data_dir / "corpus-info.json").write_text(json.dumps(facts))

    model = formats.read(tmp_path)

    foreign.check(model, config, params)
    # The lengths at which the release evaluates this corpus.
    assert model.info.config.eval == EvalConfig(
        segment_len=128, mem_len=1600, clamp_len=1000, same_length=True
    )


def test_without_tensorflow_its_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # Importing it fails.
    (tmp_path / "model.ckpt-0.index").write_bytes(b"")
    with pytest.raises(UserError, match="pip install tensorflow-cpu"):
        formats.read(tmp_path)


@by_writer
def test_an_unknown_variable_is_named(write, tmp_path, monkeypatch):
    config, params = foreign.make("tf")
    unknown = {"transformer/layer_0/gate/kernel": np.zeros((2, 2))}
    write(tmp_path / "model.ckpt-0", variables_of(config, params) | unknown, monkeypatch)
    with pytest.raises(UserError, match="transformer/layer_0/gate/kernel"):
        formats.read(tmp_path)


@by_writer
def test_a_corrupted_checkpoint_is_an_error(write, tmp_path, monkeypatch):
    config, params = foreign.make("tf")
    write(tmp_path / "model.ckpt-0", variables_of(config, params), monkeypatch)
    (tmp_path / "model.ckpt-0.index").write_bytes(b"hello")
    with pytest.raises(UserError, match="corrupted or incomplete"):
        formats.read(tmp_path)


def losses_of(encode, nll, variables, tokens, memory, *, segment_len) -> np.ndarray:
    """The losses of one text, segment after segment."""
    nats = []
    for start in range(0, tokens.shape[1] - 1, segment_len):
        inputs = tokens[:, start : start + segment_len]
        targets = tokens[:, start + 1 : start + segment_len + 1]
        hidden, memory = encode(variables, inputs, memory)
        nats.append(nll(variables, hidden, targets)[0])
    return np.concatenate(nats)


@pytest.mark.parametrize("name", full_but(["div_val 2, as WikiText-103"], CONFIGS))
def test_the_release_gives_the_same_losses(name, tmp_path, monkeypatch, x64):
    """Of three segments from a memory of zeros, in float64, by the release's model in numpy."""
    config, params = foreign.make("tf", **CONFIGS[name])
    variables = variables_of(config, params)
    write_with_stub(tmp_path / "model.ckpt-0", variables, monkeypatch)
    tokens = tiny.text(3 * 4 + 1, rows=1)
    tokens[0, 2:6] = (0, 5, foreign.V - 1, 10)  # Each cluster.

    source = formats.read(tmp_path)
    model_config = dataclasses.replace(source.info.config.model, dtype=DType.FLOAT64)
    model = TransformerXL(model_config, foreign.V)
    weights = {"params": jax.tree.map(np.float64, foreign.to_tree(source.leaves))}

    # Compiled, because one operation at a time would compile each of them.
    nll = jax.jit(functools.partial(model.apply, method=model.nll))
    memory = jax.jit(lambda: model.init_memory(batch_size=1, mem_len=5))()

    for same_length in (False, True):
        lengths = {"clamp_len": 4, "same_length": same_length}
        encode = tiny.encoder(model, **lengths)
        losses = losses_of(encode, nll, weights, tokens, memory, segment_len=4)
        oracle = Oracle(
            variables, cutoffs=config.cutoffs, n_layer=config.n_layer, mem_len=5, **lengths
        )
        expected = oracle.losses(tokens[0], 4)
        np.testing.assert_allclose(losses, expected, rtol=1e-9, err_msg=f"{same_length=}")
