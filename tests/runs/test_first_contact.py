"""Tests that a path of attention is compared with the reference before a run uses it, with interpreted TPU kernels.

Wrong kernels are ours with a fault planted: a run names them, and is then the run of the reference to the last bit.
"""

import dataclasses
import json

import jax
import pytest

from ops.attention.tpu.test_limits import CACHED, EVALUATION, PROBLEM, TRAINING, resized
from support import runs, tiny, tiny_run
from txl_jax.config import config_tree
from txl_jax.errors import UserError
from txl_jax.ops.attention import Implementation, Problem, Tile, choose
from txl_jax.ops.attention.tpu import cached, geometry, kernels
from txl_jax.runs import first_contact
from txl_jax.runs.build import build

FUSED = Implementation("fused", "mosaic_gather", Tile(16, 128), interpret=True)
SMALL = Problem("cpu", "cpu", "float32", 3, 4, 7, 15, 5, 15)
OVER_A_CACHE = dataclasses.replace(SMALL, segment_len=5, n_keys=15, capacity=10)


@pytest.fixture(autouse=True)
def unknown(monkeypatch):
    """Nothing was compared in this process yet."""
    monkeypatch.setattr(first_contact, "_findings", {})


@pytest.fixture
def on_tpu(monkeypatch):
    """In training, auto and fused are interpreted kernels, as on a TPU; evaluation is the CPU's."""
    real = choose.choose

    def choose_fused(path, problem, without=()):
        if path in ("auto", "fused") and "fused" not in without and not problem.cached:
            return FUSED, "kernels for a TPU"
        return real(path, problem, without)

    monkeypatch.setattr(choose, "choose", choose_fused)


def wrong_mask(monkeypatch):
    """The newest of the slots that are not filled is visible."""
    real = geometry.Geometry.visible
    monkeypatch.setattr(geometry.Geometry, "visible", lambda self, q, k, start, stop: real(self, q, k, start - 1, stop))


def wrong_gradient(monkeypatch):
    real = kernels._score_gradient

    def doubled(step, operands, residuals, scratch):
        found = real(step, operands, residuals, scratch)
        scratch.value_gradient[...] = 2 * scratch.value_gradient[...]
        return found

    monkeypatch.setattr(kernels, "_score_gradient", doubled)


def failing_with(error):
    def plant(monkeypatch):
        def fail(*args):
            raise error

        monkeypatch.setattr(kernels, "dot", fail)

    return plant


FAULTS = {
    "mask": (wrong_mask, "is wrong"),
    "gradient": (wrong_gradient, "its gradient of value differs from the reference by 1.0e+00"),
    "compiler": (failing_with(NotImplementedError("no such product\nin Mosaic")), "compile or run: no such product"),
    "memory": (failing_with(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vmem")), "RESOURCE_EXHAUSTED"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_named_and_replaced_or_refused_where_it_was_asked_for(on_tpu, monkeypatch, fault):
    plant, words = FAULTS[fault]
    plant(monkeypatch)
    training, evaluation = tiny_run.parts().attention
    assert (str(training.implementation), training.failed, evaluation.failed) == ("reference", True, False)
    assert training.reason.startswith(f"{FUSED} on cpu") and words in training.reason and "\n" not in training.reason
    monkeypatch.setattr(first_contact, "largest_difference", pytest.fail)  # It is known already.
    with pytest.raises(UserError, match=r"fused .*--model.attention"):
        tiny_run.parts(model__attention="fused")


def test_a_run_with_a_wrong_kernel_is_the_references(run_once, config, corpus, on_tpu, monkeypatch, tmp_path, capsys):
    wrong_gradient(monkeypatch)
    asked = config_tree.replace(config, {"model.attention": "fused"})
    with pytest.raises(UserError, match="gradient of value"):
        runs.train(asked, corpus, tmp_path / "asked")
    assert not (tmp_path / "asked").exists()
    outcome = runs.train(config, corpus, tmp_path / "run")
    assert outcome == run_once[1] and runs.numbers(tmp_path / "run") == runs.numbers(run_once[0])
    tiny_run.assert_equal(*(runs.state_of(run)[1] for run in (tmp_path / "run", run_once[0])))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attention ")]
    assert "training reference (fused mosaic_gather 16x128 interpreted on cpu is wrong: " in line


def test_sound_kernels_are_used_and_compared_once(on_tpu, monkeypatch):
    training, _ = tiny_run.parts().attention
    assert (training.implementation, training.failed) == (FUSED, False)
    assert training.reason.startswith("kernels for a TPU; within ")
    monkeypatch.setattr(first_contact, "largest_difference", pytest.fail)
    assert tiny_run.parts().attention.training == training
    first_contact._findings.clear()
    not_compared = build(tiny_run.CONFIG, vocab_size=tiny.V, uses=["evaluation"])
    assert not_compared.attention.training[0] == FUSED
    assert first_contact.compare(Implementation("stored"), SMALL).sentence == ""  # Of CPUs only interpreted kernels.


def test_what_fails_on_one_host_is_used_on_none(on_tpu, monkeypatch):
    """The other one is made up. It has found the kernel wrong that is sound here."""
    tiny_run.parts()
    [key] = first_contact._findings
    other = json.dumps({key: "the kernel of process 1 is wrong"})
    for name, act in {"is_multiprocess": lambda: True, "run_on_all": lambda act: act()}.items():
        monkeypatch.setattr(first_contact.distributed, name, act)
    monkeypatch.setattr(first_contact.distributed, "gather_texts", lambda own: [own, other])
    training, _ = first_contact.build_on_all(tiny_run.parts).attention
    assert str(training.implementation) == "reference" and "of process 1 is wrong" in training.reason


def test_the_kernel_over_a_cache_is_compared_too(monkeypatch):
    assert first_contact.compare(FUSED, OVER_A_CACHE)[0] is False
    real = cached.skew_from
    monkeypatch.setattr(cached, "skew_from", lambda *args: -real(*args))
    monkeypatch.setattr(first_contact, "_findings", {})
    assert "its output differs" in first_contact.compare(FUSED, OVER_A_CACHE).sentence


ONE_KEY = {"segment_len": 1, "n_keys": 1, "n_positions": 1}  # Gradients of scores are 0.


@pytest.mark.parametrize("path", [Implementation("stored"), Implementation("tiled", tile=Tile(4, 8))], ids=str)
@pytest.mark.parametrize(
    "problem",
    [
        dataclasses.replace(SMALL, dtype="bfloat16", dropout=True, window=6),
        dataclasses.replace(SMALL, has_position_score=True),
        dataclasses.replace(SMALL, **ONE_KEY),
        dataclasses.replace(OVER_A_CACHE, has_position_score=True, n_positions=0, cache_dtype="bfloat16"),
    ],
    ids=["narrow", "scores", "one key", "cache"],
)
def test_sound_paths_of_xla_are_within_the_tolerance(problem, path):
    inputs = first_contact.make_inputs(problem, [1, 0, 2])
    assert first_contact.describe_error(*first_contact.largest_difference(path, problem, inputs), problem) == ""


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite"])
def test_what_is_compared_is_the_kernel_of_the_run(kind, monkeypatch):
    """At the sizes of published models, with fewer rows, heads and queries: the choice serves them as it is."""
    compared = []
    monkeypatch.setattr(first_contact, "default_device", lambda: dataclasses.replace(PROBLEM, device_kind=kind))
    monkeypatch.setattr(
        first_contact, "_compare", lambda *given: compared.append(given) or first_contact.Finding(False, "")
    )
    problems = [resized(PROBLEM, sizes, device_kind=kind) for sizes in TRAINING.values()]
    problems += [resized(CACHED, sizes, device_kind=kind, capacity=slots) for sizes, slots, _ in EVALUATION.values()]
    problems += [dataclasses.replace(problem, dtype="float32") for problem in problems]
    for problem in problems:
        chosen, _ = choose.choose("auto", problem)
        first_contact._findings.clear()
        first_contact.compare(chosen, problem)
        implementation, small = compared[-1]
        assert chosen.path == "fused" and choose.resolve(chosen, small) == implementation == chosen
        assert (small.n_head % 2, small.segment_len % 2 or small.segment_len < 511) == (problem.n_head % 2, True)
        assert small.n_keys - small.segment_len == problem.n_keys - problem.segment_len
