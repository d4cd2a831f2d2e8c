"""Tests of the measurements of long sequences: what the files have, and the script's pieces."""

import csv
import gzip
import math

import numpy as np
import pytest

import txl_jax
from benchmarks import long_sequences
from benchmarks.long_sequences import Reader, Repeat
from support import drawn_run
from txl_jax import ModelConfig, UserError

# With such large parameters, losses depend on what the model attends to.
TINY = ModelConfig(n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, init_std=0.5)
ORIGIN = {"machine": "a machine", "date": "2026-11-30", "versions": "1", "command": "python -m ..."}


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def peaks(method):
    """Returns the peak bytes of a method by number of tokens."""
    rows = rows_of(long_sequences.CSV)
    return {int(row["tokens"]): int(row["peak_bytes"]) for row in rows if row["method"] == method}


# The files


def test_a_streams_memory_does_not_depend_on_its_length():
    assert max(peaks("stream")) >= 2**20
    assert len(set(peaks("stream").values())) == 1


@pytest.mark.parametrize(("method", "least_growth"), [("window", 2.5), ("stored", 3.9)])
def test_a_windows_memory_grows_with_its_length(method, least_growth):
    """Each length is four times the one before. Stored scores grow with its square."""
    by_length = peaks(method)
    for tokens, peak in by_length.items():
        if 4 * tokens in by_length:
            assert by_length[4 * tokens] > least_growth * peak


def test_only_windows_were_not_scored():
    without_time = [row for row in rows_of(long_sequences.CSV) if row["processor_seconds"] == ""]
    assert without_time
    for row in without_time:
        assert row["method"] in ("window", "stored")
        assert "--compile_only" in row["command"]


# Cost


@pytest.mark.parametrize("method", ["stream", "window", "stored"])
def test_all_ways_to_read_are_the_same_model(method):
    """With a memory of the whole sequence, its segments attend to all that a window attends to."""
    sequence = np.random.default_rng(0).integers(0, long_sequences.SYMBOLS, 32)
    segment_len = 8 if method == "stream" else 32
    mem_len = 32 if method == "stream" else 0

    reader = Reader(TINY, method, segment_len=segment_len, mem_len=mem_len)

    expected = Reader(TINY, "stored", segment_len=32, mem_len=0).nats(sequence)
    assert reader.nats(sequence) == pytest.approx(expected, rel=1e-5)


def test_a_streams_memory_is_cut():
    """Else a memory of the whole sequence would make no difference."""
    sequence = np.random.default_rng(0).integers(0, long_sequences.SYMBOLS, 32)
    short = Reader(TINY, "stream", segment_len=8, mem_len=8).nats(sequence)
    long = Reader(TINY, "stream", segment_len=8, mem_len=32).nats(sequence)
    assert short != pytest.approx(long, rel=1e-3)


def test_a_part_of_a_segment_is_an_error():
    with pytest.raises(UserError, match="multiple of 8"):
        long_sequences.measure_cost(
            "stream", 12, segment_len=8, mem_len=8, calls=0, command="a command"
        )


def test_bytes_include_temporary_arrays():
    """Scores of 2 heads x 256 x 256 are half a megabyte, which arguments and results have not."""
    small = Reader(TINY, "stored", segment_len=64, mem_len=0).peak_bytes
    large = Reader(TINY, "stored", segment_len=256, mem_len=0).peak_bytes
    assert large - small > 500_000


def test_a_sequence_that_is_only_compiled_has_no_time(tmp_path, capsys):
    path = tmp_path / "costs.csv"
    words = ["cost", "window", "128", f"--csv={path}"]

    assert long_sequences.main([*words, "--calls=1"]) == 0
    assert long_sequences.main([*words, "--compile_only"]) == 0

    scored, compiled = rows_of(path)
    assert float(scored["processor_seconds"]) > 0
    assert compiled["processor_seconds"] == ""
    assert scored["peak_bytes"] == compiled["peak_bytes"]
    assert (compiled["segment_len"], compiled["mem_len"]) == ("128", "0")
    assert "compiled only" in capsys.readouterr().out


def test_a_table_has_a_line_for_each_length():
    rows = [
        {"method": "stream", "tokens": "1024", "peak_bytes": "2600000", "processor_seconds": "0.1"},
        {"method": "stored", "tokens": "1024", "peak_bytes": "1234567890", "processor_seconds": ""},
        {"method": "window", "tokens": "512", "peak_bytes": "1000000", "processor_seconds": "2"},
    ]

    _, _, *lines = long_sequences.table(rows)

    assert lines == ["| 512 |  |  | 1 | 2 |  |  |", "| 1,024 | 3 | 0.1 |  |  | 1,235 |  |"]


# Repeats


def test_records_of_a_fasta_file(tmp_path):
    path = tmp_path / "genome.fa"
    path.write_text(">chr1\ta description\nACGT\nacgtN\n>chr2\nRA\r\n\n>empty\n")

    records = dict(long_sequences.read_fasta(path))

    assert list(records) == ["chr1", "chr2"]
    assert records["chr1"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert records["chr2"].tolist() == [4, 0]


def test_a_compressed_fasta_file_is_an_error(tmp_path):
    path = tmp_path / "genome.fa.gz"
    path.write_bytes(gzip.compress(b">chr1\nACGT\n"))
    with pytest.raises(UserError, match="Decompress"):
        list(long_sequences.read_fasta(path))


def test_repeats_of_one_record(tmp_path):
    path = tmp_path / "repeats.bed"
    # Without scored symbols, a repeat has no mean.
    path.write_text("# header\nchr1\t5\t99\t3\nchr2\t1\t2\t4\nchr1\t5\t9\t3\textra\n\n")
    assert long_sequences.read_bed(path, "chr1") == [Repeat(5, 99, 3)]

    path.write_text("chr1\t5\t99\n")
    with pytest.raises(UserError, match="line 1"):
        long_sequences.read_bed(path, "chr1")


def test_bits_are_means_over_second_copies_by_their_distance(monkeypatch):
    """The loss of symbol t of the record is t nats, in bits without the factor."""
    monkeypatch.setattr(long_sequences, "UNSCORED", 2)
    nats = np.arange(1, 100) * math.log(2)
    repeats = [Repeat(10, 14, 5), Repeat(20, 25, 5), Repeat(30, 34, 8), Repeat(40, 44, 8)]

    near, far = long_sequences.repeat_rows(
        nats, repeats, limits=(5, 8, 9), n_layer=2, mem_len=6, **ORIGIN
    )

    # Symbols 12, 13 and 22, 23, 24.
    assert (near.nearest, near.farthest, near.repeats, near.symbols) == (5, 8, 2, 5)
    assert near.bits == pytest.approx((12 + 13 + 22 + 23 + 24) / 5)
    assert near.standard_error == pytest.approx((23 - 12.5) / 2)
    assert far.bits == pytest.approx((32 + 33 + 42 + 43) / 4)


def test_an_interval_with_one_repeat_has_no_row(monkeypatch):
    monkeypatch.setattr(long_sequences, "UNSCORED", 1)
    repeats = [Repeat(10, 14, 5)]
    columns = {"limits": (1, 9), "n_layer": 2, "mem_len": 6, **ORIGIN}
    assert long_sequences.repeat_rows(np.zeros(20), repeats, **columns) == []


def test_another_memory_changes_the_losses(tmp_path):
    """The same parameters with a shorter memory. Losses differ only beyond its reach."""
    model = txl_jax.load(drawn_run.of_words(tmp_path / "run").path)
    document = drawn_run.TEXT[:400]
    shorter = long_sequences.with_mem_len(model, 1)

    [expected] = model.score([document], per_token=True)
    [losses] = shorter.score([document], per_token=True)

    assert shorter.config.eval.mem_len == 1
    assert np.abs(losses - expected).max() > 1e-4
