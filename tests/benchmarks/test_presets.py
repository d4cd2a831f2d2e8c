"""Tests of the table of presets: what the file has, and how its rows become hours and dollars."""

import dataclasses

import pytest

from benchmarks import presets
from benchmarks.presets import Row
from txl_jax.config import Remat

ROW = Row(
    machine="a machine",
    date="2026-11-30",
    versions="1, 2",
    command="python -m ...",
    preset="enwik8_12l",
    tpu="v5e",
    slice="v5e:2x2",
    chips=4,
    remat="dots",
    parameters=41_055_436,
    steps=36_000,
    training_flops=1.52e18,
    peak_bytes=3_840_000_000,
    memory_bytes=17_200_000_000,
    matmul_seconds=0.02,
    memory_seconds=0.025,
    integer_seconds=0.001,
    roofline_seconds=0.0375,
    sent_bytes=0.0,
    assumed_loops=0,
)


def test_the_file_has_every_published_preset():
    """Each was compiled once for the TPU of the README's table, for chips that it fits on."""
    rows = presets.read_rows(presets.CSV)

    on_v5e = [row for row in rows if row.tpu == "v5e"]
    assert sorted(row.preset for row in on_v5e) == presets.published_presets()
    for row in on_v5e:
        config = presets.preset(row.preset)
        assert row.steps == config.train.steps, row.preset
        assert row.peak_bytes <= row.memory_bytes, row.preset
        assert row.bound_seconds <= row.roofline_seconds, row.preset
        assert f"--flagfile={row.preset} " in row.command
        assert f"--topology={row.slice} " in row.command


def test_presets_of_this_package_are_not_published_ones():
    published = presets.published_presets()
    assert "enwik8_24l" in published
    assert not {"own_bytes", "small"} & set(published)


def test_hours_and_cost_are_of_all_chips():
    """36,000 steps of 0.025 s are a quarter of an hour, on four chips a chip hour."""
    assert ROW.bound_seconds == 0.025
    assert ROW.chip_hours(ROW.bound_seconds) == pytest.approx(1.0)

    *_, line = presets.table([ROW], price=2.0)

    assert line == ("| `enwik8_12l` | 41M | 1.5e18 | 4 | 3.8 GB | 1.0 | 1.5 | $2.00 to $3.00 |")


def test_a_table_without_a_price_has_no_cost():
    headings, rule, line = presets.table([ROW], price=None)
    assert headings.count("|") == rule.count("|") == line.count("|") == 8
    assert "$" not in headings + line


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.1849, "0.18"), (1.96, "2.0"), (9.96, "10"), (19.4, "19"), (1064.0, "1,100")],
)
def test_estimates_have_two_digits(number, text):
    assert presets.two_digits(number) == text


def test_rows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "presets.csv"
    other = dataclasses.replace(ROW, preset="ptb", tpu="v6e")
    assert presets.read_rows(path) == []

    presets.add_row(path, ROW)
    presets.add_row(path, other)

    assert presets.read_rows(path) == [ROW, other]


def test_only_presets_without_a_row_are_compiled(tmp_path, monkeypatch):
    """A row for another TPU does not count."""
    path = tmp_path / "presets.csv"
    presets.add_row(path, ROW)
    presets.add_row(path, dataclasses.replace(ROW, preset="ptb", tpu="v6e"))
    compiled = []

    def measure_preset(name, tpu):
        compiled.append(name)
        return dataclasses.replace(ROW, preset=name, tpu=tpu)

    monkeypatch.setattr(presets, "measure_preset", measure_preset)
    monkeypatch.setattr(presets.topologies, "set_environment", lambda: None)
    words = ["measure", "enwik8_12l", "ptb", f"--csv={path}"]
    for _ in range(2):
        assert presets.main(words) == 0

    assert compiled == ["ptb"]


def test_the_command_of_a_row_has_what_differs_from_the_preset():
    changes = {"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 1, "model.remat": Remat.FULL}
    assert presets.command_of("lm1b_large", "v5e:2x2", changes) == (
        "python -m experiments.bench.estimate --flagfile=lm1b_large --model.dtype=bfloat16 "
        "--topology=v5e:2x2 --tasks=training --mesh.fsdp=4 --model.remat=full"
    )
