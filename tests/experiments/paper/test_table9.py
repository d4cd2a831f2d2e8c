"""Tests the measurement of table 9, and the program that prints it."""

import dataclasses
import itertools

import pytest

from experiments.bench import timing
from experiments.bench.timing import Task
from experiments.paper import table9
from support import programs, tiny
from txl_jax.config import Encoding, EvalConfig, ExperimentConfig, MeshConfig, ModelConfig

A = 9  # Attention length.
L = 5  # Tokens of a segment.
S = 8  # Segments of a call.
CONFIG = ExperimentConfig(model=tiny.CONFIG, eval=EvalConfig(segment_len=L, clamp_len=4))
# The program's model, scaled down.
SMALL = [
    "--model.n_layer=1",
    "--model.d_model=16",
    "--model.n_head=2",
    "--model.d_head=4",
    "--model.d_inner=8",
]


# Settings of the relative encoding only, which the sliding window's model cannot have.
@pytest.mark.parametrize("own", ["untie_r", "tie_positions"])
def test_both_sides_have_the_same_sizes_and_see_the_same_number_of_tokens(own):
    model = ModelConfig(n_layer=3, d_inner=30, **{own: True})
    config = ExperimentConfig(model=model, eval=EvalConfig(batch_size=4, same_length=False))
    window = table9.sliding_window_config(config)
    ours = table9.our_config(config, 800)
    window.validate()
    ours.validate()
    # As published, the sliding window's model has absolute positions, and the rest is the same.
    assert ours.model == config.model
    assert config.model.encoding is Encoding.RELATIVE
    assert window.model == dataclasses.replace(
        config.model, encoding=Encoding.VASWANI, **{own: False}
    )
    assert (ours.eval.batch_size, ours.eval.mem_len, ours.eval.same_length) == (1, 800, True)
    assert window.mesh == ours.mesh == MeshConfig(data=1)


@pytest.mark.full
def test_a_window_scores_one_token_and_ours_all_of_its_segments(monkeypatch):
    windows = []
    ours = []
    make_window_step = table9.make_window_step
    repeated = timing.repeated

    def make_noted(model, **options):
        step = make_window_step(model, **options)

        def noted_step(params, *texts):
            windows.append([text.shape for text in texts])
            return step(params, *texts)

        return noted_step

    def note(step, memory, segments):
        shape = segments.inputs.shape
        ours.append((memory.valid.tolist(), memory.mem_len, shape, segments.reset.any()))
        return repeated(step, memory, segments)

    monkeypatch.setattr(table9, "make_window_step", make_noted)
    monkeypatch.setattr(timing, "repeated", note)

    window_seconds, our_seconds = table9.measure(
        CONFIG, vocab_size=tiny.V, attention_len=A, calls=2
    )

    # A call for warm-up, and two that are timed.
    assert windows == [[(1, A), (1, 1)]] * 3
    # The memory is full, and no row starts anew.
    assert ours == [([A], A, (S, 1, L), False)]
    assert len(window_seconds) == 2
    assert len(our_seconds) == 2


def test_seconds_are_per_token(monkeypatch):
    clock = itertools.count()
    # A call takes a second, which is for one token of the window, or for 8 of ours.
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(table9, "_sliding_window", lambda *_: Task("", 1, lambda: None))
    monkeypatch.setattr(table9.speed, "evaluation", lambda *_: Task("", 8, lambda: None))

    seconds = table9.measure(CONFIG, vocab_size=tiny.V, attention_len=A, calls=3)

    assert seconds == ([1.0] * 3, [0.125] * 3)


@pytest.mark.full
def test_the_program_prints_a_table():
    code, out, err = programs.run(
        "experiments.paper.table9", *SMALL, "--lengths=20,800", "--calls=3"
    )
    assert code == 0, err
    # The paper has a speedup for 800, and none for 20.
    own, published = (line.split("|") for line in out.splitlines()[-2:])
    assert own[1].strip() == "20"
    assert own[9].strip() == ""
    assert published[1].strip() == "800"
    assert published[9].strip() == "363"
    for row in (own, published):
        window, slowest, fastest, ours, *_, ratio = (
            float(cell.replace(",", "")) for cell in row[2:9]
        )
        assert slowest >= window >= fastest
        # The printed numbers are rounded.
        assert ratio == pytest.approx(window / ours, rel=0.02, abs=0.6)
