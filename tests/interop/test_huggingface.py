"""Tests of Hugging Face's arguments, and with its package of the same names and numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import foreign, tiny
from txl_jax.config import DType, EvalConfig
from txl_jax.interop import huggingface, original
from txl_jax.interop.original import Format
from txl_jax.modules.transformer_xl import TransformerXL

V, L, M = tiny.V, 3, 7
SPAN = EvalConfig(batch_size=tiny.B, segment_len=L, mem_len=M, clamp_len=None, same_length=False)


def test_its_class_draws_weights_as_ours_without_dropout_and_generation_stops_at_no_token():
    """`test_formats.py` reads the other arguments."""
    expected = {"init_std": 0.4, "proj_init_std": 0.4, "dropout": 0.0, "dropatt": 0.0, "eos_token_id": None}
    assert expected.items() <= huggingface.config_of(tiny.CONFIG, SPAN, vocab_size=V).items()


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
    # Its attention casts to float32 and there writes the lowest number of float64, which is an error.
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    span = dataclasses.replace(SPAN, **lengths)
    config, params = foreign.make("hf", dtype=DType.FLOAT64, **changes)
    params = jax.tree.map(np.float64, params)
    arguments = transformers.TransfoXLConfig(**huggingface.config_of(config, span, vocab_size=V))
    peer = transformers.TransfoXLLMHeadModel(arguments).eval().double()
    tensors = original.from_flax(params, config, format=Format.HUGGINGFACE)
    peer.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()}, strict=True)
    tokens = tiny.text(3 * L + 1)
    tokens[0, 1:4], tokens[1, 1:4] = (0, 5, V - 1), 1  # Each cluster, and one row of the first alone.
    model = TransformerXL(dataclasses.replace(config, compat=tiny.compat_config("hf")), V)
    ours = list(our_segments(model, params, span, tokens))
    theirs = list(peer_segments(torch, peer, tokens))
    assert len(ours) == len(theirs) == 3
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in ("nll", "hidden", "memory"):
            largest = np.abs(b[name]).max()
            np.testing.assert_allclose(a[name], b[name], atol=1e-9 * largest, rtol=0, err_msg=f"{name} of segment {k}")


def our_segments(model: TransformerXL, params, span: EvalConfig, tokens: np.ndarray):
    """Our losses, hidden states and memory, segment after segment."""
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
        yield {"nll": nll.numpy(), "hidden": found.hidden_states[-1].numpy(), "memory": states.numpy()}
