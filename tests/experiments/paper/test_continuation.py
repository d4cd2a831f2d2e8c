"""Tests the continuation study: the parts of its page, the same text as generation writes,
refusals.
"""

import types

import numpy as np
import pytest

from experiments.paper import continuation
from experiments.paper.continuation import Plan
from support import drawn_run, tiny_run
from txl_jax.config import LineMark, Network, Tokenizer, config_tree
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.runs.scoring_progress import Interrupted

# Words, punctuation and brackets, and the corpus WikiText-103's mark of a hyphen.
WORDS = ["the", "cat", "sat", "@-@", "on", "(", "a", ")", "mat", ",", "and", "was", "seen", "."]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, corpus, workdir, parts) of a run on words."""
    folder = tmp_path_factory.mktemp("continuation")
    text = ""
    for number in range(120):
        text += " ".join(np.random.default_rng(number).choice(WORDS, 9)) + "\n"
    changes = {
        "data__tokenizer__kind": Tokenizer.WORD,
        "data__tokenizer__line_mark": LineMark.EOS,
        "generate__length": 7,
        "generate__samples": 2,
    }
    config, corpus = drawn_run.on_text(folder, text.encode(), **changes)
    return config, corpus, *drawn_run.make(folder / "run", config, corpus)


def write(run, path, stop_requested=lambda: False, **others):
    continuation.write(*run[:3], Plan(out=str(path), **others), stop_requested=stop_requested)
    return path.read_text()


@pytest.mark.full
def test_a_page_has_the_continuations_of_the_model_and_of_the_text(run, tmp_path):
    page = write(run, tmp_path / "page.md", starts=(3, 20), context=11)

    # The model continues the context of 11 tokens from token 3 on by 7, as generation does. The
    # text's own 7 follow the context too.
    config, corpus, _, parts = run
    blocks = tiny_run.generator(parts.model, config.eval).tokens(
        np.asarray(corpus.test)[3:14], config.generate
    )
    written = np.concatenate(list(blocks), axis=1)
    for row in [*written, np.asarray(corpus.test)[14:21]]:
        assert continuation.quoted(corpus, row) in page


@pytest.mark.full
def test_a_stop_writes_nothing_and_an_impossible_start_or_network_is_refused(run, tmp_path):
    page = tmp_path / "page.md"
    n_token = len(run[1].test)
    with pytest.raises(Interrupted):
        write(run, page, context=3, stop_requested=lambda: True)
    # The last start leaves a context of 11 and a continuation of 7.
    with pytest.raises(ValueError, match=rf"\b{n_token - 18}\b.*\b{n_token}\b"):
        write(run, page, starts=(n_token,), context=11)
    lstm = config_tree.replace(run[0], {"model.network": Network.LSTM})
    with pytest.raises(ValueError, match=r"model\.network.*\blstm\b"):
        write((lstm, *run[1:]), page)
    assert not page.exists()


def test_a_text_is_shown_as_it_is():
    """It is indented by four spaces, so that Markdown shows its marks instead of reading them."""
    corpus = types.SimpleNamespace(vocabulary=ByteVocabulary(bytes(range(256))))
    text = "    - *a* # 1\n\n" + "word " * 30
    tokens = np.frombuffer(text.encode(), np.uint8)

    first, second, *folded = continuation.quoted(corpus, tokens).splitlines()

    assert first == "        - *a* # 1"
    assert second == ""
    # A line of 150 characters is folded at 100.
    assert len(folded) == 2
    assert "".join(line[4:] for line in folded) == "word " * 30
    assert max(len(line) for line in folded) <= 104
