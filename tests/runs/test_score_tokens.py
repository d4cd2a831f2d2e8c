"""Tests the scores of single tokens: their file, their sum, and how a token is printed."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support import drawn_run
from txl_jax.config import LineMark
from txl_jax.config import tree as config_tree
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.runs import score as score_job
from txl_jax.runs.score import SPLITS


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, corpus, workdir) of a run on all 256 bytes; the validation text has 50, the test text 51."""
    folder = tmp_path_factory.mktemp("run")
    content = np.random.default_rng(0).integers(256, size=1011).astype(np.uint8).tobytes()
    config, corpus = drawn_run.on_text(folder, content)
    return config, corpus, drawn_run.make(folder / "run", config, corpus)[0]


def score(run, *, changes=None, **others):
    config, corpus, workdir = run
    config = config_tree.replace(config, changes or {})
    return score_job.score_tokens(config, corpus, workdir, log=lambda line: None, **others)


def table(run, split):
    """(numbers, tokens, nats as they are written) of a file, split as a reader would that knows tabs and lines."""
    lines = Path(score_job.scores_file(run[2], split)).read_text(encoding="utf-8").splitlines()
    assert lines[0].split("\t") == ["index", "token", "nats"]
    return zip(*(line.split("\t") for line in lines[1:]), strict=True)


def unescaped(text):
    r"""The bytes of a printed name: \\ \n \r \t, \xNN of a byte, \uNNNN of a character."""
    plain = {"\\": b"\\", "n": b"\n", "r": b"\r", "t": b"\t"}
    parts = re.findall(r"\\(?:x(..)|u(....)|(.))|([^\\])", text)
    return b"".join(
        bytes.fromhex(byte) if byte else chr(int(code, 16)).encode() if code else plain[c] if c else other.encode()
        for byte, code, c, other in parts
    )


def test_the_file_holds_every_token_but_the_first_and_its_sum_is_the_evaluation(run):
    config, corpus, workdir = run
    totals = score(run)
    evaluated = score_job.evaluate_splits(config, corpus, workdir, log=lambda line: None)
    for split in SPLITS:
        tokens = getattr(corpus, split)
        numbers, names, nats = table(run, split)
        assert list(map(int, numbers)) == list(range(1, len(tokens)))
        assert b"".join(map(unescaped, names)) == corpus.vocabulary.decode(tokens[1:])
        assert (totals[split].nll, totals[split].tokens) == (evaluated[split]["loss"], evaluated[split]["tokens"])
        assert sum(map(float, nats)) == pytest.approx(totals[split].nats, rel=1e-6)
        read = np.array(nats, np.float32)
        assert len(set(nats)) == len(set(read.tolist())) > 20
        assert [str(number) for number in read] == list(nats), "the shortest text that reads back as the number"


@pytest.mark.parametrize("tokens_per_block", [3, 100])
def test_words_are_written_to_the_file_as_in_the_vocabulary(tokens_per_block, monkeypatch):
    monkeypatch.setattr(score_job, "_TOKENS_PER_BLOCK", tokens_per_block)
    vocabulary = WordVocabulary(("<eos>", "the", "<unk>", "a\\b"), LineMark.EOS)
    nats = np.array([9, 0.1, 1e-9, 16777216], np.float32)
    assert list(score_job.lines(np.array([1, 3, 0, 2]), nats, vocabulary)) == [
        "index\ttoken\tnats\n",
        "1\ta\\\\b\t0.1\n",
        "2\t<eos>\t1e-09\n",
        f"3\t<unk>\t{nats[3]!s}\n",  # 16777216.0 or 1.6777216e+07, as NumPy has it.
    ]


@given(st.binary() | st.text().map(lambda text: text.encode(errors="ignore")) | st.text("\\nrtxu\n\t\r\x85\u2028"))
@example(bytes(range(256)))
def test_a_name_is_one_cell_of_one_line_and_can_be_read_back(name):
    name = name if isinstance(name, bytes) else name.encode()
    shown = score_job.printable(name)
    assert "\t" not in shown and len(shown.splitlines()) <= 1
    assert not {chr(i) for i in range(32)} & set(shown)
    assert unescaped(shown) == name
