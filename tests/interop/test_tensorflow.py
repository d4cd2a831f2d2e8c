"""Tests of the TensorFlow release's checkpoints: with a reader of the test's own, and with
TensorFlow where it is.
"""

import dataclasses
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
# Projections of the whole table are shared by a full softmax there.
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


def variables_of(config, params, *, same_dim=True) -> dict[str, np.ndarray]:
    """The variables of the release, which has matrices as [in, out] like us, and one bias for each
    cluster.

    Names are our reader's. `Oracle` has its own, so that its losses show which variable is which.
    """
    tensors = original.from_leaves(leaves.from_tree(params), config, format=Format.TENSORFLOW)
    bounds, found = [0, *config.cutoffs, foreign.V], {}
    if config.cutoffs and config.div_val == 1:
        bias = tensors.pop("crit.out_layers.0.bias").read()
        tensors |= leaves.from_tree(
            {
                f"crit.out_layers.{c}.bias": bias[slice(*ends)]
                for c, ends in enumerate(itertools.pairwise(bounds))
            }
        )
    absent = ["adaptive_softmax/bias"] if config.cutoffs else ["adaptive_softmax/cutoff_#/b"]
    absent += [
        f"adaptive_embed/{'' if config.div_val > 1 else 'cutoff_#/'}{name}"
        for name in ("lookup_table", "proj_W")
    ]
    for variable, name in tensorflow._NAMES.items():
        for number in map(str, range(max(config.n_layer, config.n_cluster))):
            if variable not in absent and (leaf := tensors.get(name.replace("#", number))):
                transposed = variable.endswith(("/kernel", "/proj", "/proj_W"))
                found[variable.replace("#", number)] = leaf.read().T if transposed else leaf.read()
    if not same_dim:
        del found["adaptive_embed/cutoff_0/proj_W"], found["adaptive_softmax/cutoff_0/proj"]
    moments = {
        f"{name}/{slot}": value for name, value in found.items() for slot in ("Adam", "Adam_1")
    }
    moments["r_w_bias/ExponentialMovingAverage"] = found["r_w_bias"]
    named = {
        f"transformer/{name}": np.ascontiguousarray(value)
        for name, value in (found | moments).items()
    }
    return named | {"global_step": np.int64(3), "beta1_power": np.float32(0.9)}


class Reader:
    """A checkpoint in an npz file that is called an index."""

    def __init__(self, prefix):
        with np.load(f"{prefix}.index") as arrays:
            self.arrays = dict(arrays)

    def get_variable_to_shape_map(self):
        return {name: list(value.shape) for name, value in self.arrays.items()}

    def get_variable_to_dtype_map(self):
        return {
            name: types.SimpleNamespace(as_numpy_dtype=value.dtype)
            for name, value in self.arrays.items()
        }

    def get_tensor(self, name):
        return self.arrays[name]


def write_with_stub(prefix, variables, monkeypatch):
    """Writes variables for a module of the test that takes TensorFlow's place."""
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
        self.variables = {
            name.removeprefix("transformer/"): np.float64(value)
            for name, value in variables.items()
        }
        self.cutoffs, self.bounds = cutoffs, [0, *cutoffs, foreign.V]
        self.n_layer, self.mem_len, self.clamp_len = n_layer, mem_len, clamp_len
        self.window = mem_len + 1 if same_length else None
        self.width = self.variables["layer_0/ff/layer_1/kernel"].shape[0]

    def losses(self, tokens: np.ndarray, segment_len: int) -> np.ndarray:
        memory = [np.zeros((1, self.mem_len, self.width)) for _ in range(self.n_layer)]
        embedding, softmax = self.clusters()
        tail = [self.variables.get(f"adaptive_softmax/cutoff_0/cluster_{name}") for name in "Wb"]
        found = []
        for start in range(0, len(tokens) - 1, segment_len):
            inputs, targets = (tokens[None, i : i + segment_len] for i in (start, start + 1))
            hidden = oracles.embed(inputs, embedding, self.cutoffs, self.width) * self.width**0.5
            for layer in range(self.n_layer):
                before, memory[layer] = (
                    memory[layer],
                    np.concatenate([memory[layer], hidden], 1)[:, -self.mem_len :],
                )
                hidden = self.layer(layer, hidden, before)
            found += oracles.adaptive_nll(hidden, targets, softmax, *tail, self.cutoffs)[0].tolist()
        return np.array(found)

    def clusters(self) -> tuple[list[oracles.Cluster], list[oracles.Cluster]]:
        """The clusters of the embedding and of the softmax, whose projection is its own or the
        embedding's.
        """
        v, embedding, softmax = self.variables, [], []
        for c, (begin, end) in enumerate(itertools.pairwise(self.bounds)):
            if "adaptive_embed/lookup_table" in v:
                table, projection = (
                    v["adaptive_embed/lookup_table"][begin:end],
                    v.get("adaptive_embed/proj_W"),
                )
            else:
                table, projection = (
                    v.get(f"adaptive_embed/cutoff_{c}/{name}")
                    for name in ("lookup_table", "proj_W")
                )
            bias = v[f"adaptive_softmax/cutoff_{c}/b" if self.cutoffs else "adaptive_softmax/bias"]
            embedding.append(oracles.Cluster(table, None, projection))
            softmax.append(
                oracles.Cluster(table, bias, v.get(f"adaptive_softmax/cutoff_{c}/proj", projection))
            )
        return embedding, softmax

    def layer(self, i: int, x: np.ndarray, memory: np.ndarray) -> np.ndarray:
        def get(name):
            return self.variables[f"layer_{i}/{name}"]

        u, v = (self.variables[name] for name in ("r_w_bias", "r_r_bias"))
        u, v = (u[i], v[i]) if u.ndim == 3 else (u, v)
        (heads, size), length, offset = u.shape, x.shape[1], self.mem_len
        projected = np.concatenate([memory, x], 1) @ get("rel_attn/qkv/kernel")
        q, k, values = (
            part.reshape(1, -1, heads, size).swapaxes(1, 2)
            for part in np.split(projected, 3, axis=-1)
        )
        distances = np.minimum(range(offset + length - 1, -1, -1), self.clamp_len)
        codes = np.stack([oracles.sinusoid(distance, self.width) for distance in distances])
        position_key = (codes @ get("rel_attn/r/kernel")).reshape(-1, heads, size).swapaxes(0, 1)
        mask = oracles.attention_mask(
            [offset], segment_len=length, mem_len=offset, window=self.window
        )
        attended = oracles.relative_attention(q[:, :, offset:], k, values, position_key, u, v, mask)
        x = norm(
            x + attended.swapaxes(1, 2).reshape(1, length, -1) @ get("rel_attn/o/kernel"),
            get,
            "rel_attn",
        )
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
    config, params = foreign.make("tf", **changes)
    write(tmp_path / "model.ckpt-3", variables_of(config, params), monkeypatch)
    found = formats.read(tmp_path / "model.ckpt-3")
    assert found.format is Format.TENSORFLOW
    foreign.check(found, config, params)
    compat = found.info.config.model.compat
    assert compat == tiny.compat_config("tf") and compat.layer_norm_eps == 1e-12
    assert found.info.config.eval == EvalConfig()
    number = len(variables_of(config, params))
    assert any(
        f"{(number - 3) // 3 * 2 + 3} variables of the optimizer" in note for note in found.notes
    )


@by_writer
def test_a_first_cluster_without_projections_gets_identities(write, tmp_path, monkeypatch):
    """As One Billion Word has it: proj_same_dim is off."""
    config, params = foreign.make("tf", **CONFIGS["div_val 2, as One Billion Word"])
    identity = np.eye(config.d_model, dtype=np.float32)
    params["embedding"]["projection_0"] = params["softmax"]["projection_0"] = identity
    write(tmp_path / "model.ckpt-3", variables_of(config, params, same_dim=False), monkeypatch)
    foreign.check(formats.read(tmp_path), config, params)


def test_the_published_layout(tmp_path, monkeypatch):
    """Directories "model" and "data": the corpus gives vocabulary and lengths, and of two steps the
    last is read.
    """
    config, params = foreign.make("tf", untie_r=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "data").mkdir()
    other = jax.tree.map(lambda value: value + 1, params)
    write_with_stub(tmp_path / "model" / "model.ckpt-9", variables_of(config, other), monkeypatch)
    write_with_stub(tmp_path / "model" / "model.ckpt-10", variables_of(config, params), monkeypatch)
    # They name no step.
    for name in ("weights1", "a-b1", "model.ckpt-\N{ARABIC-INDIC DIGIT THREE}"):
        (tmp_path / "model" / f"{name}.index").touch()
    corpus = {"dataset": "wt103", "vocab": {"idx2sym": list(foreign.WORDS), "lower_case": False}}
    (tmp_path / "data" / "cache.pkl").write_bytes(pickle.dumps(corpus, 2))
    (tmp_path / "data" / "corpus-info.json").write_text(
        json.dumps({"dataset": "wt103", "vocab_size": foreign.V})
    )
    found = formats.read(tmp_path)
    foreign.check(found, config, params)
    assert found.info.config.eval == EvalConfig(
        segment_len=128, mem_len=1600, clamp_len=1000, same_length=True
    )


def test_without_tensorflow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    (tmp_path / "model.ckpt-0.index").write_bytes(b"")
    with pytest.raises(UserError, match=r"txl_jax\[tensorflow\]"):
        formats.read(tmp_path)


@by_writer
def test_what_cannot_be_read_is_named(write, tmp_path, monkeypatch):
    config, params = foreign.make("tf")
    variables = variables_of(config, params) | {"transformer/layer_0/gate/kernel": np.zeros((2, 2))}
    write(tmp_path / "model.ckpt-0", variables, monkeypatch)
    with pytest.raises(UserError, match="transformer/layer_0/gate/kernel"):
        formats.read(tmp_path)
    (tmp_path / "model.ckpt-0.index").write_bytes(b"hello")
    with pytest.raises(UserError, match="corrupted or incomplete"):
        formats.read(tmp_path)


@pytest.mark.parametrize(
    "changes", full_but([CONFIGS["div_val 2, as WikiText-103"]], CONFIGS.values())
)
def test_the_release_gives_the_same_losses(changes, tmp_path, monkeypatch, x64):
    """Of three segments from a memory of zeros, in float64, by the release's model in numpy."""
    config, params = foreign.make("tf", **changes)
    variables = variables_of(config, params)
    write_with_stub(tmp_path / "model.ckpt-0", variables, monkeypatch)
    found = formats.read(tmp_path)
    tokens = tiny.text(3 * 4 + 1, rows=1)
    tokens[0, 2:6] = (0, 5, foreign.V - 1, 10)  # Each cluster.
    whole = found.info.config
    model = TransformerXL(dataclasses.replace(whole.model, dtype=DType.FLOAT64), foreign.V)
    read = {"params": jax.tree.map(np.float64, foreign.to_tree(found.leaves))}
    sizes = {"cutoffs": config.cutoffs, "n_layer": config.n_layer, "mem_len": 5}
    for same_length in (False, True):
        lengths = {"clamp_len": 4, "same_length": same_length}
        encode, memory, losses = (
            tiny.encoder(model, **lengths),
            model.init_memory(batch_size=1, mem_len=5),
            [],
        )
        for start in range(0, 12, 4):
            hidden, memory = encode(read, tokens[:, start : start + 4], memory)
            losses.append(
                model.apply(read, hidden, tokens[:, start + 1 : start + 5], method=model.nll)[0]
            )
        expected = Oracle(variables, **sizes, **lengths).losses(tokens[0], 4)
        np.testing.assert_allclose(np.concatenate(losses), expected, rtol=1e-9)
