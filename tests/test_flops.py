"""Tests the count of operations against XLA's, the table of devices, units that are reported, and
the plot of a run.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from support import tiny
from txl_jax import flops, plots
from txl_jax.config import Encoding, EvalConfig, ExperimentConfig, Network, TrainConfig
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.word_tokens import CharacterVocabulary
from txl_jax.inference import forward
from txl_jax.inference.prepare import prepare_params
from txl_jax.metrics import Measure, Totals


@pytest.mark.full
@pytest.mark.parametrize("encoding", Encoding)
def test_a_token_costs_what_xla_counts(encoding):
    """XLA counts softmax and norms too: a few of a hundred where the products are as large as
    here.
    """
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

    counted = jax.jit(step).lower(weights, memory).compile().cost_analysis()["flops"] / 2
    for same_length in (False, True):
        lengths = EvalConfig(segment_len=1, mem_len=256, same_length=same_length)
        expected = flops.of_inference(model.config, lengths, vocab_size=tiny.V)
        assert expected < counted < 1.15 * expected


def cost_of(model):
    """The cost of a training step of one row, and the FLOPs of its forward pass."""
    train = TrainConfig(batch_size=1, segment_len=4, mem_len=8, same_length=True)
    cost = flops.of_step(ExperimentConfig(model=model, train=train), vocab_size=tiny.V, n_device=1)
    return cost, 4 * flops.of_inference(model, train, vocab_size=tiny.V)


def test_a_layer_of_a_qrnn_has_three_gates_and_the_first_reads_two_inputs():
    cost, forward = cost_of(tiny.model_config(network=Network.QRNN, n_layer=3))
    assert forward == 4 * (2 * 3 * tiny.D * (2 * tiny.D + tiny.D + tiny.D) + 2 * tiny.V * tiny.D)
    assert cost.flops == 3 * forward


def test_updates_and_recomputation_from_forward_passes():
    """An update costs three, and the projections of memory and codes; computing again all layers,
    not the softmax.
    """
    config = tiny.CONFIG
    cost, forward = cost_of(config)
    # 8 positions of memory, keys and values, and 12 codes; forward and their weights' gradient.
    projected = config.n_layer * 2 * config.d_model * config.n_head * config.d_head * (2 * 8 + 12)
    assert cost.flops == 3 * forward + 2 * projected
    assert cost.recomputed_flops == forward - 4 * 2 * tiny.V * config.d_model + projected


def test_peaks_by_the_names_that_jax_gives():
    peaks = {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "TPU v5 lite": 197e12,
        "TPU v5p": 459e12,
    }
    for kind, peak in {**peaks, "TPU v4": 275e12, "NVIDIA T400 4GB": None, "CPU": None}.items():
        assert flops.device_peak(kind) == peak, kind


def test_units_and_sums():
    total = Totals(nats=6 * math.log(2), tokens=2)
    assert (total.nll, total.bpc, total.perplexity) == pytest.approx((3 * math.log(2), 3, 8))
    # A short part weighs by its tokens: the mean of the two means would be 2.5.
    assert (Totals(nats=3.0, tokens=3) + Totals(nats=4.0, tokens=1)).nll == pytest.approx(7 / 4)
    text = Totals(nats=6 * math.log(2), tokens=2, bytes=12)
    assert text.bits_per_byte == pytest.approx(0.5) and math.isnan(total.bits_per_byte)
    assert "bpc" in text.per_token(Measure.BPC) and "bpc" not in text.per_token(Measure.PPL)
    assert text.per_token(Measure.PPL)["bits_per_token"] == pytest.approx(3)
    of_bytes = text.per_token(Measure.BPB)
    assert (
        of_bytes["bits_per_byte"] == of_bytes["bpc"] == text.value(Measure.BPB) == pytest.approx(3)
    )
    assert text.format(
        Measure.BPB
    ) == "bits per byte 3.0000" and "bits_per_byte" not in text.per_token(Measure.BPC)
    assert ByteVocabulary.measure is Measure.BPB and CharacterVocabulary.measure is Measure.BPC
    nothing = Totals()
    assert all(map(math.isnan, (nothing.nll, nothing.bpc, nothing.perplexity)))
    assert Totals(nats=1e6, tokens=1).perplexity == math.inf


@pytest.mark.full
def test_a_learning_curve(tmp_path):
    records = [
        {"kind": kind, "step": step, "bpc": 8 / step}
        for step in range(1, 9)
        for kind in ("train", "valid")
    ]
    plots.learning_curve(
        records, tmp_path / "curve.png", title="a title", levels={"zlib": 1.9, "lzma": 1.6}
    )
    picture = (tmp_path / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
