"""Tests the statistics of the rule RMS: their values, their file, and when it is used again."""

import dataclasses
import re
import shlex
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from support import drawn_run, tiny, tiny_run
from support.cases import full_but
from support.plain_loss import mean_loss_of
from txl_jax.cli import precedence
from txl_jax.config import (
    DropoutConfig,
    DType,
    DynamicConfig,
    DynamicRule,
    EvalConfig,
    ExperimentConfig,
    LossPart,
    config_tree,
)
from txl_jax.errors import CheckpointError, NonFiniteError, UserError
from txl_jax.interop import leaves, safetensors
from txl_jax.interop.leaves import leaf_of
from txl_jax.runs import dynamic_statistics
from txl_jax.runs.convert import convert
from txl_jax.runs.dynamic import DynamicModel
from txl_jax.runs.dynamic_statistics import learning_model
from txl_jax.runs.run import Run
from txl_jax.runs.score_splits import evaluate_splits
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runs.trained import TrainedModel, open_weights
from txl_jax.runtime import storage

pytestmark = pytest.mark.usefixtures("traces_kept")

NAME = dynamic_statistics.NAME
ROWS = 2
L = 5
M = 7
SEGMENTS = 11  # Of each row.
EVAL = EvalConfig(
    batch_size=ROWS,
    segment_len=L,
    mem_len=M,
    clamp_len=6,
    temperature=1.3,
    dynamic=DynamicConfig(
        rule=DynamicRule.RMS,
        learning_rate=0.01,
        epsilon=0.1,
        decay=0.1,
        statistics_segments=SEGMENTS,
    ),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """(config, corpus): the run's settings, which are those of dynamic evaluation, and its text."""
    return drawn_run.on_text(
        tmp_path_factory.mktemp("text"),
        drawn_run.letters(),
        model__n_layer=1,
        model__dropout=DropoutConfig(rate=0.4),
        eval=EVAL,
    )


@pytest.fixture(scope="module")
def made(text, tmp_path_factory):
    """The directory of a run that has been evaluated, and its evaluation."""
    folder = tmp_path_factory.mktemp("run") / "run"
    run, _ = drawn_run.make(folder, *text)
    results = evaluate_splits(*text, run)
    assert (folder / NAME).exists()
    return folder, results


@pytest.fixture
def evaluated(made, tmp_path):
    """A run with its file of statistics, which a test may change."""
    return copy_of(made[0], tmp_path / "run")


def copy_of(folder, target):
    """Copies a run without its checkpoints, which stay where they are."""
    target.mkdir()
    for path in Path(folder).iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    (target / "checkpoints").symlink_to(folder / "checkpoints")
    return target


def opened(folder, **changes) -> TrainedModel:
    trained = open_weights(folder)
    return dataclasses.replace(trained, config=tiny.changed(trained.config, **changes))


def model_of(trained, *, factor=1.0, **options) -> DynamicModel:
    """Loads the model with its statistics, and perhaps with other weights."""
    _, params = trained.params(trained.build())
    if factor != 1.0:
        params = jax.tree.map(lambda leaf: jax.device_put(factor * np.asarray(leaf)), params)
    return learning_model(trained, params, **options)


def plain_sums(model: DynamicModel, tokens: np.ndarray):
    """Sums squared gradients in a plain loop, whose first rows and segments are cut by hand."""
    module = model.built.model
    lengths = model.built.config.eval
    rows = tokens[: ROWS * SEGMENTS * L + 1]

    gradient = jax.jit(jax.grad(mean_loss_of(module, lengths), has_aux=True))
    memory = module.init_memory(batch_size=ROWS, mem_len=M)
    sums = jax.tree.map(np.zeros_like, model.params)
    for number in range(SEGMENTS):
        starts = [row * SEGMENTS * L + number * L for row in range(ROWS)]
        inputs = np.stack([rows[start : start + L] for start in starts]).astype(np.int32)
        targets = np.stack([rows[start + 1 : start + L + 1] for start in starts]).astype(np.int32)
        mask = np.ones(inputs.shape, bool)
        grads, (_, memory) = gradient(model.params, memory, inputs, targets, mask)
        sums = jax.tree.map(lambda total, grad: total + np.asarray(grad) ** 2, sums, grads)
    return sums


def test_they_are_sums_of_squared_gradients_at_the_trained_parameters(x64, text, tmp_path):
    config, corpus = text
    # Gradients are of the loss of all positions without dropout, though training has dropout and
    # scores half of each segment.
    config = tiny.changed(config, model__dtype=DType.FLOAT64, train__loss=LossPart.HALF)
    run, _ = drawn_run.make(tmp_path / "run", config, corpus)

    model = model_of(TrainedModel.of_run(run), corpus=corpus, folder=run.path)

    expected = plain_sums(model, corpus.train)
    tiny_run.assert_close(model.statistics, expected, rtol=1e-9, atol=1e-12)
    assert min(np.max(leaf) for leaf in jax.tree.leaves(expected)) > 1e-6, "no array is only zeros"
    # Without a text, they are read from the file.
    again = model_of(TrainedModel.of_run(run))
    tiny_run.assert_equal(again.statistics, model.statistics)


def test_their_number_is_a_five_thousandth_of_the_segments_of_a_row(text):
    """As published, for a single row: several rows sum as many segments each. At least one."""
    config, _ = text
    published = tiny.changed(config, eval__dynamic__statistics_segments=None)
    # Only the settings of the model are asked for, so nothing is built.
    built = types.SimpleNamespace(config=published)
    model = DynamicModel(built, params=None)

    # The first token is no target. enwik8 has 90 million bytes to train on, here in segments of 5.
    for n_token, expected in ((90_000_001, 3600), (5000 * L * 2 + 1, 2), (5000 * L * 2, 1), (9, 1)):
        assert dynamic_statistics._count_segments(model, range(n_token)) == expected, n_token

    # A number that is set must fit into the text, in all rows.
    built.config = config
    n_token = ROWS * SEGMENTS * L + 1
    assert dynamic_statistics._count_segments(model, range(n_token)) == SEGMENTS
    with pytest.raises(UserError, match=rf"statistics_segments.*{SEGMENTS - 1}\b.*{SEGMENTS}"):
        dynamic_statistics._count_segments(model, range(n_token - 1))


def test_the_file_is_used_again_and_gives_the_same_scores(
    text, made, evaluated, monkeypatch, capsys
):
    config, corpus = text
    content = (evaluated / NAME).read_bytes()
    # To compute them again would be an error.
    monkeypatch.delattr(dynamic_statistics, "_sum_over_text")

    results = evaluate_splits(config, corpus, Run.read(evaluated))

    assert results["dynamic"] == made[1]["dynamic"]
    assert results["dynamic"]["test"] != results["static"]["test"]
    assert (evaluated / NAME).read_bytes() == content
    assert f"read from {evaluated / NAME}" in capsys.readouterr().out

    # If another text is scored, the training text is not at hand, but the file serves. The splits
    # that are scored are the same.
    other = dataclasses.replace(corpus, digest="0" * 64, train=corpus.train[::-1])
    assert evaluate_splits(config, other, Run.read(evaluated))["dynamic"] == results["dynamic"]


# What the sums depend on, and another value of it.
OTHERS = {
    "eval.batch_size": 1,
    "eval.segment_len": 4,
    "eval.mem_len": 8,
    "eval.clamp_len": 5,
    "eval.same_length": False,
    "eval.temperature": 1.2,
    "eval.dynamic.statistics_segments": 3,
}


@pytest.mark.parametrize("name", full_but(["eval.segment_len"], OTHERS))
def test_a_file_of_other_settings_is_refused_or_made_again(name, text, evaluated, capsys):
    _, corpus = text
    changed = {name.replace(".", "__"): OTHERS[name]}
    trained = opened(evaluated, **changed)

    before = config_tree.format_value(config_tree.get(text[0], name))
    now = config_tree.format_value(OTHERS[name])
    with pytest.raises(UserError, match=rf"{NAME}.*: {name} is {before} instead of {now}\. Create"):
        model_of(trained)

    sums = model_of(trained, corpus=corpus, folder=str(evaluated)).statistics
    assert f"{name} is {before} instead of {now}" in capsys.readouterr().out
    tiny_run.assert_equal(model_of(trained).statistics, jax.device_get(sums))
    with pytest.raises(UserError, match=f"{name} is {now} instead of {before}"):
        model_of(opened(evaluated))


def test_a_file_of_other_weights_or_of_another_text_is_refused_or_made_again(text, evaluated):
    _, corpus = text
    trained = opened(evaluated)
    old = jax.device_get(model_of(trained).statistics)
    with pytest.raises(UserError, match="weights_sha256 is"):
        model_of(trained, factor=1.5)
    other_text = dataclasses.replace(trained.source.text, digest="0" * 64)
    run = Run.read(evaluated)
    run.text = other_text
    other = TrainedModel.of_run(run)
    # Errors show the first 20 characters of a digest.
    with pytest.raises(UserError, match=f"text_sha256 is {corpus.digest[:20]} instead of 0"):
        model_of(other)

    model = model_of(trained, factor=1.5, corpus=corpus, folder=str(evaluated))
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), model.statistics, old)
    assert max(jax.tree.leaves(difference)) > 1e-6
    with pytest.raises(UserError, match="weights_sha256 is"):
        model_of(trained)


def test_without_file_and_training_text_the_error_has_the_command_that_makes_it(
    text, made, tmp_path
):
    # The command must quote the space.
    folder = copy_of(made[0], tmp_path / "a run")
    (folder / NAME).unlink()
    run = opened(folder)
    # Another text, as with --data.file.
    other = dataclasses.replace(text[1], digest="0" * 64)

    for changes in ({"eval__segment_len": 3, "eval__average_checkpoints": 2}, {}):
        trained = opened(folder, **changes)
        with pytest.raises(UserError) as raised:
            dynamic_statistics.find_or_make(
                unevaluated(trained), trained, corpus=other, folder=str(folder)
            )
        command = re.search("`(python.*)`", str(raised.value))[1]
        words = shlex.split(command)
        assert words[:4] == ["python", "-m", "experiments.text", "--mode=eval"]
        assert f"--workdir={folder}" in words
        config = precedence.config_of_words(
            ExperimentConfig(), words[2:], without=("mode", "workdir"), recorded=run.config
        )
        assert config.eval == trained.config.eval, changes
    assert not (folder / NAME).exists()


def unevaluated(trained) -> DynamicModel:
    """The model without statistics, with any parameters.

    It is built for another rule, because for its own `learning_model` would look for them.
    """
    built = learning_model(
        opened(trained.path, eval__dynamic=DynamicConfig(rule=DynamicRule.SGD)), None
    ).built
    config = dataclasses.replace(built.config, eval=trained.config.eval)
    params = tiny_run.params(built.model)
    return DynamicModel(dataclasses.replace(built, config=config), params)


def test_a_member_has_its_own_file_and_command(evaluated):
    run = Run.read(evaluated)
    run.member = "seed=1"
    trained = dataclasses.replace(TrainedModel.of_run(run), out="/elsewhere/b")

    assert dynamic_statistics.path_of(trained) == str(evaluated / "members" / "seed=1" / NAME)
    assert not (evaluated / "members").exists()
    command = dynamic_statistics._command(trained)
    assert "--ensemble_member=seed=1" in command
    assert "--out=/elsewhere/b" in command


def test_a_read_only_run_has_its_file_in_out(text, made, evaluated, tmp_path, monkeypatch, capsys):
    config, corpus = text
    (evaluated / NAME).unlink()
    run = Run.read(evaluated)
    probe = storage.probe

    def read_only(folder):
        if Path(folder) == evaluated:
            raise PermissionError(13, "Permission denied", str(folder))
        probe(folder)

    monkeypatch.setattr(storage, "probe", read_only)

    # Without --out nothing is kept, and the scores are the same.
    assert evaluate_splits(config, corpus, run)["dynamic"] == made[1]["dynamic"]
    assert "--out" in capsys.readouterr().out
    assert not (evaluated / NAME).exists()

    out = tmp_path / "out"
    trained = dataclasses.replace(TrainedModel.of_run(run), out=str(out))
    evaluate_splits(config, corpus, trained)
    assert (out / NAME).exists()
    assert not (evaluated / NAME).exists()
    # The file is used again: to compute the sums again would be an error.
    monkeypatch.delattr(dynamic_statistics, "_sum_over_text")
    evaluate_splits(config, corpus, trained)


def test_the_file_of_the_run_is_used_with_out_too(text, evaluated, tmp_path, monkeypatch):
    config, corpus = text
    # To compute the sums again would be an error.
    monkeypatch.delattr(dynamic_statistics, "_sum_over_text")
    trained = dataclasses.replace(opened(evaluated), out=str(tmp_path / "out"))
    evaluate_splits(config, corpus, trained)
    assert not (tmp_path / "out" / NAME).exists()


def test_a_stop_leaves_no_file(text, evaluated):
    (evaluated / NAME).unlink()
    with pytest.raises(Interrupted, match="squared gradients"):
        evaluate_splits(*text, Run.read(evaluated), stop_requested=lambda: True)
    assert not [path.name for path in evaluated.iterdir() if NAME in path.name]


def test_an_interrupted_write_leaves_the_old_file(evaluated, monkeypatch):
    old = (evaluated / NAME).read_bytes()
    file = dynamic_statistics._read(str(evaluated / NAME))

    def interrupted(path, *rest, **options):
        """Is stopped by Ctrl-C when half of the file is written."""
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dynamic_statistics._write(file.path, {"a": np.zeros(2)}, file.metadata)
    assert (evaluated / NAME).read_bytes() == old
    assert [path.name for path in evaluated.iterdir() if NAME in path.name] == [NAME]


def test_weights_that_are_not_finite_are_an_error_and_leave_no_file(text, evaluated):
    (evaluated / NAME).unlink()
    with pytest.raises(NonFiniteError, match="rms"):
        model_of(opened(evaluated), factor=np.nan, corpus=text[1], folder=str(evaluated))
    assert not (evaluated / NAME).exists()


def test_a_portable_checkpoint_has_the_file(text, made, evaluated, tmp_path, capsys):
    config, corpus = text
    convert(evaluated, tmp_path / "portable", log=lambda line: None)
    # A portable checkpoint of a portable checkpoint has it too.
    convert(tmp_path / "portable", tmp_path / "again", log=lambda line: None)

    expected = model_of(opened(evaluated)).statistics
    for name in ("portable", "again"):
        assert (tmp_path / name / NAME).exists()
        sums = model_of(opened(tmp_path / name)).statistics
        tiny_run.assert_equal(jax.device_get(sums), jax.device_get(expected))
    trained = dataclasses.replace(opened(tmp_path / "again"), config=config)
    results = evaluate_splits(config, corpus, trained)
    assert results["dynamic"] == made[1]["dynamic"]


def test_a_portable_checkpoint_without_the_file_is_one_error(text, evaluated, tmp_path):
    # A file of other weights is not copied.
    file = dynamic_statistics._read(str(evaluated / NAME))
    rewrite(evaluated, metadata=file.metadata | {"weights_sha256": "0" * 64})
    lines = []
    convert(evaluated, tmp_path / "other", log=lines.append)
    assert any(NAME in line and "other weights" in line for line in lines)
    (evaluated / NAME).unlink()
    convert(evaluated, tmp_path / "none", log=lines.append)

    for name in ("other", "none"):
        assert not (tmp_path / name / NAME).exists()
        # Even the run's own text does not help, as a portable checkpoint does not record which text
        # it was trained on.
        with pytest.raises(UserError, match=r"rms.*--workdir=RUN.*experiments\.convert"):
            model_of(opened(tmp_path / name), corpus=text[1], folder=str(tmp_path))


def rewrite(folder, *, metadata=None, **arrays):
    """Writes the file again with other metadata or arrays. None removes an array.

    Names of arrays are passed with "__" in the place of "/". With other arrays, the metadata has
    their digest, so that the digest is not what gives them away.
    """
    path = folder / NAME
    file = dynamic_statistics._read(str(path))
    sums = {name: leaf_of(leaf.read().copy()) for name, leaf in file.sums.items()}
    for name, array in arrays.items():
        key = name.replace("__", "/")
        del sums[key]
        if array is not None:
            sums[key] = leaf_of(array)
    if metadata is None:
        metadata = file.metadata | {"sums_sha256": leaves.digest(sums)}
    safetensors.write(path, dynamic_statistics._stored(sums), metadata=metadata)


def flip(folder):
    """Changes one bit, near the end of the last array."""
    content = bytearray((folder / NAME).read_bytes())
    content[-7] ^= 1
    (folder / NAME).write_bytes(content)


def read(folder):
    """Returns the array that a corruption changes."""
    file = dynamic_statistics._read(str(folder / NAME))
    return file.sums[QUERY.replace("__", "/")].read()


def replace_header(folder):
    (folder / NAME).write_bytes(b"\xff" * 100)


def truncate(folder):
    (folder / NAME).write_bytes((folder / NAME).read_bytes()[:-4])


def remove_array(folder):
    rewrite(folder, **{QUERY: None})


def change_shape(folder):
    rewrite(folder, **{QUERY: read(folder)[:, :-1].copy()})


def change_dtype(folder):
    rewrite(folder, **{QUERY: read(folder).astype(np.int32)})


def put(value):
    """Returns a function that sets one element of an array to this value."""

    def change(folder):
        array = read(folder).copy()
        # Any element, inside of the array.
        array.flat[3] = value
        rewrite(folder, **{QUERY: array})

    return change


QUERY = "stack__layers__attention__query"
CORRUPTIONS = {
    "no header": replace_header,
    "truncated": truncate,
    "a bit": flip,
    "a missing array": remove_array,
    "another shape": change_shape,
    "another dtype": change_dtype,
    "negative": put(-1e-3),
    "nan": put(np.nan),
    "infinite": put(np.inf),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_corrupted_file_is_one_error(corrupt, evaluated):
    path = str(evaluated / NAME)
    shapes = {name: leaf.shape for name, leaf in dynamic_statistics._read(path).sums.items()}
    dynamic_statistics._check(dynamic_statistics._read(path), shapes)
    corrupt(evaluated)

    with pytest.raises(CheckpointError, match=re.escape(path)) as raised:
        dynamic_statistics._check(dynamic_statistics._read(path), shapes)
    assert "\n" not in str(raised.value)


def test_a_corrupted_file_is_an_error_also_where_it_could_be_made_again(text, evaluated):
    trained = opened(evaluated)
    put(-1e-3)(evaluated)

    with pytest.raises(CheckpointError, match=re.escape(str(evaluated / NAME))):
        model_of(trained, corpus=text[1], folder=str(evaluated))
    with pytest.raises(CheckpointError, match=re.escape(str(evaluated / NAME))):
        convert(evaluated, evaluated.with_name("portable"), log=lambda line: None)
    assert not evaluated.with_name("portable").exists()


def test_metadata_is_shortened_and_printable_in_errors(evaluated):
    """A stranger's file could fill a terminal, or clear it, as this escape sequence does."""
    file = dynamic_statistics._read(str(evaluated / NAME))
    rewrite(evaluated, metadata=file.metadata | {"eval.segment_len": "\x1b[2J" * 100_000})
    with pytest.raises(UserError, match=r"segment_len is .{1,100} instead of 5") as raised:
        model_of(opened(evaluated))
    assert "\x1b" not in str(raised.value)

    # The metadata of a file of another program.
    rewrite(evaluated, metadata={"format": "pt"})
    with pytest.raises(UserError, match="weights_sha256 is missing instead of"):
        model_of(opened(evaluated))
