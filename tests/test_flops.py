"""Tests the FLOPs of a training step and of inference against XLA's count and the traced program's,
the peaks of devices, the reported units, and plots.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import txl_jax
from support import tiny
from support.traced_matmuls import matmul_flops
from txl_jax import flops, plots
from txl_jax.config import (
    Encoding,
    EvalConfig,
    ExperimentConfig,
    Network,
    NormPlace,
    Remat,
    TrainConfig,
    config_tree,
)
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.word_tokens import CharacterVocabulary
from txl_jax.inference import forward
from txl_jax.inference.prepare import prepare_params
from txl_jax.metrics import Measure, Totals
from txl_jax.ops.attention import Visibility
from txl_jax.runs.build import build
from txl_jax.training.step import make_train_step


@pytest.mark.full
@pytest.mark.parametrize("encoding", Encoding)
def test_a_token_costs_what_xla_counts(encoding):
    """XLA counts softmax and norms too: a few percent for matmuls as large as here."""
    sizes = {"n_layer": 2, "d_model": 64, "n_head": 2, "d_head": 48, "d_inner": 160}
    table = {"num_positions": 300} if encoding.is_learned else {}
    model = tiny.make(encoding=encoding, **table, **sizes)
    freeze = functools.partial(
        prepare_params, model=model, segment_len=1, mem_len=256, clamp_len=None
    )
    weights = jax.jit(freeze)(tiny.variables(model)["params"])
    memory = forward.init_cache(weights, batch_size=2, mem_len=256, segment_len=1)

    def step(weights, memory):
        hidden, memory = forward.forward(weights, jnp.zeros((2, 1), jnp.int32), memory)
        return forward.nll(weights, hidden, jnp.zeros((2, 1), jnp.int32)), memory

    # By token: there are two rows of one token.
    counted = jax.jit(step).lower(weights, memory).compile().cost_analysis()["flops"] / 2
    for same_length in (False, True):
        lengths = EvalConfig(segment_len=1, mem_len=256, same_length=same_length)
        expected = flops.of_inference(model.config, lengths, vocab_size=tiny.V)
        assert expected < counted < 1.15 * expected


# A preset in miniature, with all sizes different. The reference is the attention whose matmuls the
# program shows.
MINIATURE = {
    "model.n_layer": 3,
    "model.d_model": 14,
    "model.n_head": 2,
    "model.d_head": 5,
    "model.d_inner": 22,
    "model.attention": "reference",
    "train.batch_size": 4,
    "train.segment_len": 6,
    "train.segments_per_call": 1,
    "train.mem_len": 10,
    "train.grad_accum_steps": 1,
}
WITH_TAILS = {"model.cutoffs": (8, 20, 31)}
VOCAB_SIZE = 41


def traced_step(config):
    """The program of a training step. It is traced and not compiled."""
    built = build(config, vocab_size=VOCAB_SIZE)
    step = make_train_step(built.model, built.optimizer, built.schedule, built.config)
    return jax.make_jaxpr(step)(built.abstract_state, built.abstract_segments(config.train))


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        pytest.param("enwik8_12l", {}, id="enwik8_12l"),
        pytest.param("enwik8_24l", {"train.same_length": True}, id="same_length"),
        pytest.param(
            "enwik8_24l",
            {"train.grad_accum_steps": 2, "train.clamp_len": 7},
            id="grad_accum_steps, clamp_len",
        ),
        pytest.param("enwik8_24l", {"model.remat": Remat.FULL}, id="remat"),
        pytest.param("enwik8_12l", {"model.tie_positions": True}, id="tie_positions"),
        pytest.param("enwik8_12l", {"train.mem_len": 0, "train.stride": 2}, id="stride"),
        pytest.param("wt103_base", WITH_TAILS, id="wt103_base"),
        pytest.param("wt103_large", WITH_TAILS | {"model.d_embed": 64}, id="wt103_large"),
        pytest.param(
            "wt103_large_nvidia", WITH_TAILS | {"model.d_embed": 64}, id="wt103_large_nvidia"
        ),
        pytest.param(
            "enwik8_12l",
            {"model.layer_norm": NormPlace.PRE, "model.d_embed": 9},
            id="pre-norm, d_embed",
        ),
        pytest.param(
            "ptb", {"model.encoding": Encoding.SHAW, "model.num_positions": 12}, id="shaw"
        ),
        pytest.param("ptb", {"train.mem_len": 0, "model.encoding": Encoding.VASWANI}, id="vaswani"),
        pytest.param(
            "ptb", {"model.encoding": Encoding.AL_RFOU, "model.num_positions": 12}, id="al_rfou"
        ),
    ],
)
def test_a_training_step_has_the_matmuls_of_its_program(preset, changes):
    """The numbers are equal, after the differences that txl_jax/flops.py names.

    - The program multiplies all L x K pairs of attention, and flops the visible ones.
    - With div_val > 1 the program projects the embedding of each token with the matrices of all
      clusters, and flops only with the head's.
    - The tails of the softmax run in `while` loops, which neither counts.
    """
    config = config_tree.replace(txl_jax.preset(preset), MINIATURE | changes)
    model = config.model
    train = config.train

    cost = flops.of_step(config, vocab_size=VOCAB_SIZE, n_device=1)
    # Forward, and the gradients of both operands.
    passes = 3
    expected = cost.flops
    if model.remat is Remat.FULL:
        passes += 1
        expected += cost.recomputed_flops

    visibility = Visibility(
        valid=jnp.full((1,), train.mem_len),
        segment_len=train.segment_len,
        mem_len=train.mem_len,
        window=model.compat.window(train.mem_len, same_length=train.same_length),
    )
    n_hidden = train.batch_size * int(np.sum(~visibility.mask()))
    # Products with keys, with values, and with the keys of positions where there are any.
    n_product = 3 if model.encoding in (Encoding.RELATIVE, Encoding.SHAW) else 2
    heads_dim = model.n_head * model.d_head
    expected += passes * model.n_layer * n_product * 2 * heads_dim * n_hidden

    if model.div_val > 1:
        tail_widths = sum(model.cluster_width(c) for c in range(1, model.n_cluster))
        n_position = train.batch_size * train.segment_len
        # The embedding is not recomputed: three passes, of a multiplication and an addition.
        expected += 3 * 2 * n_position * tail_widths * model.d_model

    assert matmul_flops(traced_step(config)) == expected


@pytest.mark.parametrize("network", [Network.LSTM, Network.QRNN])
def test_a_training_step_of_a_recurrent_network_has_the_matmuls_of_its_program(network):
    changes = {"model.network": network, "train.mem_len": 1, "model.d_embed": 9}
    config = config_tree.replace(txl_jax.preset("ptb"), MINIATURE | changes)
    cost = flops.of_step(config, vocab_size=VOCAB_SIZE, n_device=1)
    assert matmul_flops(traced_step(config)) == cost.flops


@pytest.mark.parametrize("same_length", [False, True])
def test_a_segment_of_inference_has_the_matmuls_of_its_program(same_length):
    """The program multiplies all slots of the cache and all pairs within the segment, for content
    and values. For positions it multiplies each query with the keys of all distances.
    """
    batch, segment_len, mem_len = 3, 4, 12
    model = tiny.make(d_embed=9)
    prepare = functools.partial(
        prepare_params,
        model=model,
        segment_len=segment_len,
        mem_len=mem_len,
        clamp_len=None,
        window=mem_len if same_length else None,
    )
    init_cache = functools.partial(
        forward.init_cache, batch_size=batch, mem_len=mem_len, segment_len=segment_len
    )

    def score_segment(weights, tokens, cache):
        hidden, cache = forward.forward(weights, tokens, cache)
        return forward.nll(weights, hidden, tokens), cache

    # Shapes are enough: nothing is computed.
    weights = jax.eval_shape(prepare, tiny.variables(model)["params"])
    cache = jax.eval_shape(init_cache, weights)
    tokens = jax.ShapeDtypeStruct((batch, segment_len), jnp.int32)
    counted = matmul_flops(jax.make_jaxpr(score_segment)(weights, tokens, cache))

    lengths = EvalConfig(segment_len=segment_len, mem_len=mem_len, same_length=same_length)
    n_visible = mem_len if same_length else mem_len + (segment_len + 1) / 2
    n_hidden = mem_len + segment_len - n_visible
    hidden = 3 * 2 * tiny.N * tiny.H * tiny.E * n_hidden
    expected = flops.of_inference(model.config, lengths, vocab_size=tiny.V) + hidden
    assert counted == batch * segment_len * expected


def cost_of(model):
    """The cost of a training step of one row, and the FLOPs of its forward pass."""
    train = TrainConfig(batch_size=1, segment_len=4, mem_len=8, same_length=True)
    cost = flops.of_step(ExperimentConfig(model=model, train=train), vocab_size=tiny.V, n_device=1)
    return cost, 4 * flops.of_inference(model, train, vocab_size=tiny.V)


def test_a_layer_of_a_qrnn_has_three_gates_and_the_first_reads_two_inputs():
    cost, forward = cost_of(tiny.model_config(network=Network.QRNN, n_layer=3))
    layers = 2 * 3 * tiny.D * (2 * tiny.D + tiny.D + tiny.D)
    softmax = 2 * tiny.V * tiny.D
    assert forward == 4 * (layers + softmax)
    assert cost.flops == 3 * forward


def test_updates_and_recomputation_from_forward_passes():
    """An update costs three forward passes, and the projections of memory and codes.

    Recomputation costs a forward pass of all layers, without the softmax.
    """
    config = tiny.CONFIG
    cost, forward = cost_of(config)
    # Keys and values of 8 positions of memory, and 12 codes. Twice that is their forward pass and
    # the gradient of their weights.
    projected = config.n_layer * 2 * config.d_model * config.n_head * config.d_head * (2 * 8 + 12)
    assert cost.flops == 3 * forward + 2 * projected
    assert cost.recomputed_flops == forward - 4 * 2 * tiny.V * config.d_model + projected


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v4", 275e12),
        ("NVIDIA T400 4GB", None),  # Not a T4, whose peak is known.
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        # Slower than the card.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("CPU", None),
    ],
)
def test_peaks_by_the_names_that_jax_gives(kind, peak):
    assert flops.device_peak(kind) == peak


def test_units_of_a_total():
    total = Totals(nats=6 * math.log(2), tokens=2)  # Six bits: three per token.
    assert total.nll == pytest.approx(3 * math.log(2))
    assert total.bits_per_token == pytest.approx(3)
    assert total.perplexity == pytest.approx(8)
    assert math.isnan(total.bits_per_byte)
    assert Totals(nats=1e6, tokens=1).perplexity == math.inf

    nothing = Totals()
    assert math.isnan(nothing.nll)
    assert math.isnan(nothing.bits_per_token)
    assert math.isnan(nothing.perplexity)


def test_a_short_part_of_a_sum_weighs_by_its_tokens():
    """The mean of the two means would be 2.5."""
    total = Totals(nats=3.0, tokens=3) + Totals(nats=4.0, tokens=1)
    assert total.nll == pytest.approx(7 / 4)


def test_a_measure_selects_the_reported_units():
    text = Totals(nats=6 * math.log(2), tokens=2, bytes=12)
    assert text.bits_per_byte == pytest.approx(6 / 12)

    of_characters = text.per_token(Measure.BPC)
    of_tokens = text.per_token(Measure.PPL)
    of_bytes = text.per_token(Measure.BPB)
    assert "bpc" in of_characters
    assert "bits_per_byte" not in of_characters
    assert "bpc" not in of_tokens
    assert of_tokens["bits_per_token"] == pytest.approx(3)
    assert of_bytes["bits_per_byte"] == pytest.approx(3)
    assert of_bytes["bpc"] == of_bytes["bits_per_byte"] == text.value(Measure.BPB)
    assert text.format(Measure.BPB) == "bits per byte 3.0000"

    assert ByteVocabulary.measure is Measure.BPB
    assert CharacterVocabulary.measure is Measure.BPC


def records_of_training(bpc_at):
    """The records of eight steps, with `bpc_at(step)` on training and validation text."""
    records = []
    for step in range(1, 9):
        for kind in ("train", "valid"):
            records.append({"kind": kind, "step": step, "bpc": bpc_at(step)})
    return records


@pytest.mark.full
def test_a_learning_curve(tmp_path):
    records = records_of_training(lambda step: 8 / step)
    plots.learning_curve(
        records, tmp_path / "curve.png", title="a title", levels={"zlib": 1.9, "lzma": 1.6}
    )
    picture = (tmp_path / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000, "a picture without curves is smaller"


@pytest.mark.full
@pytest.mark.parametrize(
    "last",
    [
        pytest.param((2.1, 1.95, 1.6, 1.74, 1.49), id="apart"),
        pytest.param((1.6, 1.59, 1.58, 1.6, 1.59), id="close"),
        pytest.param((2.0, 2.0, 2.0, 2.0, 2.0), id="equal"),
    ],
)
def test_names_at_the_ends_of_curves_do_not_overlap(last, tmp_path, monkeypatch):
    drawings = []
    save = plots.save
    monkeypatch.setattr(
        plots, "save", lambda drawing, path: drawings.append(drawing) or save(drawing, path)
    )
    records = records_of_training(lambda step: 1 + 8 / step)
    # Where three curves end, and the heights of two horizontal lines.
    ends = dict(zip(("without", "with", "learning", "alone", "after"), last, strict=True))
    curves = {name: np.array([9.0, 3.0, ends[name]]) for name in ("without", "with", "learning")}
    levels = {name: ends[name] for name in ("alone", "after")}
    path = tmp_path / "reading.png"
    bytes_read = np.array([1.0, 500.0, 1000.0])
    plots.training_and_reading(
        records, path, title="a title", bytes_read=bytes_read, curves=curves, levels=levels
    )
    assert path.read_bytes().startswith(b"\x89PNG")

    (drawing,) = drawings
    drawing.canvas.draw()
    labels = drawing.axes[1].texts
    assert [label.get_text() for label in labels] == [
        f"{end:.2f}  {name}" for name, end in ends.items()
    ]
    for first, second in itertools.combinations(labels, 2):
        overlap = first.get_window_extent().overlaps(second.get_window_extent())
        assert not overlap, (first.get_text(), second.get_text())
    for label in labels:
        assert label.get_window_extent().x1 <= drawing.bbox.x1, label.get_text()

    # Curves differ by their colors, and levels from them by their style, of whose dashes
    # matplotlib does not tell more.
    lines = drawing.axes[1].get_lines()
    assert len({line.get_color() for line in lines[:3]}) == 3
    assert len({str(line.get_linestyle()) + str(line.get_color()) for line in lines}) >= 4
    # The means of the beginning, 9 and 3, are above the picture: they would flatten the rest.
    assert drawing.axes[1].get_ylim()[1] < 3.0
