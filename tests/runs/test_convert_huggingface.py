"""Tests conversions beside transformers 4.35.2: logits, tensors, greedy tokens."""

import numpy as np
import pytest

import txl_jax
from support import drawn_run
from txl_jax.config import GenerateConfig
from txl_jax.runs.convert import TargetFormat, convert
from txl_jax.runs.weights import open_weights

V = 61
# wt103's structure, scaled down: three tails, div_val 4, projections shared but for the head's.
SIZES = {"vocab_size": V, "cutoffs": [7, 19, 40], "d_model": 64, "d_embed": 64, "n_head": 4, "d_head": 16}
SIZES |= {"d_inner": 96, "div_val": 4, "n_layer": 3, "mem_len": 24, "clamp_len": 15, "same_length": True}
SIZES |= {"eos_token_id": None, "init_std": 0.15, "proj_init_std": 0.15}
pytestmark = pytest.mark.filterwarnings(*(f"ignore::{kind}Warning" for kind in ("Future", "Deprecation", "User")))


@pytest.fixture(scope="module")
def library():
    """(torch, transformers)."""
    import torch
    import transformers.models.transfo_xl

    torch.set_num_threads(1)
    return torch, transformers


@pytest.mark.nightly(part="huggingface")
@pytest.mark.parametrize(("untie_r", "safe"), [(True, True), (False, False)], ids=["safetensors", "pytorch_model.bin"])
def test_a_model_of_transformers_there_and_back(library, tmp_path, untie_r, safe):
    torch, transformers = library
    torch.manual_seed(5)
    peer = transformers.TransfoXLLMHeadModel(transformers.TransfoXLConfig(**SIZES, untie_r=untie_r)).eval()
    with torch.no_grad():
        for name, value in peer.named_parameters():
            if "bias" in name or "layer_norm" in name:
                value += 0.1 * torch.randn_like(value)
    peer.save_pretrained(tmp_path / "theirs", safe_serialization=safe)
    lines: list[str] = []
    convert(tmp_path / "theirs", tmp_path / "ours", log=lines.append)
    assert any(line.startswith("verified") for line in lines)
    ids = np.random.default_rng(0).integers(V, size=20)
    model, prompt = txl_jax.load(tmp_path / "ours"), ids[:5]
    with torch.no_grad():
        written = peer.generate(torch.tensor(prompt[None]), max_new_tokens=200, do_sample=False, pad_token_id=0)
    [greedy] = model.generate([model.decode(prompt)], GenerateConfig(length=200, temperature=0.0, top_k=None))
    assert model.encode(greedy).tolist() == written[0, len(prompt) :].tolist()
    convert(tmp_path / "ours", tmp_path / "back", to_format=TargetFormat.HUGGINGFACE, log=lines.append)
    again = transformers.TransfoXLLMHeadModel.from_pretrained(tmp_path / "back").eval()
    expected, there = peer.state_dict(), again.state_dict()
    assert expected.keys() == there.keys()
    for name, value in expected.items():
        assert torch.equal(value, there[name]), name
    with torch.no_grad():
        segment = torch.tensor(ids[None])
        logits = [each(segment).prediction_scores for each in (peer, again)]
    assert torch.equal(*logits)


@pytest.mark.nightly(part="huggingface")
def test_its_tokenizer_reads_the_words(library, tmp_path):
    _, transformers = library
    made = drawn_run.of_words(tmp_path / "run", **drawn_run.WT103)
    convert(made.path, tmp_path / "theirs", to_format=TargetFormat.HUGGINGFACE, log=lambda line: None)
    tokenizer = transformers.TransfoXLTokenizer.from_pretrained(tmp_path / "theirs")
    vocabulary = open_weights(made.path).vocabulary
    text = "the cat sat on the zebra"  # The last word is unknown.
    assert tokenizer.encode(text) == vocabulary.encode(text.encode()).tolist()
    assert len(tokenizer) == vocabulary.size and tokenizer.eos_token_id == vocabulary.mark
