"""Tests of weights by the original's and Hugging Face's names: lazy reading, shared names,
refusals, and its package.

`test_formats.py` has the round trips of all kinds of models, `test_golden.py` the releases' own
tensors.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import by_hand, foreign, tiny
from support.cases import full_but
from support.tiny_run import assert_equal
from txl_jax.config import DType, Encoding, EvalConfig, NormPlace
from txl_jax.errors import UserError
from txl_jax.interop import huggingface, leaves, original
from txl_jax.interop.original import Format
from txl_jax.modules.transformer_xl import TransformerXL


@pytest.mark.parametrize("encoding", [Encoding.SHAW, Encoding.VASWANI, Encoding.AL_RFOU])
def test_other_encodings_have_no_names_in_hugging_face(encoding):
    config, params = foreign.make("pytorch", encoding=encoding, num_positions=7, n_head=2, d_head=3)
    for convert in (original.from_flax, functools.partial(foreign.to_flax, vocab_size=tiny.V)):
        with pytest.raises(UserError, match=rf"\bmodel\.encoding is {encoding}\b"):
            convert(params, config, format=Format.HUGGINGFACE)


# Hugging Face's and the TensorFlow release's class have relative positions alone.
LEARNED = {"num_positions": 7, "n_head": 2, "d_head": 3}
OTHERS = [
    {"encoding": Encoding.VASWANI},
    *({"encoding": each} | LEARNED for each in (Encoding.SHAW, Encoding.AL_RFOU)),
]
FORMATS = (Format.ORIGINAL, Format.HUGGINGFACE, Format.TENSORFLOW)
OF_OTHERS = [(Format.ORIGINAL, changes) for changes in OTHERS]
QUICK = [foreign.CONFIGS[name] for name in ("nothing tied", "div_val 1", "div_val 2")]


@pytest.mark.parametrize(
    ("format", "changes"),
    full_but(
        [*itertools.product(FORMATS, QUICK), *OF_OTHERS],
        [*itertools.product(FORMATS, foreign.CONFIGS.values()), *OF_OTHERS],
    ),
    ids=str,
)
def test_names_and_layouts_are_those_written_out_by_hand(format, changes):
    """In both directions.

    Round trips alone would not notice a fault of the one table that writes and reads.
    """
    config, params = foreign.make("pytorch", **changes)
    expected = by_hand.tensors(params, config, format)
    found = original.from_flax(params, config, format=format)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith("inv_freq"):
            np.testing.assert_allclose(found[name], value, rtol=1e-6)
        else:
            np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)
    assert_equal(foreign.to_flax(expected, config, vocab_size=tiny.V, format=format), params)


def test_arguments_of_other_implementations_classes():
    """Of a model in which no two of them are alike."""
    changes = {
        "cutoffs": (4, 9),
        "d_embed": 8,
        "div_val": 2,
        "tie_projs": (False, True, True),
        "untie_r": True,
    }
    config, _ = foreign.make("hf", **changes)
    span = EvalConfig(batch_size=2, segment_len=3, mem_len=7, clamp_len=11, same_length=True)
    shared = {
        "n_layer": 2,
        "n_head": 4,
        "d_model": 6,
        "d_head": 5,
        "d_inner": 10,
        "d_embed": 8,
        "div_val": 2,
    }
    shared |= {"cutoffs": [4, 9], "tie_projs": [False, True, True], "pre_lnorm": False}
    shared |= {"mem_len": 7, "clamp_len": 11, "same_length": True}
    assert huggingface.config_of(config, span, vocab_size=tiny.V) == shared | {
        "vocab_size": 13,
        "tie_word_embeddings": True,
        "untie_r": True,  # The release's class has no such argument.
        "init_std": 0.4,
        "proj_init_std": 0.4,
        "dropout": 0.0,
        "dropatt": 0.0,
        "eos_token_id": None,
    }
    assert original.arguments_of(config, span, vocab_size=tiny.V) == shared | {
        "n_token": 13,
        "dropout": 0.0,
        "dropatt": 0.0,
        "tie_weight": True,
        "tgt_len": 3,
        "ext_len": 0,
        "attn_type": 0,
    }
    own = dataclasses.replace(span, clamp_len=None, same_length=False)
    config, _ = foreign.make("hf", layer_norm=NormPlace.PRE, tie_weight=False)
    found = huggingface.config_of(config, own, vocab_size=tiny.V)
    kept = (
        "clamp_len",
        "same_length",
        "pre_lnorm",
        "tie_word_embeddings",
        "untie_r",
        "cutoffs",
        "d_embed",
    )
    assert [found[name] for name in kept] == [-1, False, True, False, False, [], 6]


LAZY = foreign.CONFIGS["div_val 2"] | {"d_embed": 8}


def test_a_parameter_reads_its_own_tensors_alone():
    config, params = foreign.make("hf", **LAZY)
    arrays, reads = original.from_flax(params, config, format=Format.HUGGINGFACE), []

    def counted(name, leaf):
        return leaf._replace(part=lambda index: reads.append(name) or arrays[name][index])

    tensors = {name: counted(name, leaf) for name, leaf in leaves.from_tree(arrays).items()}
    found = original.to_leaves(tensors, config, vocab_size=tiny.V, format=Format.HUGGINGFACE)
    reads.clear()
    norm = found["stack/layers/attention_norm/scale"]
    np.testing.assert_array_equal(norm.read(), params["stack"]["layers"]["attention_norm"]["scale"])
    names = [f"transformer.layers.{layer}.dec_attn.layer_norm.weight" for layer in range(tiny.N)]
    assert reads == names
    reads.clear()
    np.testing.assert_array_equal(norm.part(1), norm.read()[1])
    assert reads == [names[1], *names]


def test_leaves_can_be_of_another_type():
    _, params = foreign.make("pytorch", **LAZY)
    half = leaves.as_type(leaves.from_tree(params), np.dtype(np.float16))["softmax/bias"]
    assert half.dtype == half.read().dtype == half.part(slice(2)).dtype == np.float16


TWICE = (2 / 10000 ** (np.arange(0, tiny.D, 2) / tiny.D)).astype(np.float32)
U1 = "transformer.layers.1.dec_attn.r_w_bias"
SHARED = "transformer.r_w_bias"


@pytest.mark.parametrize(
    ("format", "changes", "name", "value", "named"),
    [
        (Format.ORIGINAL, {}, "layers.1.dec_attn.r_net.weight", None, r"[^\[]*\[20, 6\]"),
        (Format.ORIGINAL, {}, "r_emb", np.zeros((3, 4)), r".*\[3, 4\]"),
        (
            Format.ORIGINAL,
            {},
            "layers.1.dec_attn.o_net.weight",
            np.zeros((20, 6)),
            r".*\[20, 6\].*\[6, 20\]",
        ),
        # They share one.
        (
            Format.ORIGINAL,
            {},
            "crit.out_layers.0.weight",
            np.zeros((13, 6)),
            r".*\bword_emb\.emb_layers\.0\.weight\b",
        ),
        (Format.ORIGINAL, {}, original.FREQUENCIES, TWICE, r".*\[3\]"),
        (Format.HUGGINGFACE, {}, U1, np.ones((4, 5)), rf".*{SHARED}\b.*\bmodel\.untie_r\b"),
        (Format.HUGGINGFACE, {"untie_r": True}, SHARED, np.zeros((4, 5)), r".*\bmodel\.untie_r\b"),
        (
            Format.HUGGINGFACE,
            {},
            "transformer.crit.out_layers.0.bias",
            np.zeros(13),
            r".*expected no such tensor",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(format, changes, name, value, named):
    """`value` replaces or adds the tensor, or None takes it away."""
    config, params = foreign.make("pytorch", **changes)
    tensors = original.from_flax(params, config, format=format) | {name: value}
    tensors = {key: value for key, value in tensors.items() if value is not None}
    with pytest.raises(UserError, match=rf" {re.escape(name)}\b{named}"):
        foreign.to_flax(tensors, config, vocab_size=tiny.V, format=format)


@pytest.mark.parametrize("format", [Format.ORIGINAL, Format.HUGGINGFACE])
@pytest.mark.parametrize(
    ("changes", "final_norm", "named"),
    [
        ({"layer_norm": NormPlace.PRE}, True, r"\bcompat\.final_norm\b"),
        ({"tie_positions": True}, False, r"\bmodel\.tie_positions\b"),
    ],
)
def test_a_model_that_an_implementation_lacks_is_refused(format, changes, final_norm, named):
    compat = dataclasses.replace(tiny.compat_config("pytorch"), final_norm=final_norm)
    model = tiny.make(compat=compat, **changes)
    with pytest.raises(UserError, match=named):
        original.from_flax(tiny.variables(model)["params"], model.config, format=format)


V, L, M = tiny.V, 3, 7
SPAN = EvalConfig(batch_size=tiny.B, segment_len=L, mem_len=M, clamp_len=None, same_length=False)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.nightly(part="huggingface")
@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        *((changes, {}) for changes in foreign.CONFIGS.values()),
        (foreign.CONFIGS["div_val 2"], {"same_length": True, "clamp_len": 4}),
    ],
    ids=[*foreign.CONFIGS, "same_length and clamp_len"],
)
def test_the_real_model_gives_the_same_numbers(changes, lengths, x64, monkeypatch):
    """Losses, hidden states and memory of three segments from a memory of zeros, in float64."""
    import torch
    import transformers

    torch.set_num_threads(1)  # For matrices this small, more threads only wait for one another.
    # Its attention casts to float32 and there writes the lowest number of float64, which is an
    # error.
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    span = dataclasses.replace(SPAN, **lengths)
    config, params = foreign.make("hf", dtype=DType.FLOAT64, **changes)
    params = jax.tree.map(np.float64, params)
    arguments = transformers.TransfoXLConfig(**huggingface.config_of(config, span, vocab_size=V))
    peer = transformers.TransfoXLLMHeadModel(arguments).eval().double()
    tensors = original.from_flax(params, config, format=Format.HUGGINGFACE)
    peer.load_state_dict(
        {name: torch.from_numpy(value) for name, value in tensors.items()}, strict=True
    )
    tokens = tiny.text(3 * L + 1)
    # Each cluster, and one row only of the first.
    tokens[0, 1:4], tokens[1, 1:4] = (0, 5, V - 1), 1
    model = TransformerXL(dataclasses.replace(config, compat=tiny.compat_config("hf")), V)
    ours = list(our_segments(model, params, span, tokens))
    theirs = list(peer_segments(torch, peer, tokens))
    assert len(ours) == len(theirs) == 3
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in ("nll", "hidden", "memory"):
            largest = np.abs(b[name]).max()
            np.testing.assert_allclose(
                a[name], b[name], atol=1e-9 * largest, rtol=0, err_msg=f"{name} of segment {k}"
            )


def our_segments(model: TransformerXL, params, span: EvalConfig, tokens: np.ndarray):
    encode = tiny.encoder(model, clamp_len=span.clamp_len, same_length=span.same_length)
    memory = model.init_memory(batch_size=len(tokens), mem_len=span.mem_len)
    for start in range(0, tokens.shape[1] - 1, L):
        segment = jnp.asarray(tokens[:, start : start + L + 1])
        hidden, memory = encode({"params": params}, segment[:, :-1], memory)
        nll = model.apply({"params": params}, hidden, segment[:, 1:], method=model.nll)
        yield {"nll": nll, "hidden": hidden, "memory": memory.hidden}


def peer_segments(torch, peer, tokens: np.ndarray):
    """The same of the peer, which gives all log probabilities when it gets no labels."""
    memory = None
    for start in range(0, tokens.shape[1] - 1, L):
        segment = torch.from_numpy(tokens[:, start : start + L + 1].astype(np.int64))
        with torch.no_grad():
            found = peer(segment[:, :-1], mems=memory, output_hidden_states=True)
        memory = found.mems
        nll = -found.prediction_scores.gather(2, segment[:, 1:, None])[:, :, 0]
        states = torch.stack(memory).transpose(1, 2)
        yield {
            "nll": nll.numpy(),
            "hidden": found.hidden_states[-1].numpy(),
            "memory": states.numpy(),
        }
