"""Tests of weights by the original's and Hugging Face's names: lazy reading, shared names, errors,
and the package of Hugging Face.

`test_formats.py` has the round trips of all kinds of models, `test_golden.py` the releases' own
tensors.
"""

import dataclasses
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
    """Neither for writing nor for reading."""
    config, params = foreign.make("pytorch", encoding=encoding, num_positions=7, n_head=2, d_head=3)
    named = rf"\bmodel\.encoding is {encoding}\b"
    with pytest.raises(UserError, match=named):
        original.from_flax(params, config, format=Format.HUGGINGFACE)
    with pytest.raises(UserError, match=named):
        foreign.to_flax(params, config, vocab_size=tiny.V, format=Format.HUGGINGFACE)


# Hugging Face's and the TensorFlow release's classes have only relative positions. The original
# cuts Al-Rfou's vectors, of size 6, into heads.
OTHERS = [
    {"encoding": Encoding.VASWANI},
    {"encoding": Encoding.SHAW, "num_positions": 7, "n_head": 2, "d_head": 3},
    {"encoding": Encoding.AL_RFOU, "num_positions": 7, "n_head": 2, "d_head": 3},
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

    tensors = original.from_flax(params, config, format=format)
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith("inv_freq"):
            np.testing.assert_allclose(tensors[name], value, rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(tensors[name], value, err_msg=name, strict=True)

    assert_equal(foreign.to_flax(expected, config, vocab_size=tiny.V, format=format), params)


# Sizes and lengths of which no two are alike, by the names that both classes share.
SHARED_ARGUMENTS = {
    "n_layer": 2,
    "n_head": 4,
    "d_model": 6,
    "d_head": 5,
    "d_inner": 10,
    "d_embed": 8,
    "div_val": 2,
    "cutoffs": [4, 9],
    "tie_projs": [False, True, True],
    "pre_lnorm": False,
    "mem_len": 7,
    "clamp_len": 11,
    "same_length": True,
    "dropout": 0.0,
    "dropatt": 0.0,
}
LENGTHS = EvalConfig(batch_size=2, segment_len=3, mem_len=7, clamp_len=11, same_length=True)


def test_arguments_of_other_implementations_classes():
    config, _ = foreign.make(
        "hf", cutoffs=(4, 9), d_embed=8, div_val=2, tie_projs=(False, True, True), untie_r=True
    )

    of_huggingface = huggingface.config_of(config, LENGTHS, vocab_size=tiny.V)
    assert of_huggingface == SHARED_ARGUMENTS | {
        "vocab_size": 13,
        "tie_word_embeddings": True,
        "untie_r": True,  # The release's class has no such argument.
        "init_std": 0.4,
        "proj_init_std": 0.4,
        "eos_token_id": None,
    }

    of_original = original.arguments_of(config, LENGTHS, vocab_size=tiny.V)
    assert of_original == SHARED_ARGUMENTS | {
        "n_token": 13,
        "tie_weight": True,
        "tgt_len": 3,
        "ext_len": 0,
        "attn_type": 0,
    }


def test_arguments_of_a_model_without_these_options():
    lengths = dataclasses.replace(LENGTHS, clamp_len=None, same_length=False)
    config, _ = foreign.make("hf", layer_norm=NormPlace.PRE, tie_weight=False)
    arguments = huggingface.config_of(config, lengths, vocab_size=tiny.V)
    assert arguments["clamp_len"] == -1
    assert arguments["same_length"] is False
    assert arguments["pre_lnorm"] is True
    assert arguments["tie_word_embeddings"] is False
    assert arguments["untie_r"] is False
    assert arguments["cutoffs"] == []
    assert arguments["d_embed"] == 6


LAZY = foreign.CONFIGS["div_val 2"] | {"d_embed": 8}


def test_a_parameter_reads_only_its_own_tensors():
    config, params = foreign.make("hf", **LAZY)
    arrays = original.from_flax(params, config, format=Format.HUGGINGFACE)
    reads = []

    def recorded(name, leaf):
        def part(index):
            reads.append(name)
            return arrays[name][index]

        return leaf._replace(part=part)

    tensors = {name: recorded(name, leaf) for name, leaf in leaves.from_tree(arrays).items()}
    parameters = original.to_leaves(tensors, config, vocab_size=tiny.V, format=Format.HUGGINGFACE)
    norm = parameters["stack/layers/attention_norm/scale"]
    expected = params["stack"]["layers"]["attention_norm"]["scale"]
    names = [
        "transformer.layers.0.dec_attn.layer_norm.weight",
        "transformer.layers.1.dec_attn.layer_norm.weight",
    ]

    reads.clear()
    np.testing.assert_array_equal(norm.read(), expected)
    assert reads == names

    # A part of the parameter is a layer's.
    reads.clear()
    np.testing.assert_array_equal(norm.part(1), expected[1])
    assert reads == [names[1]]


def test_leaves_can_be_of_another_dtype():
    _, params = foreign.make("pytorch", **LAZY)
    half = leaves.as_type(leaves.from_tree(params), np.dtype(np.float16))["softmax/bias"]
    assert half.dtype == np.float16
    assert half.read().dtype == np.float16
    assert half.part(slice(2)).dtype == np.float16


def test_a_bias_without_a_dimension_is_an_error():
    """Its length would be the vocabulary's size."""
    config, params = foreign.make("pytorch", **LAZY)
    params["softmax"]["bias"] = np.float32(0)
    with pytest.raises(UserError, match=r"softmax/bias .*\[V\].*\(\)"):
        original.from_leaves(leaves.from_tree(params), config)


# Twice the frequencies of the sinusoids, so that another model's positions are noticed.
TWICE = (2 / 10000 ** (np.arange(0, tiny.D, 2) / tiny.D)).astype(np.float32)
U1 = "transformer.layers.1.dec_attn.r_w_bias"
SHARED = "transformer.r_w_bias"


@pytest.mark.parametrize(
    ("format", "changes", "name", "value", "named"),
    [
        pytest.param(
            Format.ORIGINAL,
            {},
            "layers.1.dec_attn.r_net.weight",
            None,
            r"[^\[]*\[20, 6\]",
            id="missing",
        ),
        pytest.param(Format.ORIGINAL, {}, "r_emb", np.zeros((3, 4)), r".*\[3, 4\]", id="unknown"),
        pytest.param(
            Format.ORIGINAL,
            {},
            "layers.1.dec_attn.o_net.weight",
            np.zeros((20, 6)),
            r".*\[20, 6\].*\[6, 20\]",
            id="transposed",
        ),
        pytest.param(
            Format.ORIGINAL,
            {},
            "crit.out_layers.0.weight",
            np.zeros((13, 6)),
            r".*\bword_emb\.emb_layers\.0\.weight\b",
            id="shared with another",
        ),
        pytest.param(
            Format.ORIGINAL, {}, original.FREQUENCIES, TWICE, r".*\[3\]", id="frequencies"
        ),
        pytest.param(
            Format.HUGGINGFACE,
            {},
            U1,
            np.ones((4, 5)),
            rf".*{SHARED}\b.*\bmodel\.untie_r\b",
            id="a layer's u",
        ),
        pytest.param(
            Format.HUGGINGFACE,
            {"untie_r": True},
            SHARED,
            np.zeros((4, 5)),
            r".*\bmodel\.untie_r\b",
            id="u of all layers",
        ),
        pytest.param(
            Format.HUGGINGFACE,
            {},
            "transformer.crit.out_layers.0.bias",
            np.zeros(13),
            r".*expected no such tensor",
            id="behind a prefix",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(format, changes, name, value, named):
    """`value` replaces or adds the tensor, or None takes it away."""
    config, params = foreign.make("pytorch", **changes)
    tensors = original.from_flax(params, config, format=format)
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    with pytest.raises(UserError, match=rf" {re.escape(name)}\b{named}"):
        foreign.to_flax(tensors, config, vocab_size=tiny.V, format=format)


@pytest.mark.parametrize("format", [Format.ORIGINAL, Format.HUGGINGFACE])
@pytest.mark.parametrize(
    ("changes", "final_norm", "named"),
    [
        ({"layer_norm": NormPlace.PRE}, True, r"\bcompat\.final_norm\b"),
        ({"tie_positions": True}, False, r"\bmodel\.tie_positions\b"),
    ],
    ids=["final norm", "tied positions"],
)
def test_a_model_that_an_implementation_lacks_is_an_error(format, changes, final_norm, named):
    compat = dataclasses.replace(tiny.compat_config("pytorch"), final_norm=final_norm)
    model = tiny.make(compat=compat, **changes)
    params = tiny.variables(model)["params"]
    with pytest.raises(UserError, match=named):
        original.from_flax(params, model.config, format=format)


def test_vectors_of_positions_that_cannot_be_cut_into_heads_are_an_error():
    """Al-Rfou's vectors are added to the layer's inputs, of size D, and the release has [H, E]."""
    config, params = foreign.make("pytorch", encoding=Encoding.AL_RFOU, d_model=12, d_head=5)
    with pytest.raises(UserError, match=r"\b20\b.*\bmodel\.d_model\D*\b12\b"):
        original.from_flax(params, config)


V = tiny.V
L = 3  # Length of a segment.
M = 7  # Length of the memory.
SPAN = EvalConfig(batch_size=tiny.B, segment_len=L, mem_len=M, clamp_len=None, same_length=False)


REAL_CASES = [(changes, {}) for changes in foreign.CONFIGS.values()]
REAL_CASES.append((foreign.CONFIGS["div_val 2"], {"same_length": True, "clamp_len": 4}))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.nightly(part="huggingface")
@pytest.mark.parametrize(
    ("changes", "lengths"), REAL_CASES, ids=[*foreign.CONFIGS, "same_length and clamp_len"]
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
    state = {name: torch.from_numpy(value) for name, value in tensors.items()}
    peer.load_state_dict(state, strict=True)
    tokens = tiny.text(3 * L + 1)
    tokens[0, 1:4] = (0, 5, V - 1)  # Each cluster.
    tokens[1, 1:4] = 1  # Only a row of the first.

    model = TransformerXL(dataclasses.replace(config, compat=tiny.compat_config("hf")), V)
    ours = list(our_segments(model, params, span, tokens))
    theirs = list(peer_segments(torch, peer, tokens))

    assert len(ours) == 3
    assert len(theirs) == 3
    for k in range(3):
        for name in ("nll", "hidden", "memory"):
            expected = theirs[k][name]
            np.testing.assert_allclose(
                ours[k][name],
                expected,
                atol=1e-9 * np.abs(expected).max(),
                rtol=0,
                err_msg=f"{name} of segment {k}",
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
            outputs = peer(segment[:, :-1], mems=memory, output_hidden_states=True)
        memory = outputs.mems
        nll = -outputs.prediction_scores.gather(2, segment[:, 1:, None])[:, :, 0]
        states = torch.stack(memory).transpose(1, 2)
        yield {
            "nll": nll.numpy(),
            "hidden": outputs.hidden_states[-1].numpy(),
            "memory": states.numpy(),
        }
