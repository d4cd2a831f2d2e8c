"""Tests conversions: from and to each format, in a bucket, of models that a format cannot hold, and
that an error leaves nothing.
"""

import functools
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from safetensors import safe_open

import txl_jax
from experiments import quickstart
from support import drawn_run, tiny, tiny_run, torch_bytes
from support.cases import full_but
from txl_jax.config import (
    AttentionWindow,
    CorpusName,
    DType,
    Encoding,
    ExperimentConfig,
    GenerateConfig,
    MemoryStart,
    Network,
    NormPlace,
    ShawTerms,
    Tokenizer,
    config_tree,
)
from txl_jax.config.experiment import apply_preset, preset, preset_names
from txl_jax.data.corpus import read_corpus
from txl_jax.errors import CheckpointError, UserError
from txl_jax.interop import original, portable, safetensors
from txl_jax.interop.original import Format
from txl_jax.metrics import Measure
from txl_jax.runs import convert as convert_job
from txl_jax.runs.convert import TargetFormat

pytestmark = pytest.mark.usefixtures("traces_kept")

# A text much longer than the memory of the models here, and a short one.
TEXTS = [drawn_run.TEXT[:200], drawn_run.TEXT[200:230]]
# The presets of --compat.
PRESET_NAMES = {TargetFormat.HUGGINGFACE: "hf", TargetFormat.ORIGINAL: "pytorch"}
LEAVES = {leaf.name: leaf for leaf in config_tree.leaves(ExperimentConfig)}
convert = functools.partial(convert_job.convert, log=lambda line: None)


def flip(path):
    """Changes one bit, near the end of the last array."""
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def rewrite(path, **values):
    """Replaces or adds values in a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A workdir of words with wt103's structure, and results.

    The scores are made up. The two splits differ in their loss.
    """
    folder = tmp_path_factory.mktemp("runs") / "run"
    made = drawn_run.of_words(folder, **drawn_run.WT103)
    scores = {"loss": 1.5, "bpc": 2.25, "perplexity": 4.5, "tokens": 100.0, "step": drawn_run.STEP}
    results = {
        "best_valid": scores,
        "test": scores | {"loss": 1.75},
        "eval": {"segment_len": 5, "mem_len": 9},
    }
    (folder / "results.json").write_text(json.dumps(results))
    return made


@pytest.fixture(scope="module")
def folder(workdir, tmp_path_factory):
    target = tmp_path_factory.mktemp("portable") / "model"
    convert(workdir.path, target)
    return target


def test_a_portable_checkpoint_is_the_run_without_its_paths(workdir, folder):
    assert sorted(os.listdir(folder)) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "vocabulary.txt",
    ]
    run = txl_jax.load(workdir.path)
    model = txl_jax.load(folder)
    assert model.step == run.step == drawn_run.STEP
    assert model.vocabulary == run.vocabulary
    assert model.config.model == run.config.model
    assert model.config.eval == run.config.eval
    tiny_run.assert_equal(jax.device_get(model.params), jax.device_get(run.params))
    assert model.score(TEXTS) == run.score(TEXTS)

    scores = json.loads((folder / "config.json").read_text())["scores"]
    assert scores["best_valid"]["loss"] == 1.5
    assert scores["test"]["loss"] == 1.75
    card = (folder / "README.md").read_text()
    assert "| validation | 4.5000 | 1.5000 | 100 |" in card
    assert "| test | 4.5000 | 1.7500 | 100 |" in card
    private = str(Path(workdir.path).parent)
    for name in ("config.json", "README.md", "vocabulary.txt"):
        assert private not in (folder / name).read_text(), name


@pytest.mark.parametrize(
    ("measure", "expected"),
    [(Measure.BPB, "bits per byte"), (Measure.BPC, "bpc"), (Measure.PPL, "perplexity")],
)
def test_a_card_names_the_measure_of_the_tokens(measure, expected):
    scores = {"test": {"loss": 1.5, "bpc": 2.25, "perplexity": 4.5, "tokens": 100.0}}
    table = portable._score_table(scores, measure)
    assert f"| split | {expected} | nats per token | tokens |" in table


def test_scores_of_other_parameters_do_not_go_along(workdir, tmp_path):
    copy = shutil.copytree(workdir.path, tmp_path / "run")
    scores = json.loads((copy / "results.json").read_text())["test"]
    rewrite(copy / "results.json", test=scores | {"step": scores["step"] + 1})
    convert(copy, tmp_path / "model")
    assert "## Scores" not in (tmp_path / "model" / "README.md").read_text()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["scores"] == {}


# Settings that other formats have no word for, and that the presets of both formats do not set.
OWN = {
    "model.compat.memory_start": MemoryStart.MASKED,
    "data.reset_at": "<eos>",
    "eval.batch_size": 2,
    "model.compat.same_length_window": AttentionWindow.MEM_LEN_PLUS_ONE,
    "eval.same_length": True,
    "train.mem_len": 11,
    "train.segment_len": 7,
    "generate.top_k": 3,
}
PRE_NORM = {
    "model.layer_norm": NormPlace.PRE,
    "model.compat.final_norm": False,
    "model.compat.layer_norm_eps": 1e-12,
}
# Learned positions. The original stores Al-Rfou's table by head, so all heads together must be as
# wide as the model: 2 * 8 = 16.
LEARNED = {"model.num_positions": 9, "model.n_head": 2, "model.d_head": 8, "model.d_model": 16}
SHAW = {"model.encoding": Encoding.SHAW, "model.compat.shaw_terms": ShawTerms.ORIGINAL} | LEARNED
# Every kind of model that a format has, by what decides on its names and on its formula.
EXPORTABLE = {
    "adaptive words": drawn_run.WT103 | OWN,
    "layers with their own u and v": drawn_run.WT103 | {"model.untie_r": True},
    "bytes, pre-norm": {"tokenizer": Tokenizer.BYTE, **PRE_NORM},
    "characters, nothing tied": {"tokenizer": Tokenizer.CHAR, "model.tie_weight": False},
    "a memory of zeros": {"model.compat.memory_start": MemoryStart.ZEROS, "eval.temperature": 0.9},
    "clusters of one width": {
        "model.cutoffs": (5, 8),
        "model.d_embed": 16,
        "model.tie_projs": (False, True, True),
    },
}
OF_THE_ORIGINAL = {
    "Shaw's positions": SHAW,
    "sinusoids": {"model.encoding": Encoding.VASWANI},
    "Al-Rfou's positions": {"model.encoding": Encoding.AL_RFOU} | LEARNED,
}
CASES = [*itertools.product(EXPORTABLE, (TargetFormat.HUGGINGFACE, TargetFormat.ORIGINAL))]
CASES += [(name, TargetFormat.ORIGINAL) for name in OF_THE_ORIGINAL]
QUICK = [("adaptive words", TargetFormat.HUGGINGFACE), ("bytes, pre-norm", TargetFormat.ORIGINAL)]


@pytest.mark.parametrize(("name", "to_format"), full_but(QUICK, CASES))
def test_a_model_that_goes_to_another_format_comes_back_the_same(tmp_path, name, to_format):
    """It has the same losses, also by settings that the format has no word for."""
    changes = (EXPORTABLE | OF_THE_ORIGINAL)[name]
    made = drawn_run.of_words(tmp_path / "run", **changes)
    lines = []

    convert(made.path, tmp_path / "there", to_format=to_format, log=lines.append)
    convert(tmp_path / "there", tmp_path / "back")

    assert any(line.startswith("verified") for line in lines)
    if to_format is TargetFormat.HUGGINGFACE:
        begins_with_zeros = made.config.model.compat.memory_start is MemoryStart.ZEROS
        is_noted = any("model.compat.memory_start" in line for line in lines)
        assert is_noted is not begins_with_zeros

    before = txl_jax.load(made.path)
    after = txl_jax.load(tmp_path / "back")
    tiny_run.assert_equal(jax.device_get(after.params), jax.device_get(before.params))
    assert after.vocabulary == before.vocabulary
    assert after.step == before.step == drawn_run.STEP
    settings = portable.stored_settings(after.config)
    expected_settings = portable.stored_settings(before.config)
    # For a table as wide as the model, d_embed may be None or that width. The sizes of all arrays
    # are compared above.
    for stored in (settings, expected_settings):
        stored["model.d_embed"] = None
    assert settings == expected_settings
    assert after.components.model.end_token == before.components.model.end_token

    scores = after.score(TEXTS, per_token=True)
    expected_scores = before.score(TEXTS, per_token=True)
    for nats, expected in zip(scores, expected_scores, strict=True):
        np.testing.assert_allclose(nats, expected, rtol=0, atol=1e-6)
    if name == "adaptive words" and to_format is TargetFormat.HUGGINGFACE:
        check_files_of_hugging_face(tmp_path / "there", before)


# The recipes that the README recommends for training, with smaller sizes and another text, and with
# the flag that README, docs and flagfiles name for a model that goes to other formats.
RECIPES = {
    "own_bytes": preset("own_bytes"),
    "own_words": preset("own_words"),
    "quickstart": quickstart.DEFAULTS,
}
MINIATURE = {
    "model.n_layer": 2,
    "model.d_model": 16,
    "model.n_head": 2,
    "model.d_head": 8,
    "model.d_inner": 32,
    "eval.segment_len": 5,
    "eval.mem_len": 9,
    "data.corpus": CorpusName.TEXT,
    "model.compat.final_norm": False,
}


def recipe_run(folder, recipe, **changes):
    """Returns a run of a recipe's miniature, on `drawn_run.TEXT`."""
    folder.mkdir()
    (folder / "text").write_bytes(drawn_run.TEXT)
    values = MINIATURE | {"data.file": str(folder / "text")} | changes
    config = config_tree.replace(recipe, values)
    corpus = read_corpus(config.data, "nowhere", str(folder))
    return drawn_run.make(folder / "run", config, corpus)[0]


WAYS_OUT = [*itertools.product(RECIPES, PRESET_NAMES)]
QUICK_WAYS = [(recipe, TargetFormat.HUGGINGFACE) for recipe in RECIPES]


@pytest.mark.parametrize(("recipe", "to_format"), full_but(QUICK_WAYS, WAYS_OUT))
def test_a_recommended_recipe_goes_out_and_comes_back(recipe, to_format, tmp_path):
    """It has the same losses."""
    made = recipe_run(tmp_path / "made", RECIPES[recipe])
    convert(made.path, tmp_path / "there", to_format=to_format)
    convert(tmp_path / "there", tmp_path / "back")

    before = txl_jax.load(made.path)
    after = txl_jax.load(tmp_path / "back")
    assert portable.stored_settings(after.config) == portable.stored_settings(before.config)
    [expected] = before.score(TEXTS[:1], per_token=True)
    [nats] = after.score(TEXTS[:1], per_token=True)
    assert len(expected) > 2 * before.config.eval.mem_len, "the memory is in use"
    np.testing.assert_allclose(nats, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("to_format", PRESET_NAMES)
@pytest.mark.parametrize("name", preset_names())
def test_one_flag_makes_the_model_of_every_flagfile_one_that_other_formats_have(name, to_format):
    """Except for the Penn Treebank's author, whose layers have no matrix of positions."""
    config = config_tree.replace(preset(name), {"model.compat.final_norm": False})
    if config.model.tie_positions:
        assert name == "ptb_author"
        config = config_tree.replace(config, {"model.tie_positions": False})
    original.check_exportable(config.model, Format(str(to_format)))


def check_files_of_hugging_face(folder, model):
    assert (folder / "vocab.txt").read_text().splitlines() == list(model.vocabulary.words)
    with safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}, "transformers rejects a file without it"
        # The first tail has the words 5, 6 and 7, of size 64 / 4.
        assert file.get_tensor("transformer.word_emb.emb_layers.1.weight").shape == (3, 16)
        assert "crit.out_layers.1.weight" not in set(file.keys()), "a shared tensor is stored once"


def exported_with_special_words(folder):
    """Returns a vocabulary with words such as <formula>, and a directory for transformers."""
    folder.mkdir()
    # The first lines are in the training split, whose words are the vocabulary.
    lines = b"the <formula> of a dog [SEP] the <unk> cat [sic] 1 < 2\n" * 9 + drawn_run.TEXT
    settings = drawn_run.WT103 | {"data.tokenizer.kind": Tokenizer.WORD}
    config, corpus = drawn_run.on_text(folder, lines, **settings)
    run, _ = drawn_run.make(folder / "run", config, corpus)
    convert(run.path, folder / "theirs", to_format=TargetFormat.HUGGINGFACE)
    return corpus.vocabulary, folder / "theirs"


def test_words_that_their_tokenizer_would_split_are_its_special_tokens(tmp_path):
    vocabulary, theirs = exported_with_special_words(tmp_path / "made")
    assert {"[sic]", "<", "<unk>", "<eos>"} < set(vocabulary.words)
    tokenizer = json.loads((theirs / "tokenizer_config.json").read_text())
    assert sorted(tokenizer["additional_special_tokens"]) == ["<formula>", "[SEP]"]
    assert tokenizer["eos_token"] == "<eos>" and tokenizer["unk_token"] == "<unk>"
    # Regular expressions.
    for word in ("<formula>", "[SEP]", "<eos>", "<unk>"):
        assert any(re.fullmatch(pattern, word) for pattern in tokenizer["never_split"]), word
    assert not any(re.search(pattern, "cat [sic] S") for pattern in tokenizer["never_split"])


@pytest.mark.full
def test_documents_stay_apart_in_a_portable_checkpoint(tmp_path):
    made = drawn_run.of_words(tmp_path / "run", **{"data.reset_at": "<eos>"})
    convert(made.path, tmp_path / "model")
    before = txl_jax.load(made.path)
    after = txl_jax.load(tmp_path / "model")
    assert after.components.model.end_token == before.components.model.end_token == 0
    assert after.score(TEXTS) == before.score(TEXTS)


class Refused(NamedTuple):
    """A model whose formula a format cannot hold."""

    changes: dict[str, Any]
    flags: list[str]  # The error names them. PRESET in them stands for the format's preset.
    only: TargetFormat | None = None  # The format, or None for both other formats.


REFUSED = {
    "final norm": Refused(
        changes={"model.layer_norm": NormPlace.PRE},
        flags=["--model.compat.final_norm=false", "--model.layer_norm=post"],
    ),
    "tied positions": Refused({"model.tie_positions": True}, ["--model.tie_positions=false"]),
    "LSTM": Refused({"model.network": Network.LSTM}, ["--model.network=transformer_xl"]),
    "QRNN": Refused({"model.network": Network.QRNN}, ["--model.network=transformer_xl"]),
    "Shaw's positions": Refused(
        changes=SHAW, flags=["--model.encoding=relative"], only=TargetFormat.HUGGINGFACE
    ),
    "sinusoids": Refused(
        changes={"model.encoding": Encoding.VASWANI},
        flags=["--model.encoding=relative"],
        only=TargetFormat.HUGGINGFACE,
    ),
    "the paper's terms": Refused(
        changes=SHAW | {"model.compat.shaw_terms": ShawTerms.PAPER},
        flags=["--compat=PRESET"],
        only=TargetFormat.ORIGINAL,
    ),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_formula_that_a_format_cannot_hold_is_an_error_before_anything_is_written(refused):
    config = tiny.changed(tiny_run.CONFIG, **refused.changes)
    formats = PRESET_NAMES if refused.only is None else [refused.only]
    for to_format in formats:
        with pytest.raises(UserError) as raised:
            original.check_exportable(config.model, Format(str(to_format)))
        # A model with one of the flags can be converted: the advice of the error works.
        for flag in refused.flags:
            typed = flag.replace("PRESET", PRESET_NAMES[to_format])
            assert typed in str(raised.value)
            name, _, value = typed.removeprefix("--").partition("=")
            if name == "compat":
                mended = apply_preset(config, value)
            else:
                mended = config_tree.replace(config, config_of_flag(name, value))
            original.check_exportable(mended.model, Format(str(to_format)))


def config_of_flag(name, value):
    """Returns a typed flag as a change of the config. Flags here are words or booleans."""
    assert LEAVES[name].setting.flag, f"--{name} is not a flag"
    kind = type(config_tree.get(ExperimentConfig(), name))
    return {name: kind(value) if issubclass(kind, str) else value == "true"}


def test_a_refused_model_leaves_nothing(tmp_path, monkeypatch):
    """A model with --model.layer_norm=pre has by default a last norm, which other formats lack."""
    made = drawn_run.of_words(tmp_path / "run", **{"model.layer_norm": NormPlace.PRE})
    monkeypatch.setattr(
        convert_job.storage, "new_folder", lambda folder: pytest.fail("it began to write")
    )
    for to_format in PRESET_NAMES:
        with pytest.raises(UserError, match=r"--model\.compat\.final_norm=false"):
            convert(made.path, tmp_path / "there", to_format=to_format)
    assert not (tmp_path / "there").exists()


def test_existing_files_are_not_overwritten(folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    # A directory with a file, a file, and a directory inside of the one that is read.
    for target in (tmp_path / "full", tmp_path / "full" / "file", folder / "new"):
        with pytest.raises(UserError, match=re.escape(str(target))):
            convert(folder, target)
    (tmp_path / "empty").mkdir()
    convert(folder, tmp_path / "empty")
    assert txl_jax.load(tmp_path / "empty").step == drawn_run.STEP


def test_a_checkpoint_that_does_not_verify_leaves_nothing(folder, tmp_path, monkeypatch):
    """A writer that mixes up two arrays, and a disk that changes a bit, are noticed."""
    write = safetensors.write

    def swapped(path, leaves, **options):
        query = leaves["stack.layers.attention.query"]
        key = leaves["stack.layers.attention.key"]
        exchanged = {"stack.layers.attention.query": key, "stack.layers.attention.key": query}
        write(path, {**leaves, **exchanged}, **options)

    def flipped(path, leaves, **options):
        write(path, leaves, **options)
        flip(path)

    for broken in (swapped, flipped):
        monkeypatch.setattr(portable.safetensors, "write", broken)
        with pytest.raises(CheckpointError, match="changed when it was written"):
            convert(folder, tmp_path / "new" / "model")
        assert not list((tmp_path / "new").iterdir())


def test_losses_that_differ_or_are_not_finite_are_refused():
    ones = np.ones((2, 3), np.float32)
    nans = np.full((2, 3), np.nan, np.float32)
    assert convert_job.check_same_losses(ones, ones) == 0
    with pytest.raises(CheckpointError, match=r"\b0\.001\b"):
        convert_job.check_same_losses(ones, ones * np.float32(1.001))
    with pytest.raises(CheckpointError, match="finite"):
        convert_job.check_same_losses(nans, nans)
    with pytest.raises(CheckpointError, match="nan"):
        convert_job.check_same_losses(ones, nans)


def add_word(path):
    path.write_text(path.read_text() + "zebra\n")


def misspell_setting(path):
    rewrite(path, config={"model.n_layers": 2})


def change_size(path):
    config = json.loads(path.read_text())["config"]
    rewrite(path, config=config | {"model.d_inner": 7})


# A file, the function that corrupts it, and what the error says. "newer format": the format's
# version is 1 so far.
CORRUPTIONS = {
    "flipped bit": ("model.safetensors", flip, r"model\.safetensors"),
    "no weights": ("model.safetensors", os.unlink, r"model\.safetensors"),
    "other words": ("vocabulary.txt", add_word, r"vocabulary\.txt"),
    "vocabulary of another size": (
        "config.json",
        functools.partial(rewrite, vocab_size=7),
        "vocab_size 7",
    ),
    "newer format": (
        "config.json",
        functools.partial(rewrite, txl_jax_model=99),
        "version 1, got 99",
    ),
    "unknown setting": ("config.json", misspell_setting, "Did you mean"),
    "contradicting sizes": ("config.json", change_size, r"is float32\[.*\] there"),
}


@pytest.mark.parametrize(("name", "corrupt", "message"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_corrupted_file_is_named(folder, tmp_path, name, corrupt, message):
    copy = shutil.copytree(folder, tmp_path / "copy")
    corrupt(copy / name)

    with pytest.raises(UserError, match=message) as raised:
        txl_jax.load(copy)

    assert "\n" not in str(raised.value)
    with pytest.raises(UserError):
        convert(copy, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_error_for_a_directory_of_models_names_some_of_them(tmp_path):
    """Five at most, of the directories with a config.json. It does not read them."""
    for number in range(9):
        (tmp_path / f"run{number}").mkdir()
        # The first directory is not a run's.
        if number > 0:
            (tmp_path / f"run{number}" / "config.json").touch()
    with pytest.raises(UserError, match=r"contains no run") as raised:
        txl_jax.load(tmp_path)
    message = str(raised.value)
    named = [number for number in range(9) if f"run{number}" in message]
    assert named == [1, 2, 3, 4, 5]
    assert str(tmp_path / "run1") in message


def test_errors_for_other_directories_say_what_to_do(folder, tmp_path):
    with pytest.raises(UserError, match=r"contains no run \(no config\.json\)"):
        txl_jax.load(tmp_path)
    with pytest.raises(UserError, match=r"nowhere contains no run \(no such directory\)"):
        txl_jax.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"member is 'seed=2'"):
        txl_jax.load(folder, member="seed=2")
    # Weights of PyTorch must be converted first.
    torch_bytes.write_zip(tmp_path / "pytorch_model.bin", {"a": np.zeros(2, np.float32)})
    with pytest.raises(
        UserError, match=r"python -m experiments\.convert --from=\S+ --to=NEW_DIRECTORY"
    ):
        txl_jax.load(tmp_path)


def test_a_portable_checkpoint_of_subwords_has_the_tokenizer(tmp_path):
    # All bytes, and some tokens of several bytes.
    made = drawn_run.of_words(
        tmp_path / "run", tokenizer=Tokenizer.SUBWORD, **{"data.tokenizer.vocab_size": 290}
    )
    convert(made.path, tmp_path / "model")
    vocabulary = txl_jax.load(tmp_path / "model").vocabulary
    assert vocabulary == made.text.vocabulary
    assert (tmp_path / "model" / "tokenizer.json").read_text() == vocabulary.content


@pytest.mark.full
def test_a_run_and_its_conversion_are_loaded_from_a_bucket(bucket, tmp_path):
    text = drawn_run.on_text(tmp_path, drawn_run.letters())
    remote, _ = drawn_run.make(bucket / "run", *text)
    local, _ = drawn_run.make(tmp_path / "run", *text)

    expected = txl_jax.load(local.path).score(["the cat", "a hat"])
    assert txl_jax.load(str(remote.path)).score(["the cat", "a hat"]) == expected

    convert(str(remote.path), str(bucket / "portable"))
    assert txl_jax.load(str(bucket / "portable")).score(["the cat", "a hat"]) == expected
    convert(str(bucket / "portable"), tmp_path / "back")
    for name in ("model.safetensors", "vocabulary.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (bucket / "portable" / name).read_bytes()
    with pytest.raises(UserError, match="new or empty"):
        convert(local.path, str(bucket / "portable"))


@pytest.mark.full
def test_a_conversion_that_was_killed_is_not_a_portable_checkpoint(workdir, bucket, storage):
    # Two uploads are served. config.json, which makes a directory a portable checkpoint, is the
    # last one.
    storage.refuse("POST", after=2)
    with pytest.raises(UserError, match="cannot write to gs://"):
        convert(workdir.path, str(bucket))
    storage.calm()
    assert sorted(path.name for path in bucket.iterdir()) == ["model.safetensors", "vocabulary.txt"]
    assert not portable.is_portable(bucket)


# Compared with transformers 4.35.2: logits, tensors, greedy tokens


V = 61
# wt103's structure, scaled down: three tails, div_val 4, all projections but the head's shared.
SIZES = {
    "vocab_size": V,
    "cutoffs": [7, 19, 40],
    "d_model": 64,
    "d_embed": 64,
    "n_head": 4,
    "d_head": 16,
    "d_inner": 96,
    "div_val": 4,
    "n_layer": 3,
    "mem_len": 24,
    "clamp_len": 15,
    "same_length": True,
    "eos_token_id": None,
    "init_std": 0.15,
    "proj_init_std": 0.15,
}
THEIR_WARNINGS = pytest.mark.filterwarnings(
    *(f"ignore::{kind}Warning" for kind in ("Future", "Deprecation", "User"))
)


@pytest.fixture(scope="module")
def library():
    """(torch, transformers), which are imported only by nightly tests."""
    import torch
    import transformers.models.transfo_xl

    torch.set_num_threads(1)
    return torch, transformers


@pytest.mark.nightly(part="huggingface")
@THEIR_WARNINGS
@pytest.mark.parametrize(
    ("untie_r", "safe"), [(True, True), (False, False)], ids=["safetensors", "pytorch_model.bin"]
)
def test_a_model_of_transformers_there_and_back(library, tmp_path, untie_r, safe):
    torch, transformers = library
    torch.manual_seed(5)
    peer = transformers.TransfoXLLMHeadModel(
        transformers.TransfoXLConfig(**SIZES, untie_r=untie_r)
    ).eval()
    with torch.no_grad():
        # Biases and norms begin as zeros and ones, which could be mixed up unnoticed.
        for name, value in peer.named_parameters():
            if "bias" in name or "layer_norm" in name:
                value += 0.1 * torch.randn_like(value)
    peer.save_pretrained(tmp_path / "theirs", safe_serialization=safe)

    lines: list[str] = []
    convert(tmp_path / "theirs", tmp_path / "ours", log=lines.append)
    assert any(line.startswith("verified") for line in lines)

    model = txl_jax.load(tmp_path / "ours")
    ids = np.random.default_rng(0).integers(V, size=20)
    prompt = ids[:5]
    with torch.no_grad():
        # 200 tokens are many times the memory. One prompt needs no padding, whatever its id.
        written = peer.generate(
            torch.tensor(prompt[None]), max_new_tokens=200, do_sample=False, pad_token_id=0
        )
    [greedy] = model.generate(
        [model.decode(prompt)], GenerateConfig(length=200, temperature=0.0, top_k=None)
    )
    assert model.encode(greedy).tolist() == written[0, len(prompt) :].tolist()

    convert(
        tmp_path / "ours", tmp_path / "back", to_format=TargetFormat.HUGGINGFACE, log=lines.append
    )
    again = transformers.TransfoXLLMHeadModel.from_pretrained(tmp_path / "back").eval()
    expected = peer.state_dict()
    tensors = again.state_dict()
    assert expected.keys() == tensors.keys()
    for name, value in expected.items():
        assert torch.equal(value, tensors[name]), name
    segment = torch.tensor(ids[None])
    with torch.no_grad():
        expected_logits = peer(segment).prediction_scores
        logits = again(segment).prediction_scores
    assert torch.equal(logits, expected_logits)


@pytest.mark.nightly(part="huggingface")
@THEIR_WARNINGS
def test_its_tokenizer_reads_the_words(library, tmp_path):
    _, transformers = library
    made = drawn_run.of_words(tmp_path / "run", **drawn_run.WT103)
    convert(made.path, tmp_path / "theirs", to_format=TargetFormat.HUGGINGFACE)
    tokenizer = transformers.TransfoXLTokenizer.from_pretrained(tmp_path / "theirs")
    vocabulary = txl_jax.load(made.path).vocabulary
    text = "the cat sat on the zebra"  # The last word is unknown.
    assert tokenizer.encode(text) == vocabulary.encode(text.encode()).tolist()
    assert len(tokenizer) == vocabulary.size and tokenizer.eos_token_id == vocabulary.mark


@pytest.mark.nightly(part="huggingface")
@THEIR_WARNINGS
def test_its_tokenizer_does_not_split_special_words(library, tmp_path):
    _, transformers = library
    vocabulary, theirs = exported_with_special_words(tmp_path / "made")
    tokenizer = transformers.TransfoXLTokenizer.from_pretrained(theirs)
    text = "the <formula> of a dog [SEP] the <unk> cat <eos>"
    assert tokenizer.tokenize(text) == text.split()
    assert tokenizer.encode(text) == vocabulary.encode(text.encode()).tolist()
    assert len(tokenizer) == vocabulary.size
    # More letters S than Moses can protect.
    assert tokenizer.tokenize("cats " * 1200) == ["cats"] * 1200


def nats_of_transformers(library, folder, model, text):
    """Returns the nats of each token of a text in their class, read from a converted directory.

    The class reads segments of the model's length, and carries its memory from one to the next.
    """
    torch, transformers = library
    peer = transformers.TransfoXLLMHeadModel.from_pretrained(folder).eval()
    if model.config.model.dtype is DType.FLOAT64:
        peer = peer.double()
    tokens = torch.tensor(model.encode(text).astype(np.int64))
    length = model.config.eval.segment_len
    memory = None
    nats = []
    for begin in range(0, len(tokens) - 1, length):
        segment = tokens[begin : begin + length + 1]
        with torch.no_grad():
            output = peer(segment[None, :-1], mems=memory)
        memory = output.mems
        nats.append(-output.prediction_scores[0].gather(1, segment[1:, None])[:, 0].numpy())
    return np.concatenate(nats)


@pytest.mark.nightly(part="huggingface")
@THEIR_WARNINGS
@pytest.mark.parametrize(
    "changes", [drawn_run.WT103 | {"model.untie_r": True}, PRE_NORM], ids=["words", "pre-norm"]
)
def test_a_run_with_its_preset_has_the_nats_of_transformers(library, tmp_path, changes):
    """A run trained with --compat=hf, read by their class from the files that a conversion
    writes.
    """
    hf = {"model.compat.memory_start": MemoryStart.ZEROS, "model.compat.final_norm": False}
    made = drawn_run.of_words(tmp_path / "run", **(changes | hf))
    convert(made.path, tmp_path / "theirs", to_format=TargetFormat.HUGGINGFACE)
    model = txl_jax.load(made.path)
    [ours] = model.score(TEXTS[:1], per_token=True)
    theirs = nats_of_transformers(library, tmp_path / "theirs", model, TEXTS[0])
    assert len(ours) == len(theirs)
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5 * theirs.max())


@pytest.fixture
def float64(library, x64, monkeypatch):
    """float64 in both libraries."""
    torch, _ = library
    # Their attention casts scores to float32, and fills masked ones with the lowest number of
    # float64, which float32 cannot store. So `Tensor.float` must not cast.
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    return {"model.dtype": DType.FLOAT64}


@pytest.mark.nightly(part="huggingface")
@THEIR_WARNINGS
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_with_its_preset_has_the_nats_of_transformers(library, tmp_path, float64, recipe):
    """A model of the recipe with --compat=hf. What differs are the frequencies of its positions,
    which the files have in float32.
    """
    made = recipe_run(tmp_path / "made", apply_preset(recipe, "hf"), **float64)
    convert(made.path, tmp_path / "theirs", to_format=TargetFormat.HUGGINGFACE)
    model = txl_jax.load(made.path)
    text = drawn_run.TEXT[:1200]
    [ours] = model.score([text], per_token=True)
    theirs = nats_of_transformers(library, tmp_path / "theirs", model, text)
    assert len(ours) == len(theirs) > 300, "the text has 337 words, and more bytes"
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6 * theirs.max())


@pytest.mark.nightly(part="huggingface")
@THEIR_WARNINGS
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_differs_in_transformers_only_at_the_beginning(library, tmp_path, float64, recipe):
    """Without --compat=hf, its memory begins empty and theirs with zeros, which layer n no longer
    sees after n memories.
    """
    made = recipe_run(tmp_path / "made", recipe, **float64)
    convert(made.path, tmp_path / "theirs", to_format=TargetFormat.HUGGINGFACE)
    model = txl_jax.load(made.path)
    text = drawn_run.TEXT[:1200]
    [ours] = model.score([text], per_token=True)
    theirs = nats_of_transformers(library, tmp_path / "theirs", model, text)

    mem_len = model.config.eval.mem_len
    tolerance = 1e-6 * theirs.max()
    assert np.abs(theirs - ours)[:mem_len].max() > 1000 * tolerance, "the beginning differs"
    end = model.config.model.n_layer * mem_len
    assert len(ours) == len(theirs) > 10 * end, "most of the text is after the beginning"
    np.testing.assert_allclose(theirs[end:], ours[end:], rtol=0, atol=tolerance)
