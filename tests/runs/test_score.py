"""Tests scores: of a text, of both splits in total and per token, and of the documents of a
file.
"""

import copy
import csv
import dataclasses
import json
import re
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support import drawn_run, runs, tiny_model, tiny_run
from txl_jax.config import DType, Tokenizer, config_tree
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.word_tokens import CharacterVocabulary
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.metrics import Measure, Totals
from txl_jax.runs import dynamic, score_input, score_splits, scoring_progress
from txl_jax.runs import score as score_job
from txl_jax.runs.score_input import InputFormat, documents, open_input
from txl_jax.runs.score_splits import evaluate_splits
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runs.trained import TrainedModel

pytestmark = pytest.mark.usefixtures("traces_kept")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, corpus, workdir, built) of a run on random bytes, of which each split has 51."""
    folder = tmp_path_factory.mktemp("run")
    content = np.random.default_rng(0).integers(256, size=1011).astype(np.uint8).tobytes()
    config, corpus = drawn_run.on_text(folder, content, model__n_layer=1)
    workdir, built = drawn_run.make(folder / "run", config, corpus)
    return config, corpus, workdir, built


def read_table(workdir, split):
    """Returns the columns of a split's table, read by someone who knows tabs and lines."""
    text = Path(workdir.path, f"scores-{split}.tsv").read_text(encoding="utf-8")
    header, *rows = [line.split("\t") for line in text.splitlines()]
    assert header == ["index", "token", "nats"]
    return zip(*rows, strict=True)


def test_both_splits_are_scored_in_total_and_per_token(run, monkeypatch):
    # Tables are written in blocks, of which each split has several here.
    monkeypatch.setattr(score_splits, "_TOKENS_PER_BLOCK", 13)
    config, corpus, workdir, built = run

    results = evaluate_splits(config, corpus, workdir)
    totals = score_splits.score_tokens(config, corpus, workdir)

    assert json.loads(Path(workdir.path, "evaluation.json").read_text()) == results
    assert results["step"] == drawn_run.STEP
    assert results["text_sha256"] == corpus.digest
    params = tiny_run.params(built.model)
    for split in ("valid", "test"):
        tokens = getattr(corpus, split)
        n_scored = len(tokens) - 1
        expected = score_job.score(built, params, tokens, name=split, log=str)
        assert expected.tokens == n_scored
        assert totals[split] == dataclasses.replace(expected, bytes=n_scored)
        assert results[split]["loss"] == expected.nll
        assert results[split]["tokens"] == n_scored

        numbers, names, nats = read_table(workdir, split)
        assert list(map(int, numbers)) == list(range(1, len(tokens)))
        assert b"".join(map(unescaped, names)) == corpus.vocabulary.decode(tokens[1:])
        assert sum(map(float, nats)) == pytest.approx(expected.nats, rel=1e-6)
        read = np.array(nats, np.float32)
        assert len(set(nats)) == len(set(read.tolist())) > 20, "most losses differ"
        shortest = [str(number) for number in read]
        assert shortest == list(nats), "the shortest text that reads back as the number"


# A rule, and segments of another length than the recorded ones.
LEARNING = {
    "eval.dynamic.rule": "rmsprop",
    "eval.dynamic.learning_rate": 0.01,
    "eval.segment_len": 4,
}


def test_with_a_rule_both_splits_are_scored_static_and_dynamic_side_by_side(run, capsys):
    config, corpus, workdir, _ = run
    learning = config_tree.replace(config, LEARNING)
    static_config = config_tree.replace(config, {"eval.segment_len": 4})
    static = evaluate_splits(static_config, corpus, workdir)
    capsys.readouterr()

    results = evaluate_splits(learning, corpus, workdir)

    out = capsys.readouterr().out
    assert json.loads(Path(workdir.path, "evaluation.json").read_text()) == results
    assert results["eval"]["dynamic.learning_rate"] == 0.01
    assert not results.keys() & {"valid", "test"}
    for split in ("valid", "test"):
        assert results["static"][split] == static[split]
        dynamic = results["dynamic"][split]
        assert dynamic["tokens"] == static[split]["tokens"]
        # Random parameters on a random text learn at least which bytes there are.
        assert 0 < dynamic["loss"] < static[split]["loss"] - 0.01
        for kind in ("static", "dynamic"):
            assert re.search(
                rf"(?m)^{split} {kind} bits per byte {results[kind][split]['bpc']:.4f}", out
            )


def test_the_score_of_each_token_is_from_before_it_was_learned(run):
    config, corpus, workdir, _ = run
    learning = config_tree.replace(config, LEARNING)

    totals = score_splits.score_tokens(learning, corpus, workdir)

    results = evaluate_splits(learning, corpus, workdir)
    for split in ("valid", "test"):
        assert totals[split].nll == pytest.approx(results["dynamic"][split]["loss"], rel=1e-6)
        _, _, nats = read_table(workdir, split)
        assert sum(map(float, nats)) == pytest.approx(totals[split].nats, rel=1e-6)


def test_learning_changes_nothing_in_the_run(run):
    config, corpus, workdir, _ = run

    def contents():
        files = [path for path in Path(workdir.path).rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files if path.name != "evaluation.json"}

    before = contents()
    evaluate_splits(config_tree.replace(config, LEARNING), corpus, workdir)

    assert contents() == before


def test_averaged_checkpoints_of_a_member_do_not_learn(run):
    config, corpus, workdir, _ = run
    averaged = config_tree.replace(config, LEARNING | {"eval.average_checkpoints": 2})
    trained = TrainedModel.of(workdir, averaged)
    dynamic.check_can_learn(trained)

    # The same run, as if it were a member: the error comes before its checkpoints are looked for.
    as_member = copy.copy(workdir)
    as_member.member = "seed=2"
    with pytest.raises(UserError, match=r"eval\.average_checkpoints"):
        evaluate_splits(averaged, corpus, as_member)


def test_a_choice_of_attention_that_the_record_lacks_is_not_a_change_of_it(run):
    """A new choice is made for another eval.mem_len, and no line says that one was replaced."""
    config, _, workdir, _ = run
    lines = []
    longer = config_tree.replace(config, {"eval.mem_len": config.eval.mem_len + 1})
    TrainedModel.of(workdir, longer).build(log=lines.append)
    assert lines == []


def test_a_text_that_is_both_splits_is_scored_once(run, capsys, monkeypatch):
    config, corpus, workdir, _ = run
    same = dataclasses.replace(corpus, test=corpus.valid)
    score = score_job.score
    scored = []

    def count_and_score(*arguments, **options):
        scored.append(options["name"])
        return score(*arguments, **options)

    monkeypatch.setattr(score_splits, "score", count_and_score)

    results = evaluate_splits(config, same, workdir)

    assert results["test"] == results["valid"]
    assert len(scored) == 1
    out = capsys.readouterr().out
    assert re.search("(?m)^note +test is the same text as valid", out)
    [valid] = re.findall(r"(?m)^valid (bits per byte .* tokens\))", out)
    [test] = re.findall(r"(?m)^test (bits per byte .* tokens\))", out)
    assert valid == test

    totals = score_splits.score_tokens(config, same, workdir)

    assert totals["test"] == totals["valid"]
    assert len(scored) == 2
    valid_table = Path(workdir.path, "scores-valid.tsv").read_bytes()
    assert Path(workdir.path, "scores-test.tsv").read_bytes() == valid_table


@pytest.mark.parametrize(
    ("kind", "has", "lacks"),
    [
        (Tokenizer.BYTE, {"bpc", "bits_per_byte"}, {"approximate_bits_per_byte"}),
        (Tokenizer.CHAR, {"bpc", "bits_per_byte"}, {"approximate_bits_per_byte"}),
        (Tokenizer.WORD, {"approximate_bits_per_byte"}, {"bpc", "bits_per_byte"}),
        (Tokenizer.SUBWORD, {"bits_per_byte"}, {"bpc", "approximate_bits_per_byte"}),
        (Tokenizer.ID, set(), {"bpc", "bits_per_byte", "approximate_bits_per_byte"}),
    ],
    ids=["bytes", "characters", "words", "subwords", "ids"],
)
def test_every_kind_of_tokens_has_bits_per_byte_of_its_text(tmp_path, kind, has, lacks):
    changes = {"data__tokenizer__kind": kind, "model__n_layer": 1}
    if kind is Tokenizer.SUBWORD:
        # All bytes, and some tokens of several bytes.
        changes["data__tokenizer__vocab_size"] = 290
    if kind is Tokenizer.ID:
        np.save(tmp_path / "ids.npy", np.arange(1000) % 13)
        changes["data__file"] = str(tmp_path / "ids.npy")
    config, corpus = drawn_run.on_text(tmp_path, "ein Satz für Wörter\n".encode() * 100, **changes)
    workdir, _ = drawn_run.make(tmp_path / "run", config, corpus)

    scores = evaluate_splits(config, corpus, workdir)["test"]

    assert has < scores.keys()
    assert not lacks & scores.keys()
    assert scores["bits_per_token"] == pytest.approx(scores["loss"] / np.log(2))
    bits = scores["bits_per_token"] * scores["tokens"]
    n_bytes = corpus.vocabulary.count_bytes(corpus.test[1:])
    for name in has - {"bpc"}:
        assert scores[name] == pytest.approx(bits / n_bytes), name


def test_the_losses_of_a_bfloat16_models_tokens_keep_the_bits_that_were_computed(run, monkeypatch):
    """Losses are computed in float32, which the tables show."""
    config, corpus, _, _ = run
    dtypes = []

    def score(*arguments, token_nats, **options):
        dtypes.append(token_nats.dtype.name)
        return Totals(1.0, 1), "a line"

    monkeypatch.setattr(score_splits, "score_text_with_line", score)
    narrow = config_tree.replace(config, {"model.dtype": DType.BFLOAT16})
    trained = types.SimpleNamespace(config=narrow)
    parts = score_splits._score_splits(
        None, trained, corpus, lambda: False, kind=None, per_token=True
    )

    assert [part.split for part in parts] == list(score_splits.Split)
    assert set(dtypes) == {"float32"}


def test_another_text_is_noted(run, capsys):
    config, corpus, workdir, _ = run
    other = dataclasses.replace(corpus, digest="0" * 64, description="another text")
    evaluate_splits(config, other, workdir)
    assert "another text" in capsys.readouterr().out


def test_another_vocabulary_and_an_empty_workdir_are_errors(run, tmp_path):
    config, corpus, workdir, _ = run
    other = dataclasses.replace(corpus, vocabulary=ByteVocabulary(b"abc"))
    with pytest.raises(UserError, match=r"\b256\b.*\b3\b"):
        evaluate_splits(config, other, workdir)
    with pytest.raises(UserError, match="--mode=train"):
        evaluate_splits(config, corpus, runs.record(tmp_path, config, corpus))


def test_a_stop_writes_nothing(run, tmp_path):
    config, corpus, *_ = run
    workdir, _ = drawn_run.make(tmp_path / "run", config, corpus)
    with pytest.raises(Interrupted, match="valid"):
        evaluate_splits(config, corpus, workdir, stop_requested=lambda: True)
    assert not Path(workdir.path, "evaluation.json").exists()


def test_without_a_terminal_a_line_comes_every_twenty_seconds(monkeypatch):
    # At the start, and at each call: a line is due at 120 s, and at 140 s or later.
    clock = iter([100, 119, 120, 121, 145])
    monkeypatch.setattr(scoring_progress.time, "monotonic", lambda: next(clock))
    logged = []

    with scoring_progress.progress_bar(
        "a text",
        50,
        unit="segment",
        measure=Measure.BPC,
        log=logged.append,
        stop_requested=lambda: False,
    ) as show:
        for done in (5, 10, 15, 20):
            show(done, Totals(nats=np.log(2) * done, tokens=done))

    # How much is done, the score, and the time that is left. It does not count the time until the
    # first call, at 119 s. After it, 5 segments took 1 s, so 40 take 8 s, and 15 took 26 s.
    numbers = [re.findall(r"[\d.:]+[\d%]", line) for line in logged]
    assert numbers == [["20%", "1.0000", "0:00:08"], ["40%", "1.0000", "0:00:52"]]


def unescaped(text):
    r"""The bytes of a printed name: \\ \n \r \t, \xNN of a byte, \uNNNN of a character."""
    plain = {"\\": b"\\", "n": b"\n", "r": b"\r", "t": b"\t"}
    content = b""
    for byte, code, letter, other in re.findall(r"\\(?:x(..)|u(....)|(.))|([^\\])", text):
        if byte:
            content += bytes.fromhex(byte)
        elif code:
            content += chr(int(code, 16)).encode()
        elif letter:
            content += plain[letter]
        else:
            content += other.encode()
    return content


@given(
    st.binary()
    | st.text().map(lambda text: text.encode(errors="ignore"))
    # What escapes consist of, and characters that end a line.
    | st.text("\\nrtxu\n\t\r\x85\u2028")
)
@example(bytes(range(256)))
def test_a_name_is_one_cell_of_one_line_and_can_be_read_back(name):
    if isinstance(name, str):
        name = name.encode()
    shown = score_splits.printable(name)
    assert "\t" not in shown
    assert len(shown.splitlines()) <= 1
    assert not {chr(i) for i in range(32)} & set(shown)
    assert unescaped(shown) == name


def test_tables_of_tokens_are_read_by_readers_of_csv():
    """A quotation mark at the start of a cell would open a cell of several lines."""
    names = [b'"', b'""', b'a"', b'"a', b"a", b"'"]
    vocabulary = types.SimpleNamespace(names=lambda: names)
    tokens = np.array([0, 0, 1, 2, 3, 4, 5, 0])
    lines = list(score_splits.token_lines(tokens, np.arange(8.0), vocabulary))
    _, *rows = csv.reader(lines, delimiter="\t")
    assert [unescaped(name) for _, name, _ in rows] == [names[token] for token in tokens[1:]]


TEXT = b"one\n\n \ntwo\nthree\n\nfour"


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n\n"], ids=["no end", "an end", "blank lines"])
def test_documents_have_their_lines(tmp_path, end):
    path = tmp_path / "file"
    path.write_bytes(TEXT + end)

    with open_input(str(path)) as file:
        in_lines = list(documents(file, InputFormat.LINES))
    with open_input(str(path)) as file:
        in_paragraphs = list(documents(file, InputFormat.DOCUMENTS))

    lines = (TEXT + end).removesuffix(b"\n").split(b"\n")
    assert in_lines == list(enumerate(lines, start=1))
    assert in_paragraphs == [(1, b"one"), (4, b"two\nthree"), (7, b"four")]


def test_an_input_without_documents_has_none():
    assert list(documents([], InputFormat.LINES)) == []
    assert list(documents([b"\n"], InputFormat.DOCUMENTS)) == []


@pytest.mark.parametrize("form", list(InputFormat))
def test_byte_order_marks_and_windows_line_ends_are_not_text_unless_the_tokens_are_bytes(
    form,
):
    r"""Only the mark at the beginning of a file, and one \r before each newline. Documents end at
    blank lines, also at those with a \r.
    """
    lines = [b"\xef\xbb\xbfone\r\n", b"\r\n", b"two\r\r\n", b"\xef\xbb\xbf"]
    texts = [text for _, text in documents(lines, form)]
    kept = [text for _, text in documents(lines, form, as_bytes=True)]
    if form is InputFormat.LINES:
        assert texts == [b"one", b"", b"two\r", b"\xef\xbb\xbf"]
        assert kept == [b"\xef\xbb\xbfone\r", b"\r", b"two\r\r", b"\xef\xbb\xbf"]
    else:
        assert texts == [b"one", b"two\r\r\n\xef\xbb\xbf"]
        assert kept == [b"\xef\xbb\xbfone\r", b"two\r\r\n\xef\xbb\xbf"]


def test_what_cannot_be_opened_is_named(tmp_path):
    # A file that is missing, a directory, and what other commands take for standard input.
    for path, hint in (
        (tmp_path / "missing", "--input"),
        (tmp_path, "--input"),
        ("-", "/dev/stdin"),
    ):
        with pytest.raises(UserError, match=rf"{path} .*{hint}"):
            open_input(str(path))


def records(lines, *, per_token=False, params=None, written=None, vocabulary=tiny_model.VOCABULARY):
    """The records of documents that are read in 3 rows.

    `written` gets the lines of records, also the ones before a mistake.
    """
    model = tiny_model.make(eval__batch_size=3)
    # Stands for a trained run, of which these are asked for. Its parameters are of step 7.
    weights = types.SimpleNamespace(
        vocabulary=vocabulary,
        build=lambda log: model.components,
        params=lambda components, log: (7, params or model.params),
    )
    if written is None:
        written = []
    texts = enumerate(lines, start=1)
    score_input.score_documents(
        weights, texts, name="book.txt", per_token=per_token, write=written.append
    )
    assert len(written) == len(lines)
    return [json.loads(line) for line in "".join(written).splitlines()]


# More documents than the three rows, of several segments or one, of a single token, and empty.
DOCUMENTS = ["abc dab", "", "k", "abba " * 9, "cab"]


def test_a_record_per_document():
    model = tiny_model.make()

    per_document = records([document.encode() for document in DOCUMENTS])

    for number, (document, record) in enumerate(zip(DOCUMENTS, per_document, strict=True)):
        nats = tiny_model.alone(model, model.encode(document))
        expected = {
            "index": number,
            "nats": pytest.approx(nats.sum(), rel=1e-6),
            "tokens": len(nats),
        }
        # A token is a byte. A record of no tokens has no number of bytes.
        if len(nats):
            expected["bytes"] = len(nats)
        assert record == expected


def test_a_record_per_token():
    model = tiny_model.make(eval__batch_size=3)

    per_token = records([document.encode() for document in DOCUMENTS], per_token=True)

    expected = model.score(DOCUMENTS, per_token=True, batch_size=3)
    assert len(per_token) == sum(len(nats) for nats in expected)
    for number, (document, nats) in enumerate(zip(DOCUMENTS, expected, strict=True)):
        of_document = [record for record in per_token if record["index"] == number]
        assert "".join(record["token"] for record in of_document) == document[1:]
        positions = [record["position"] for record in of_document]
        assert positions == list(range(1, len(document)))
        scores = np.array([record["nats"] for record in of_document], np.float32)
        np.testing.assert_array_equal(scores, nats, err_msg=document)


def test_a_mistake_names_its_line_after_the_records_before():
    written = []
    # "Z" is byte 90, which the vocabulary does not have.
    with pytest.raises(UserError, match=r"^line 3 of book\.txt.*\b90\b") as error:
        records([b"abc", b"a" * 70, b"aZ", b"abc"], written=written)
    assert "\n" not in str(error.value)
    assert [json.loads(line)["tokens"] for line in written] == [2, 69]


def test_a_note_says_how_many_tokens_are_unknown(capsys):
    # As many tokens as the model has. The replacement character stands for unknown characters.
    vocabulary = CharacterVocabulary("\n abcdefghi\N{REPLACEMENT CHARACTER}k")
    assert vocabulary.size == tiny_model.VOCABULARY.size
    records([b"abc dab", b"b", b""], vocabulary=vocabulary)
    assert "note" not in capsys.readouterr().out
    records([b"abc", b"zzzz"], vocabulary=vocabulary)
    [note] = re.findall(r"(?m)^note .*", capsys.readouterr().out)
    assert "60.00%" in note, "3 of the 5 tokens that are scored"


def test_a_loss_that_is_not_a_number_is_an_error():
    params = tiny_model.make().params
    softmax = {name: value * np.nan for name, value in params["softmax"].items()}
    with pytest.raises(NonFiniteError, match=r"line 1 of book\.txt.*nan"):
        records([b"abc"], params=params | {"softmax": softmax})
