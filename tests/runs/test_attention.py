"""Tests a run's implementations of attention: the record, which resumes keep, and the comparison
before a run.

In the first part tests choose which implementations exist and which one "auto" prefers. Two tiles
give other numbers in the last digits. In the second part, wrong kernels are ours with a fault
planted: a run names them, and is then the run of the reference to the last bit.
"""

import dataclasses
import json
import shutil
import types
from pathlib import Path

import jax
import pytest

from ops.attention.tpu.test_limits import CACHED, EVALUATION, PROBLEM, TRAINING, resized
from support import runs, tiny, tiny_run
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig, ModelConfig, config_tree
from txl_jax.errors import UserError
from txl_jax.ops.attention import AttentionCall, AttentionPaths, Implementation, Tile, choose
from txl_jax.ops.attention.tpu import cached, geometry, kernels
from txl_jax.runs import attention_check
from txl_jax.runs.attention_choice import ChosenPath
from txl_jax.runs.build import build
from txl_jax.runs.run import Run, check_same_attention
from txl_jax.runs.trained import TrainedModel
from txl_jax.runtime import distributed

# Starts with the same settings, tiles included, are traced once. Comparisons with the reference are
# never kept, so a fault that a test plants in a kernel is seen.
pytestmark = pytest.mark.usefixtures("traces_kept")

SMALL = Tile(4, 8)
LARGE = Tile(8, 16)


def test_a_start_with_other_settings_keeps_what_they_do_not_touch():
    """No choice of attention depends on log_every, and only the one for evaluation on
    eval.mem_len.
    """
    run = Run("somewhere")
    assert run.attention_for(ExperimentConfig()) == AttentionPaths("auto", "auto"), "a new run"

    run.is_new = False
    run.config = ExperimentConfig()
    run.attention = {"training": "tiled 4x8", "evaluation": "reference"}

    def kept(changes):
        return run.attention_for(config_tree.replace(run.config, changes))

    tiled = Implementation("tiled", tile=SMALL)
    reference = Implementation("reference")
    assert kept({"train.log_every": 7}) == AttentionPaths(tiled, reference)
    assert kept({"eval.mem_len": 12}) == AttentionPaths(tiled, "auto")
    typed = AttentionPaths("reference", "reference")
    assert kept({"model.attention": "reference"}) == typed, "a typed path is used for both"


def test_hosts_compare_their_choices(monkeypatch):
    """tests/runtime/test_distributed.py tests that what they compare reaches all of them."""
    compared: list = []
    monkeypatch.setattr(
        distributed, "assert_same_on_all", lambda facts, advice: compared.append(facts)
    )
    for training in ("tiled 4x8", "tiled 4x8", "fused mosaic_roll 64x128"):
        chosen = ChosenPath(Implementation.parse(training), "a reason")
        check_same_attention(AttentionPaths(chosen, chosen))
    first, same, other = compared
    assert first == same != other
    assert other["attention in training"] == "fused mosaic_roll 64x128"


SIZES = {
    "train.batch_size": 4,
    "train.steps": 4,
    "train.eval_every": 4,
    "train.checkpoint_every": 4,
    "train.segments_per_call": 2,
    "train.log_every": 2,
    "eval.valid_tokens": 200,
}
# Weights so large that another tile gives other last bits, as the tests of resuming need.
MODEL = ModelConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8, init_std=0.5)
# Only a name in the run's record: the fixture `corpus` has the text.
DATA = DataConfig(corpus=CorpusName.TEXT, file="words.txt")
CONFIG = config_tree.replace(tiny_run.CONFIG, SIZES | {"data": DATA, "model": MODEL})


def choose_tiles(monkeypatch):
    """Returns what a test may change: the tile that is chosen, and why tiles cannot serve."""
    choice = types.SimpleNamespace(tile=SMALL, refusal=None)
    refusal = choose.refusal

    def refusal_of(path, *rest):
        if path == "tiled":
            return choice.refusal
        return refusal(path, *rest)

    monkeypatch.setattr(choose, "refusal", refusal_of)
    monkeypatch.setattr(choose, "tiles_are_faster", lambda problem: choice.refusal is None)
    monkeypatch.setattr(choose, "default_tile", lambda problem: choice.tile)
    return choice


@pytest.fixture
def tiles(monkeypatch):
    return choose_tiles(monkeypatch)


@pytest.fixture(scope="module")
def both(corpus, tmp_path_factory):
    """The run with small tiles when it has ended, and stopped after its first call, of 2 of the 4
    updates.
    """
    whole = Run(tmp_path_factory.mktemp("whole"))
    stopped = Run(tmp_path_factory.mktemp("stopped"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        choose_tiles(monkeypatch)
        assert runs.train(CONFIG, corpus, whole).finished
        assert not runs.train(CONFIG, corpus, stopped, stop_requested=lambda: True).finished
    return whole, stopped


@pytest.fixture
def stopped(both, tmp_path):
    return Run.read_all(shutil.copytree(both[1].path, tmp_path / "run"))


def recorded(workdir):
    return json.loads(Path(workdir.path, "config.json").read_text()).get("attention")


def rewrite(workdir, attention):
    path = Path(workdir.path, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention": attention}))


@pytest.mark.full
def test_a_resumed_run_keeps_its_tiles_and_equals_the_undisturbed_one(both, stopped, corpus, tiles):
    tiles.tile = LARGE
    assert runs.train(CONFIG, corpus, stopped).finished
    assert runs.numbers(stopped) == runs.numbers(both[0])
    small_tiles = {"training": "tiled 4x8", "evaluation": "tiled 4x8"}
    assert recorded(stopped) == recorded(both[0]) == small_tiles
    logged = runs.log_lines(Path(stopped.path, "log.txt"))
    first_start, second_start = [line for line in logged if "attention training" in line]
    assert "as in earlier starts" not in first_start
    assert "as in earlier starts" in second_start


def start_again(workdir, config, corpus):
    """The part of a start that chooses, compares and records; returns the lines that it would
    log.
    """
    with Run.open(workdir.path) as run:
        components = build(
            config, vocab_size=corpus.vocabulary.size, recorded=run.attention_for(config)
        )
        run.record_start(config, corpus, attention=components.attention)
        return run.notes


@pytest.mark.full
def test_what_cannot_serve_any_more_is_replaced_with_one_line(stopped, corpus, tiles):
    # As if the run had begun on a TPU, whose kernels cannot serve here.
    rewrite(stopped, {"training": "fused mosaic_roll 128x256", "evaluation": "tiled 4x8"})
    [line] = start_again(stopped, CONFIG, corpus)
    assert "training was fused mosaic_roll 128x256 and is now tiled 4x8 " in line
    assert "evaluation" not in line
    assert recorded(stopped) == {"training": "tiled 4x8", "evaluation": "tiled 4x8"}

    tiles.refusal = "the head width is 4, below 8"
    [line] = start_again(stopped, CONFIG, corpus)
    assert "training was tiled 4x8 and is now reference, " in line
    assert "evaluation was tiled 4x8 and is now reference" in line
    assert recorded(stopped) == {"training": "reference", "evaluation": "reference"}

    # The replacement is recorded, so later starts and uses of the trained run log no line.
    assert start_again(stopped, CONFIG, corpus) == []
    components = TrainedModel.of(Run.read(stopped.path), CONFIG).build(log=pytest.fail)
    assert str(components.model.attention.cached) == "reference"

    # A use of the trained run replaces what cannot serve too, though it records nothing.
    rewrite(stopped, {"training": "reference", "evaluation": "tiled 4x8"})
    lines = []
    TrainedModel.of(Run.read(stopped.path), CONFIG).build(log=lines.append)
    [line] = lines
    assert "evaluation was tiled 4x8 and is now reference (" in line


# First contact: a path is compared with the reference before a run uses it, with interpreted TPU
# kernels


FUSED = Implementation("fused", "mosaic_gather", Tile(16, 128), interpret=True)
# In training: 8 slots of memory and 7 queries.
SHORT = AttentionCall(
    platform="cpu",
    device_kind="cpu",
    dtype="float32",
    batch=3,
    n_head=4,
    segment_len=7,
    n_keys=15,
    d_head=5,
    n_positions=15,
)
# In evaluation: a KV cache of 10 slots and 5 queries.
OVER_A_CACHE = dataclasses.replace(SHORT, segment_len=5, n_keys=15, capacity=10)


@pytest.fixture(autouse=True)
def unknown(monkeypatch):
    """Nothing has been compared in this process yet."""
    monkeypatch.setattr(attention_check, "_findings", {})


@pytest.fixture
def on_tpu(monkeypatch):
    """In training, auto and fused are interpreted kernels, as on a TPU. Evaluation is the CPU's."""
    real = choose.choose

    def choose_fused(path, problem, without=()):
        if path in ("auto", "fused") and "fused" not in without and not problem.cached:
            return FUSED, "kernels for a TPU"
        return real(path, problem, without)

    monkeypatch.setattr(choose, "choose", choose_fused)


def wrong_mask(monkeypatch):
    """The last slot that is not filled is visible."""
    real = geometry.Geometry.visible

    def one_more_visible(self, q, k, start, stop):
        return real(self, q, k, start - 1, stop)

    monkeypatch.setattr(geometry.Geometry, "visible", one_more_visible)


def wrong_gradient(monkeypatch):
    """The gradient of values is doubled, so it is off by all of its largest element."""
    real = kernels._score_gradient

    def doubled(step, operands, residuals, scratch):
        gradient = real(step, operands, residuals, scratch)
        scratch.value_gradient[...] = 2 * scratch.value_gradient[...]
        return gradient

    monkeypatch.setattr(kernels, "_score_gradient", doubled)


def failing_with(error):
    """Returns a fault that raises this error where a kernel multiplies matrices."""

    def plant(monkeypatch):
        def fail(*args):
            raise error

        monkeypatch.setattr(kernels, "dot", fail)

    return plant


def not_a_number(monkeypatch):
    real = kernels.dot
    monkeypatch.setattr(kernels, "dot", lambda *args: jax.numpy.nan * real(*args))


# The function that plants a fault, and what the reason for the reference says then. Of an error's
# text it has the first line.
FAULTS = {
    "nan": (not_a_number, "is wrong"),
    "mask": (wrong_mask, "is wrong"),
    "gradient": (wrong_gradient, "its gradient of value differs from the reference by 1.0e+00"),
    "compiler": (
        failing_with(NotImplementedError("no such product\nin Mosaic")),
        "compile or run: no such product",
    ),
    "memory": (
        failing_with(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vmem")),
        "RESOURCE_EXHAUSTED",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_named_and_replaced_or_an_error_if_it_was_asked_for(
    on_tpu, monkeypatch, fault
):
    plant, words = FAULTS[fault]
    plant(monkeypatch)
    training, evaluation = tiny_run.parts().attention
    assert str(training.implementation) == "reference"
    assert training.replaces_failed
    assert not evaluation.replaces_failed
    assert training.reason.startswith(f"{FUSED} on cpu")
    assert words in training.reason
    assert "\n" not in training.reason

    # The finding of this process is used again, without another comparison.
    monkeypatch.setattr(attention_check, "largest_difference", pytest.fail)
    with pytest.raises(UserError, match=r"fused .*--model.attention"):
        tiny_run.parts(model__attention="fused")


def test_a_run_with_a_wrong_kernel_is_the_references(
    run_once, config, corpus, on_tpu, monkeypatch, tmp_path, capsys
):
    wrong_gradient(monkeypatch)
    asked = config_tree.replace(config, {"model.attention": "fused"})
    with pytest.raises(UserError, match="gradient of value"):
        runs.train(asked, corpus, tmp_path / "asked")
    assert not (tmp_path / "asked").exists()

    outcome = runs.train(config, corpus, tmp_path / "run")

    whole, expected_outcome = run_once
    assert outcome == expected_outcome
    assert runs.numbers(tmp_path / "run") == runs.numbers(whole)
    _, state, _ = runs.state_of(tmp_path / "run")
    _, expected_state, _ = runs.state_of(whole)
    tiny_run.assert_equal(state, expected_state)
    printed = capsys.readouterr().out.splitlines()
    [line] = [line for line in printed if line.startswith("attention ")]
    assert "training reference (fused mosaic_gather 16x128 interpreted on cpu is wrong: " in line


def test_sound_kernels_are_used_and_compared_once(on_tpu, monkeypatch):
    training, _ = tiny_run.parts().attention
    assert training.implementation == FUSED
    assert not training.replaces_failed
    assert training.reason.startswith("kernels for a TPU; within ")

    monkeypatch.setattr(attention_check, "largest_difference", pytest.fail)
    assert tiny_run.parts().attention.training == training, "it was not compared again"

    # A model that is not trained does not use the kernel, so nothing is compared even without a
    # finding.
    attention_check._findings.clear()
    not_compared = build(tiny_run.CONFIG, vocab_size=tiny.V, uses=["evaluation"])
    assert not_compared.attention.training.implementation == FUSED
    # On a CPU, only interpreted kernels are compared.
    assert attention_check.compare(Implementation("stored"), SHORT).sentence == ""


def test_what_fails_on_one_host_is_used_on_none(on_tpu, monkeypatch):
    """The other host is made up. There the kernel is wrong that is sound here."""
    tiny_run.parts()
    [key] = attention_check._findings
    other = json.dumps({key: "the kernel of process 1 is wrong"})
    monkeypatch.setattr(attention_check.distributed, "is_multiprocess", lambda: True)
    monkeypatch.setattr(attention_check.distributed, "run_on_all", lambda act: act())
    monkeypatch.setattr(attention_check.distributed, "gather_texts", lambda text: [text, other])

    training, _ = attention_check.build_on_all(tiny_run.parts).attention

    assert str(training.implementation) == "reference"
    assert "of process 1 is wrong" in training.reason


def test_the_kernel_over_a_cache_is_compared_too(monkeypatch):
    sound = attention_check.compare(FUSED, OVER_A_CACHE)
    assert not sound.failed
    assert sound.sentence.startswith("within "), "it was compared"

    # A fault: scores by distance have the wrong sign.
    real = cached.skew_from
    monkeypatch.setattr(cached, "skew_from", lambda *args: -real(*args))
    monkeypatch.setattr(attention_check, "_findings", {})
    assert "its output differs" in attention_check.compare(FUSED, OVER_A_CACHE).sentence


# All weight is on the only key, so gradients of scores are 0 up to rounding, and a difference
# relative to their largest element could be of any size. The comparison divides by 0.1 then.
ONE_KEY = {"segment_len": 1, "n_keys": 1, "n_positions": 1}


@pytest.mark.parametrize(
    "problem",
    [
        dataclasses.replace(SHORT, dtype="bfloat16", dropout=True, window=6),
        dataclasses.replace(SHORT, has_position_score=True, **ONE_KEY),
        # Scores by distance alone, without position keys.
        dataclasses.replace(
            OVER_A_CACHE, has_position_score=True, n_positions=0, cache_dtype="bfloat16"
        ),
    ],
    ids=["narrow", "one key", "cache"],
)
def test_sound_paths_of_xla_are_within_the_tolerance(problem):
    """Otherwise a run would replace such a path, or end."""
    # The rows have 1, 0 and 2 filled slots of memory, or fewer if there are fewer slots.
    inputs = attention_check.make_inputs(problem, [1, 0, 2])
    for path in (Implementation("stored"), Implementation("tiled", tile=SMALL)):
        difference = attention_check.largest_difference(path, problem, inputs)
        assert attention_check.describe_error(*difference, problem) == "", path


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"])
def test_what_is_compared_is_the_kernel_of_the_run(kind, monkeypatch):
    """Published models are compared with fewer rows, heads and queries. The kernel that is chosen
    serves these sizes too, unchanged.
    """
    compared = []

    def note(implementation, problem):
        compared.append((implementation, problem))
        return attention_check.Finding(False, "")

    # Of the device, only platform and kind are asked for, which a problem has, too.
    device = dataclasses.replace(PROBLEM, device_kind=kind)
    monkeypatch.setattr(attention_check, "default_device", lambda: device)
    monkeypatch.setattr(attention_check, "_compare", note)
    problems = [resized(PROBLEM, sizes, device_kind=kind) for sizes in TRAINING.values()]
    for sizes, slots, _ in EVALUATION.values():
        problems.append(resized(CACHED, sizes, device_kind=kind, capacity=slots))
    problems += [dataclasses.replace(problem, dtype="float32") for problem in problems]
    assert problems

    for problem in problems:
        chosen, _ = choose.choose("auto", problem)
        attention_check._findings.clear()
        compared.clear()
        attention_check.compare(chosen, problem)

        [(implementation, small)] = compared
        assert chosen.path == "fused", problem
        assert implementation == chosen, problem
        assert choose.resolve(chosen, small) == chosen, problem
        # Kernels may treat an odd number of heads in another way, so it stays odd or even. An odd
        # number of queries fills no tile, so the edges of tiles are compared, too.
        assert small.n_head % 2 == problem.n_head % 2, problem
        is_cut = small.segment_len < problem.segment_len
        assert not is_cut or small.segment_len % 2, problem
        assert small.n_keys - small.segment_len == problem.n_keys - problem.segment_len
