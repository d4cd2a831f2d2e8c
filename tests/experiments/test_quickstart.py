"""Tests the quickstart's comparison, and what it offers at its end."""

import dataclasses
import json
import lzma
import re
import sysconfig

import numpy as np
import pytest

from experiments import quickstart
from support import drawn_run, programs, runs
from txl_jax.config import DynamicRule, config_tree
from txl_jax.data import own_text
from txl_jax.data.corpus import read_corpus
from txl_jax.runs.dynamic import DynamicModel
from txl_jax.runs.score import score

# Replaces `quickstart.LEARNING`, with a rate that is high enough for so short a text.
LEARNING = {
    "eval.batch_size": 5,
    "eval.dynamic.rule": DynamicRule.SGD,
    "eval.dynamic.learning_rate": 0.5,
}


def reading(bits):
    """Returns a reading of the test split whose curve ends at its bits."""
    return quickstart.Reading(bits, np.array([bits + 1, bits]))


def comparison(*, learning=1.5, lzma_alone=2.0, lzma_after_training=1.75):
    """Returns a comparison with some of its bits per byte."""
    return quickstart.Comparison(
        n_bytes=4321,
        mem_len=60,
        without_memory=reading(3.0),
        with_memory=reading(2.5),
        learning=reading(learning),
        lzma_alone=lzma_alone,
        lzma_after_training=lzma_after_training,
        bytes_read=np.array([2000.0, 4321.0]),
    )


def test_curves_end_at_the_bits_of_the_whole_test_split(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "LEARNING", LEARNING)
    changes = {
        "model.n_layer": 1,
        "eval.batch_size": 2,
        "eval.segment_len": 4,
        "eval.mem_len": 7,
    }
    config, corpus = drawn_run.on_text(tmp_path, drawn_run.letters(), **changes)
    assert len(corpus.test) == 56
    run, _ = drawn_run.make(tmp_path / "run", config, corpus)

    # What the comparison scores: settings, totals and nats, by name.
    settings_of = {}
    totals_of = {}
    nats_of = {}

    def keeping(score_text, get_config):
        """Returns a function that scores a text, and keeps what goes into it and comes out."""

        def score_and_keep(*text, name, token_nats, **options):
            totals = score_text(*text, name=name, token_nats=token_nats, **options)
            settings_of[name] = get_config(text[0]).eval
            totals_of[name] = totals
            nats_of[name] = token_nats
            return totals

        return score_and_keep

    monkeypatch.setattr(quickstart, "score", keeping(score, lambda built: built.config))
    learning_score = keeping(DynamicModel.score, lambda model: model.built.config)
    monkeypatch.setattr(DynamicModel, "score", learning_score)

    comparison = quickstart.compare(config, corpus, run)

    assert settings_of == {
        "without memory": dataclasses.replace(config.eval, mem_len=0, same_length=False),
        "with memory": config.eval,
        "learning": config_tree.replace(config, LEARNING).eval,
    }
    # The 55 targets are five rows of 11, which are read in segments of 4, 4 and 3.
    assert comparison.bytes_read == pytest.approx(56 * np.array([20, 40, 55]) / 55)
    readings = {
        "without memory": comparison.without_memory,
        "with memory": comparison.with_memory,
        "learning": comparison.learning,
    }
    for name, reading_of_text in readings.items():
        assert reading_of_text.bits == pytest.approx(totals_of[name].bits_per_token), name
        # The first byte has no loss.
        bits_of_rows = nats_of[name][1:].reshape(5, 11) / np.log(2)
        by_hand = [
            bits_of_rows[:, :4].mean(),
            bits_of_rows[:, :8].mean(),
            bits_of_rows[:, :11].mean(),
        ]
        assert reading_of_text.curve == pytest.approx(by_hand, rel=1e-5), name
    assert len({reading_of_text.bits for reading_of_text in readings.values()}) == 3, "all differ"
    assert comparison.n_bytes == 56
    assert comparison.mem_len == 7


def test_lzma_may_refer_to_the_training_split(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "LZMA_WINDOW", 700)
    noise = np.random.default_rng(0).integers(32, 127, 250).astype(np.uint8).tobytes()
    # Of 1,000 bytes, the first 900 train and the last 50 test. These 50 are in the training split,
    # of which the last 700 fit the window.
    content = noise[:100] * 9 + noise[150:200] + noise[50:100]
    _, corpus = drawn_run.on_text(tmp_path, content)
    test = content[-50:]
    train = content[200:900]

    alone, after_training = quickstart.lzma_bytes(corpus)
    assert alone == len(lzma.compress(test, preset=9))
    both = len(lzma.compress(train + test, preset=9))
    assert after_training == both - len(lzma.compress(train, preset=9))
    assert after_training < alone / 4


@pytest.mark.parametrize(
    ("bits", "claims"),
    [
        ({"learning": 1.5}, ["lzma -9 and lzma -9 after the training split"]),
        ({"learning": 1.8}, ["lzma -9"]),
        ({"learning": 2.2}, []),
        ({"lzma_alone": 1.5, "lzma_after_training": 1.5}, []),
    ],
    ids=["better than both", "better than one", "worse", "as good"],
)
def test_a_comparison_claims_only_what_this_run_shows(bits, claims):
    shown = comparison(**bits)
    text = "\n".join(shown.lines())

    numbers = [2.5, 3.0, shown.learning.bits, shown.lzma_alone, shown.lzma_after_training]
    assert re.findall(r"\d\.\d{3}", text) == [f"{number:.3f}" for number in numbers]
    assert "4,321 bytes" in text
    assert "memory of 60" in text
    assert re.findall(r"fewer bits than (.*)\.", text) == claims


def test_the_server_is_offered_only_if_its_packages_are_installed(monkeypatch):
    for missing in (None, *quickstart.SERVER_PACKAGES):
        monkeypatch.setattr(
            quickstart.importlib.util, "find_spec", lambda name, missing=missing: name != missing
        )

        commands = quickstart.next_commands("my runs/a")

        # The last command trains on the user's own text. The others use this run.
        assert all("'my runs/a'" in command for command in commands[:-1]), missing
        offered = re.findall(r"experiments\.(\w+)", "\n".join(commands))
        assert ("serve" in offered) == (missing is None), missing
        assert offered.count("text") == 2, missing


@pytest.fixture
def small_stdlib(tmp_path, monkeypatch):
    """A standard library of 50 modules of 30 bytes, of which ten test and ten validate.

    Each of these splits takes modules until it has 300 bytes.
    """
    folder = tmp_path / "lib"
    folder.mkdir()
    for number in range(50):
        (folder / f"module{number:02}.py").write_text(f"text of module {number}".ljust(30, "#"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    monkeypatch.setattr(own_text, "STDLIB_LEAST_HELDOUT", 300)
    monkeypatch.setattr(own_text, "STDLIB_MOST_HELDOUT", 340)
    return folder


FLAGS = [*programs.TINY, *programs.steps(4, every=2), "--optimizer.warmup_steps=1"]


def files_in(folder):
    """Returns the bytes of all files except locks, by path."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".lock":
            files[path] = path.read_bytes()
    return files


@pytest.mark.usefixtures("small_stdlib")
def test_a_directory_of_a_quickstart_with_another_split_stays_as_it_is(tmp_path, monkeypatch):
    """An earlier version split the library by position. The text's digest tells the two apart."""
    workdir = tmp_path / "run"
    flags = [*FLAGS, "--compilation_cache=off", f"--workdir={workdir}"]
    config = programs.config_of(quickstart.DEFAULTS, *FLAGS)
    # A run as that version has left it: another split, which its description did not name.
    with monkeypatch.context() as before:
        before.setattr(
            own_text,
            "split_by_name",
            lambda root, paths: own_text.split_by_position(paths, at_lines=False),
        )
        corpus = read_corpus(config.data, data_dir="", cache_dir=str(workdir / "prepared"))
    description = corpus.description.replace(", split by names", "")
    corpus = dataclasses.replace(corpus, description=description)
    runs.record(workdir, config, corpus)
    files = files_in(workdir)

    code, _, err = programs.run("experiments.quickstart", *flags)

    assert code == 1
    assert "the text was" in err
    assert "--workdir" in err
    assert err.count("\n") == 1
    # Of the two texts in the error, only the new one's description has it.
    assert err.count("split by names") == 1
    for path, content in files.items():
        assert path.read_bytes() == content, path
    assert json.loads((workdir / "config.json").read_text())["text"]["digest"] == corpus.digest


@pytest.mark.full
@pytest.mark.usefixtures("small_stdlib")
def test_a_small_quickstart(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "LEARNING", LEARNING)
    words = [*FLAGS, f"--workdir={tmp_path / 'run'}", "--generate.length=5"]

    code, out, err = programs.run("experiments.quickstart", *words)

    assert code == 0, err
    # With memory, learning, and two of lzma.
    assert len(re.findall(r"(?m)^  \d\.\d{3}  \S.*\.$", out)) == 4
    picture = (tmp_path / "run" / "quickstart.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    assert re.search(r"(?m)^next  python -m experiments", out)
