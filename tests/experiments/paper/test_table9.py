"""Tests the measurement of table 9, and the program that prints it."""

import dataclasses
import itertools

import jax
import pytest

from experiments.bench import timing
from experiments.bench.timing import Task
from experiments.paper import table9
from support import programs, tiny
from txl_jax.config import Encoding, EvalConfig, ExperimentConfig, MeshConfig, ModelConfig
from txl_jax.runs import build

A, L, S = 9, 5, 8
CONFIG = ExperimentConfig(model=tiny.CONFIG, eval=EvalConfig(segment_len=L, clamp_len=4))
SMALL = ["--model.n_layer=1", "--model.d_model=16", "--model.n_head=2", "--model.d_head=4", "--model.d_inner=8"]


@pytest.mark.parametrize("own", ["untie_r", "tie_positions"])
def test_both_sides_have_the_same_sizes_and_see_the_same_number_of_tokens(own):
    model = ModelConfig(n_layer=3, d_inner=30, **{own: True})
    config = ExperimentConfig(model=model, eval=EvalConfig(batch_size=4, same_length=False))
    window, ours = table9.sliding_window_config(config), table9.our_config(config, 800)
    window.validate()
    ours.validate()
    assert ours.model == config.model and config.model.encoding is Encoding.RELATIVE  # As published.
    assert window.model == dataclasses.replace(config.model, encoding=Encoding.VASWANI, **{own: False})
    assert (ours.eval.batch_size, ours.eval.mem_len, ours.eval.same_length) == (1, 800, True)
    assert window.mesh == ours.mesh == MeshConfig(data=1)


def note_calls(monkeypatch, module, maker, note):
    """Has `note` called with the model and the arguments of each call of a step that `maker` makes."""
    make = getattr(module, maker)

    def made(model, *settings, **options):
        step = make(model, *settings, **options)

        def noted(*arguments):
            note(model, *arguments)
            return step(*arguments)

        return noted

    monkeypatch.setattr(module, maker, made)


@pytest.mark.full
def test_a_window_scores_one_token_and_ours_all_of_its_segments(monkeypatch):
    windows, segments, memories = [], [], []

    def note_window(model, params, inputs, targets):
        windows.append((inputs.shape, targets.shape, model.config.encoding))

    def note_segments(model, weights, memory, read):
        jax.debug.callback(lambda *both: memories.append([each.tolist() for each in both]), memory.valid, read.reset)
        segments.append((read.inputs.shape, memory.mem_len, model.config.encoding))

    note_calls(monkeypatch, table9, "make_window_step", note_window)
    note_calls(monkeypatch, build, "make_eval_step", note_segments)
    found = table9.measure(CONFIG, vocab_size=tiny.V, attention_len=A, calls=2)
    jax.effects_barrier()
    assert windows == [((1, A), (1, 1), Encoding.VASWANI)] * 3
    assert segments == [((S, 1, L), A, Encoding.RELATIVE)]  # Traced once.
    assert memories == [[[A], [[False]] * S]] * 3  # Full, and no row starts anew.
    assert [len(seconds) for seconds in found] == [2, 2]


def test_seconds_are_per_token(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))  # A call takes a second.
    monkeypatch.setattr(table9, "_sliding_window", lambda *_: Task("", 1, lambda: None))
    monkeypatch.setattr(table9.speed, "evaluation", lambda *_: Task("", 8, lambda: None))
    assert table9.measure(CONFIG, vocab_size=tiny.V, attention_len=A, calls=3) == ([1.0] * 3, [0.125] * 3)


@pytest.mark.full
def test_the_program_prints_a_table():
    code, out, err = programs.run("experiments.paper.table9", *SMALL, "--lengths=20,800", "--calls=3")
    assert code == 0, err
    [own, published] = [[cell.strip() for cell in line.split("|")] for line in out.splitlines()[-2:]]
    assert (own[1], own[9]) == ("20", "") and (published[1], published[9]) == ("800", "363")
    for row in (own, published):
        window, slowest, fastest, ours, *_, ratio = (float(cell.replace(",", "")) for cell in row[2:9])
        assert slowest >= window >= fastest and ratio == pytest.approx(window / ours, rel=0.02, abs=0.6)
