"""Tests of the choice of what the backward pass recomputes: the table, the estimate, the record."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import pytest

import txl_jax
from support import runs, tiny, tiny_run
from support.cases import full_but
from txl_jax.config import Network, Remat, config_tree
from txl_jax.errors import UserError
from txl_jax.ops.attention import Implementation, Tile
from txl_jax.runs import ensemble, remat_choice
from txl_jax.runs.attention_choice import training_call
from txl_jax.runs.build import build
from txl_jax.runs.remat_choice import ChosenRemat, estimate_bytes
from txl_jax.runs.run import Run, check_same_remat
from txl_jax.runtime import distributed
from txl_jax.sharding.mesh import abstract_mesh

pytestmark = pytest.mark.usefixtures("traces_kept")

CONFIG = tiny_run.CONFIG
# Attention as on GPUs and as on TPUs. Only the first one stores scores for the backward pass.
STORED = Implementation("stored")
FUSED = Implementation("fused", "mosaic_roll", Tile(512, 1024))


@pytest.fixture
def on_tpu(monkeypatch):
    """Chooses as on a TPU, whose memory is unknown until the test sets it."""
    real = remat_choice.training_call
    monkeypatch.setattr(
        remat_choice,
        "training_call",
        lambda config, mesh: dataclasses.replace(real(config, mesh), platform="tpu"),
    )

    def has_memory(n_byte):
        monkeypatch.setattr(remat_choice, "_memory_limit", lambda mesh: n_byte)

    return has_memory


def chosen(**changes):
    return tiny_run.parts(**changes).remat


def test_auto_is_none_on_a_cpu_and_on_accelerators_what_fits(on_tpu, monkeypatch):
    assert CONFIG.model.remat is Remat.AUTO
    assert chosen().remat is Remat.DOTS, "unknown memory"
    on_tpu(10**9)
    assert chosen().remat is Remat.DOTS, "enough for the tiny model"
    on_tpu(10**4)
    assert chosen().remat is Remat.FULL, "too little memory"
    assert chosen(model__remat=Remat.NONE).remat is Remat.NONE, "not auto"

    # Without the patches, it is a CPU.
    monkeypatch.undo()
    assert chosen().remat is Remat.NONE


def test_the_model_of_a_run_has_the_choice_and_the_config_keeps_auto(on_tpu):
    built = tiny_run.parts()
    assert built.model.config.remat is Remat.DOTS
    assert built.config.model.remat is Remat.AUTO
    only_evaluated = build(CONFIG, vocab_size=tiny.V, uses=["evaluation"])
    assert only_evaluated.remat is None
    assert chosen(model__network=Network.LSTM) is None, "nothing to choose for other networks"


def test_every_member_of_an_ensemble_needs_memory(on_tpu, monkeypatch):
    # A member needs 100 bytes of 500.
    monkeypatch.setattr(remat_choice, "estimate_bytes", lambda *args, **kwargs: 100)
    on_tpu(500)
    for n_member, expected in ((1, Remat.DOTS), (5, Remat.DOTS), (6, Remat.FULL)):
        built = build(CONFIG, vocab_size=tiny.V, n_member=n_member)
        assert built.remat.remat is expected, n_member


class Compiled(NamedTuple):
    """A training step that was compiled, with the peak of its memory."""

    preset: str
    vocab_size: int
    rows: int  # Batch size.
    fsdp: int  # Devices on this axis.
    platform: str
    remat: Remat
    peak: float  # In GB.
    tolerance: float  # How far the estimate may be from the peak, relative to it.


# Peaks are the compilers' numbers. Steps with `none` were compiled when they still stored the masks
# of dropout, which the estimate leaves out, so their tolerances are larger.
COMPILED = [
    Compiled("enwik8_12l", 204, 22, 1, "tpu", Remat.DOTS, 3.80, 0.05),
    Compiled("enwik8_24l", 204, 8, 1, "gpu", Remat.DOTS, 12.8, 0.05),
    Compiled("enwik8_24l", 204, 64, 1, "tpu", Remat.FULL, 11.3, 0.05),
    Compiled("wt103_large", 267_735, 128, 1, "tpu", Remat.FULL, 12.5, 0.15),
    Compiled("enwik8_12l", 204, 22, 1, "tpu", Remat.NONE, 6.02, 0.1),
    Compiled("enwik8_24l", 204, 64, 16, "tpu", Remat.NONE, 4.68, 0.1),
    Compiled("enwik8_24l", 204, 8, 1, "gpu", Remat.NONE, 18.1, 0.11),
    Compiled("wt103_base", 267_735, 60, 1, "tpu", Remat.NONE, 10.1, 0.15),
]


@pytest.mark.parametrize(
    ("preset", "vocab_size", "rows", "fsdp", "platform", "remat", "peak", "tolerance"),
    full_but([COMPILED[0], COMPILED[5]], COMPILED),
)
def test_the_estimate_is_near_the_peak_of_compiled_steps(
    preset, vocab_size, rows, fsdp, platform, remat, peak, tolerance
):
    changes = {"model.dtype": "bfloat16", "train.batch_size": rows, "mesh.fsdp": fsdp}
    config = config_tree.replace(txl_jax.preset(preset), changes)
    mesh = abstract_mesh(config.mesh, fsdp)
    built = build(config, vocab_size=vocab_size, mesh=mesh)
    estimate = estimate_bytes(
        remat,
        config=config,
        call=dataclasses.replace(training_call(config, mesh), platform=platform),
        implementation=STORED if platform == "gpu" else FUSED,
        device_bytes=built.device_bytes(),
        vocab_size=vocab_size,
        n_tensor=1,
    )
    assert estimate / 1e9 == pytest.approx(peak, rel=tolerance)


# The record


def start(config, corpus, path):
    """The part of a start that chooses and records. Returns the choice, and lines for the log."""
    with Run.open(path) as run:
        run.compare(config)
        vocab_size = corpus.vocabulary.size
        built = build(config, vocab_size=vocab_size, remat=run.remat_for(config))
        run.record_start(config, corpus, remat=built.remat)
        return built.remat, run.notes


def read_record(path):
    return json.loads(Path(path, "config.json").read_text())


def test_a_run_keeps_what_it_began_with_on_another_machine(
    config, corpus, tmp_path, on_tpu, monkeypatch
):
    first, _ = start(config, corpus, tmp_path)
    record = read_record(tmp_path)
    assert first.remat is Remat.DOTS
    assert record["remat"] == "dots"
    assert record["config"]["model.remat"] == "auto"

    # The next start is on a CPU, where a new run would begin with `none`.
    monkeypatch.undo()
    again, notes = start(config, corpus, tmp_path)
    assert again == ChosenRemat(Remat.DOTS, "as in earlier starts")
    assert notes == []
    assert read_record(tmp_path) == record


def test_a_typed_value_changes_the_choice_and_auto_keeps_it_from_then_on(config, corpus, tmp_path):
    # It begins on a CPU, with `none`.
    start(config, corpus, tmp_path)
    full = config_tree.replace(config, {"model.remat": Remat.FULL})
    changed, notes = start(full, corpus, tmp_path)
    assert changed.remat is Remat.FULL
    assert read_record(tmp_path)["remat"] == "full"
    assert any("remat" in note and "none" in note and "full" in note for note in notes)
    kept, _ = start(config, corpus, tmp_path)
    assert kept.remat is Remat.FULL


def test_runs_from_before_there_was_a_choice_keep_none(config, corpus, tmp_path, on_tpu):
    """They have `none` in their settings, and no choice in their record. A call of the library that
    resumes them with today's defaults passes `auto`.
    """
    old = config_tree.replace(config, {"model.remat": Remat.NONE})
    start(old, corpus, tmp_path)
    record = read_record(tmp_path)
    del record["remat"]
    Path(tmp_path, "config.json").write_text(json.dumps(record))
    kept, _ = start(config, corpus, tmp_path)
    assert kept.remat is Remat.NONE
    assert read_record(tmp_path)["remat"] == "none"


def test_a_record_with_another_word_is_named(config, corpus, tmp_path):
    start(config, corpus, tmp_path)
    record = read_record(tmp_path) | {"remat": "most"}
    Path(tmp_path, "config.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="most"):
        Run.read(tmp_path)


def test_a_member_that_is_split_off_keeps_the_choice(config, corpus, tmp_path, monkeypatch):
    """The copies of its checkpoints are tested in test_trained.py."""
    members = [{"seed": 1}, {"seed": 2}]
    remat = ChosenRemat(Remat.DOTS, "a reason")
    with Run.open(tmp_path / "all") as run:
        run.record_start(config, corpus, members=members, remat=remat)
    # Nothing was trained, so there is no checkpoint to copy.
    for name in ("_copy_latest", "_copy_best", "_copy_records"):
        monkeypatch.setattr(ensemble, name, lambda *args: 0)
    ensemble.split_off(str(tmp_path / "all"), "seed=1", str(tmp_path / "one"))
    assert Run.read(tmp_path / "one").remat is Remat.DOTS


def test_hosts_compare_their_choices(monkeypatch):
    compared: list = []
    monkeypatch.setattr(distributed, "assert_same_on_all", lambda facts, _: compared.append(facts))
    for remat in (Remat.DOTS, Remat.DOTS, Remat.FULL):
        check_same_remat(ChosenRemat(remat, "a reason"))
    first, same, other = compared
    assert first == same != other


@pytest.mark.full
def test_a_run_begun_on_an_accelerator_ends_elsewhere_with_the_same_numbers(
    config, corpus, tmp_path, on_tpu, monkeypatch
):
    assert runs.train(config, corpus, tmp_path / "whole").finished
    stop = runs.stop_after(5)
    assert not runs.train(config, corpus, tmp_path / "stopped", stop_requested=stop).finished
    # The second start is on a CPU.
    monkeypatch.undo()
    assert runs.train(config, corpus, tmp_path / "stopped").finished
    assert runs.numbers(tmp_path / "stopped") == runs.numbers(tmp_path / "whole")
    logged = runs.log_lines(tmp_path / "stopped" / "log.txt")
    lines = [line for line in logged if line.startswith("remat ")]
    assert ["as in earlier starts" in line for line in lines] == [False, True]
