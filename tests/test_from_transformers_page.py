"""Tests of docs/from-transformers.md: the new code runs on a converted checkpoint, and computes
what the old code does with transformers 4.35.2.
"""

import numpy as np
import pytest

from support import drawn_run
from support.pages import execute, python_blocks
from txl_jax.config import MemoryStart
from txl_jax.runs.convert import TargetFormat, convert

PAGE = "docs/from-transformers.md"
# Like the published checkpoint, without a txl_jax.json, and with a memory that starts with zeros.
PUBLISHED = drawn_run.WT103 | {
    "model.untie_r": True,
    "model.compat.memory_start": MemoryStart.ZEROS,
}


def old_blocks():
    return python_blocks(PAGE, title="transformers 4.35.2")


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """The directory of a small checkpoint of transformers, and what the page's command makes of
    it.
    """
    made = drawn_run.of_words(tmp_path / "run", **PUBLISHED)
    theirs = tmp_path / "transfo-xl-wt103"
    convert(made.path, theirs, to_format=TargetFormat.HUGGINGFACE)
    (theirs / "txl_jax.json").unlink()
    convert(theirs, tmp_path / "wt103")
    monkeypatch.chdir(tmp_path)


def test_each_old_block_has_a_new_one():
    assert len(old_blocks()) == len(python_blocks(PAGE)) == 9


@pytest.mark.full
@pytest.mark.usefixtures("converted")
def test_the_new_code_runs():
    names = execute(python_blocks(PAGE))

    n_token = names["ids"].shape[1]
    assert n_token == 6
    assert names["model"].decode(names["ids"][0]).strip() == "the cat sat on the <unk>"
    assert names["log_p"].shape == (1, n_token - 4, 19)
    assert names["losses"].shape == (n_token - 1,)
    # The memory has the same past that the whole text has.
    np.testing.assert_allclose(names["continued"][0], names["losses"][3:], rtol=0, atol=1e-5)
    assert names["loss"] == pytest.approx(names["losses"].mean(), rel=1e-6)
    assert names["hidden"].shape == names["embedded"].shape == names["inputs"].shape == (6, 64)
    assert 1 <= len(names["continuation"]) <= 12
    assert names["logits"].shape == (2, 3)


@pytest.mark.nightly(part="huggingface")
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
@pytest.mark.usefixtures("converted")
def test_the_new_code_computes_what_the_old_code_does():
    """By the names that both define."""
    import torch

    torch.set_num_threads(1)
    old = execute(old_blocks())
    new = execute(python_blocks(PAGE))

    for name in ("ids", "continuation", "num_parameters"):
        assert np.array_equal(old[name], new[name]), name
    # Theirs is a list of [M, B, D] for each layer.
    old["mems"] = torch.stack(old["mems"]).transpose(1, 2)
    # Theirs are sorted by cluster.
    assert not np.allclose(old["losses"], new["losses"])
    old["losses"] = np.sort(old["losses"])
    new["losses"] = np.sort(new["losses"])
    # With their classifier's matrix, which is random.
    params = {"core": new["model"].params, "score": old["score"].numpy()}
    new["logits"] = new["logits_of"](params, new["tokens"], new["count"])
    losses = ("losses", "loss", "continued")
    for name in ("log_p", "mems", *losses, "hidden", "embedded", "inputs", "logits"):
        theirs = np.asarray(old[name])
        assert theirs.shape == np.shape(new[name]), name
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(new[name], theirs, rtol=0, atol=1e-5 * scale, err_msg=name)


@pytest.mark.nightly(part="huggingface")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("converted")
def test_the_page_splits_text_as_their_tokenizer_does():
    [block] = python_blocks(PAGE, title="with sacremoses")
    like_wikitext = execute([block])["like_wikitext"]
    tokenizer = execute(old_blocks()[:1])["tokenizer"]

    for text in (
        "23,000 people, 1.80m tall, don't agree (or do they?).",
        "A well-known “quote” — from 1,234,567.89 sources; see e.g. p. 12.",
        "the cat sat on the mat",
        "the <unk> sat, on<unk>the <eos>",
        "tokenized : 1 @.@ 80 m , well @-@ known",
    ):
        assert like_wikitext(text).split() == tokenizer.tokenize(text), text
    assert like_wikitext("the <unk> of the <formula>,").split()[1::3] == ["<unk>", "<formula>"]
    assert tokenizer.tokenize("1 @.@ 80") == ["1", "@", ".", "@", "80"], "the page says so"
