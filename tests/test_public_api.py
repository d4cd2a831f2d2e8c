"""Tests of the public names, trained models from Python, the pages' Python code, and the check of
the jax version.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

import txl_jax
from support import ROOT, drawn_run, tiny, tiny_model
from support.pages import execute, python_blocks
from txl_jax.config import config_tree
from txl_jax.errors import UserError
from txl_jax.runtime.log import read_metrics
from txl_jax.version import OLDEST_JAX, check_jax

NO_TEXT = config_tree.replace(
    txl_jax.preset("small"), {"data.corpus": "text", "data.file": "no.txt"}
)
TEXT = bytes(np.random.default_rng(3).choice(list(b"abcdefgh \n"), 1200).tolist())


@pytest.fixture
def book(tmp_path, monkeypatch):
    """The text in the working directory that the pages train on."""
    (tmp_path / "book.txt").write_bytes(b"the cat sat on the mat. " * 4000)
    monkeypatch.chdir(tmp_path)


def test_every_public_name_is_there_and_typed():
    for name in txl_jax.__all__:
        assert getattr(txl_jax, name) is not None, name
    assert set(txl_jax.__all__) == set(dir(txl_jax))
    assert (ROOT / "txl_jax" / "py.typed").exists()
    with pytest.raises(AttributeError, match="TransfomerXL"):
        _ = txl_jax.TransfomerXL


def test_names_that_are_different_in_their_module_are_public():
    from txl_jax import memory
    from txl_jax.ops import adaptive_softmax

    assert txl_jax.adaptive_embed is adaptive_softmax.embed
    assert txl_jax.adaptive_log_probabilities is adaptive_softmax.log_probabilities
    assert txl_jax.adaptive_nll is adaptive_softmax.negative_log_likelihood
    assert txl_jax.init_memory is memory.init
    assert txl_jax.update_memory is memory.update
    assert txl_jax.reset_memory is memory.reset


IMPORT_ALL = """
import importlib, pkgutil, signal, sys
import txl_jax, txl_jax.config
txl_jax.ModelConfig
assert "jax" not in sys.modules
import jax
from jax._src import xla_bridge

def state():
    values = {name: str(value) for name, value in jax.config.values.items()}
    for number in (signal.SIGINT, signal.SIGTERM):
        values[str(number)] = str(signal.getsignal(number))
    values["hook"] = str(sys.excepthook)
    return values

before = state()
for module in pkgutil.walk_packages(txl_jax.__path__, "txl_jax."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert not error.name.startswith("txl_jax"), error  # A package of an extra.
# A setting may be new: jax 0.7 declares those of Pallas when that is imported.
after = state()
changed = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
assert "txl_jax.training.step" in sys.modules
assert not changed and not xla_bridge._backends, (changed, xla_bridge._backends)
"""


def test_settings_import_no_jax_and_all_modules_change_no_setting_of_it_and_start_no_device():
    subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run on `TEXT`, and its corpus."""
    folder = tmp_path_factory.mktemp("run")
    config, corpus = drawn_run.on_text(folder, TEXT)
    return drawn_run.make(folder / "run", config, corpus)[0], corpus


def test_a_trained_model_scores_texts_as_its_log_probabilities_add_up(run):
    workdir, corpus = run
    model = txl_jax.load(workdir.path)
    tokens = corpus.vocabulary.encode(TEXT[:41])[None]
    assert model.step == drawn_run.STEP
    assert model.vocabulary == corpus.vocabulary
    assert re.fullmatch(
        rf"<.*transformer_xl, 2 layers.* byte tokens, step {drawn_run.STEP} .*{workdir.path}.*>",
        repr(model),
    )

    [total] = model.score([TEXT[:41]])

    def read(tokens, targets, memory):
        log_p, memory = model.log_probabilities(tokens, memory)
        log_p = np.asarray(log_p)
        np.testing.assert_allclose(np.exp(log_p).sum(-1), 1, rtol=1e-5)
        of_targets = np.take_along_axis(log_p, targets[..., None].astype(int), axis=-1)
        return -of_targets, memory

    # Eight segments of the evaluation's length.
    nats, _ = tiny.over_segments(read, model.init_memory(1), tokens, 5)
    assert total.tokens == nats.size == 40
    assert total.nats == pytest.approx(nats.sum(dtype=np.float64), rel=1e-5)


@pytest.mark.full
def test_readme_carries_a_memory_on(monkeypatch, tmp_path):
    config, corpus = drawn_run.on_text(tmp_path, bytes([*range(32, 127), 10]) * 20)
    model = txl_jax.load(drawn_run.make(tmp_path / "run", config, corpus)[0].path)
    monkeypatch.setattr(txl_jax, "load", lambda _: model)
    tokens = model.encode("open(path):\n")

    names = execute([block.replace("length=100", "length=5") for block in python_blocks()])
    with_memory = names["log_probabilities"]
    without, _ = model.log_probabilities([tokens], model.init_memory(1))

    assert with_memory.shape == without.shape == (1, len(tokens), 256)
    assert np.abs(with_memory - without)[0, 0].max() > 1e-4


@pytest.mark.parametrize(
    ("updates", "limit"),
    [
        pytest.param(20, 3, id="20 updates"),
        pytest.param(200, 1, id="200 updates", marks=pytest.mark.full),
    ],
)
@pytest.mark.usefixtures("book", "compiled_calls")
def test_a_page_trains_with_a_loop_of_its_own(updates, limit, capsys):
    """And the bits per byte of its text, which repeats itself, fall below a limit."""
    [loop] = [block for block in python_blocks("docs/usage.md") if "scan_segments" in block]
    assert "range(0, 200, 10)" in loop  # The page makes 200 updates, ten per call.
    execute([loop.replace("200", str(updates))])
    bits = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(bits) == updates // 10
    assert bits[0] > 4
    assert bits[-1] < limit


@pytest.mark.full
@pytest.mark.usefixtures("book")
def test_the_page_on_observing_trains_with_a_sink(capsys):
    execute(python_blocks("docs/watching.md"))
    records = read_metrics("runs/observed")
    assert [record["step"] for record in records if record["kind"] == "halfway"] == [10, 20]
    lowest = min(record["loss"] for record in records if record["kind"] == "valid")
    assert float(capsys.readouterr().out.splitlines()[-1]) == lowest


@pytest.mark.full
def test_the_page_on_attention_runs_in_one_piece():
    """Its blocks assert what they show. Each block uses the names of the blocks before."""
    blocks = python_blocks("docs/attention.md")
    assert len(blocks) == 5
    names = execute(blocks)
    for name, gradient in names["gradients"].items():
        assert np.abs(gradient).max() > 1e-6, name


@pytest.mark.full
def test_the_page_on_usage_runs_in_one_piece(capsys):
    *blocks, loop = python_blocks("docs/usage.md")
    assert "scan_segments" in loop  # It has a test of its own.
    names = execute(blocks, model=tiny_model.make())
    # The page prints as many lines and more, and generates texts after three prompts.
    assert len(capsys.readouterr().out.splitlines()) > 8
    assert len(names["whole"]) == 3


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        pytest.param(lambda run: txl_jax.load("/nowhere"), "/nowhere", id="no run"),
        pytest.param(
            lambda run: txl_jax.load(run, weight_dtype="int4"),
            "weight_dtype.*int8.*int4",
            id="weight_dtype",
        ),
        pytest.param(
            lambda run: txl_jax.load(run, cache_dtype="float16"),
            "cache_dtype.*bfloat16.*int8.*float16",
            id="cache_dtype",
        ),
        pytest.param(
            lambda run: txl_jax.ModelConfig(layer_norm="before"),
            "layer_norm.*before",
            id="a name that an enum lacks",
        ),
        pytest.param(lambda run: txl_jax.Hook(0, print), r"\b0\b", id="a hook every 0 steps"),
        pytest.param(
            lambda run: txl_jax.train(NO_TEXT, "run", hooks=[print]),
            r"hooks.*Hook.*\[<built-in function print>",
            id="a function for a hook",
        ),
        pytest.param(
            lambda run: txl_jax.train(NO_TEXT, "run", hooks=txl_jax.Hook(5, print)),
            r"hooks.*list.*every=5",
            id="a hook for a list",
        ),
        pytest.param(
            lambda run: txl_jax.train(NO_TEXT, "run", hooks=[txl_jax.Hook(7, print)]),
            r"segments_per_call.*7",
            id="a hook within a call",
        ),
        pytest.param(
            lambda run: txl_jax.train("small", "run"), r"'small'.*preset", id="a preset's name"
        ),
        pytest.param(
            lambda run: txl_jax.ExperimentConfig(data={"file": "a"}),
            r"data.*DataConfig.*dict",
            id="a dict for a config",
        ),
        pytest.param(
            lambda run: txl_jax.ModelConfig(dropout=0.1),
            r"dropout.*DropoutConfig.*float",
            id="a rate for a config",
        ),
        pytest.param(
            lambda run: txl_jax.training_segments(np.zeros(9), batch_size=1, segment_len=2),
            "float64",
            id="floats for ids",
        ),
    ],
)
def test_mistakes_of_callers_are_refused(mistake, words, run):
    workdir, _ = run
    with pytest.raises(txl_jax.UserError, match=words):
        mistake(workdir.path)


def test_enums_may_be_given_by_name():
    config = txl_jax.ModelConfig(layer_norm="pre", dtype="bfloat16")
    assert config == txl_jax.ModelConfig(
        layer_norm=txl_jax.NormPlace.PRE, dtype=txl_jax.DType.BFLOAT16
    )
    assert type(config.dtype) is txl_jax.DType


def test_a_whole_number_may_be_given_for_a_float():
    assert type(txl_jax.OptimizerConfig(clip_norm=1).clip_norm) is float


@pytest.mark.parametrize(
    ("words", "version"),
    [
        pytest.param("0.7.1", mock.Mock(return_value="0.7.1"), id="old"),
        pytest.param(
            "not installed",
            mock.Mock(side_effect=importlib.metadata.PackageNotFoundError("jax")),
            id="missing",
        ),
    ],
)
def test_an_old_or_missing_jax_and_windows_are_refused(monkeypatch, words, version):
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError, match=rf"{words}.*{OLDEST_JAX}"):
        check_jax()
    with pytest.raises(UserError, match=words):
        txl_jax.load  # noqa: B018
    assert txl_jax.ModelConfig  # Settings need no jax.
    assert f"    jax>={OLDEST_JAX}," in (ROOT / "setup.cfg").read_text()

    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UserError, match="WSL"):
        txl_jax.load  # noqa: B018


def test_a_program_ends_with_one_sentence(tmp_path):
    """With an old jax that lacks the names that the program imports: the check comes first."""
    package = tmp_path / "jax"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('too old')\n")
    metadata = tmp_path / "jax-0.6.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.6.2\n")

    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    ended = subprocess.run(
        [sys.executable, "-m", "experiments.quickstart"],
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
    )

    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert "0.6.2" in ended.stderr
    assert OLDEST_JAX in ended.stderr
