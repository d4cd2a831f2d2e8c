"""Tests of safetensors files: written and read again, by the package too, corrupted ones, and the
memory it takes.
"""

import json
import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support import foreign
from txl_jax.errors import CheckpointError
from txl_jax.interop import leaves, portable
from txl_jax.interop import safetensors as ours
from txl_jax.interop.leaves import Leaf
from txl_jax.runs import convert as conversion
from txl_jax.runs.convert import TargetFormat

TENSORS = {
    "small": np.arange(3, dtype=np.uint8),
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "reversed": np.arange(4, dtype=np.float16)[::-1],
    "brain": np.arange(5, dtype=ml_dtypes.bfloat16),
    "nothing": np.zeros((0, 7), np.float64),
    "number": np.array(-4, dtype=np.int64),
}


def check_equal(tensors, expected):
    """Asserts that tensors (arrays or leaves) have the same names, shapes, dtypes and values."""
    assert len(tensors) == len(expected)
    assert set(tensors) == set(expected)
    for name, value in expected.items():
        tensor = tensors[name]
        array = tensor.read() if isinstance(tensor, Leaf) else tensor
        assert tensor.dtype == value.dtype, name
        assert tensor.shape == value.shape, name
        np.testing.assert_array_equal(array, value, err_msg=name)


def test_what_is_written_is_read_back(tmp_path):
    """An array, or a part of it. The arrays are read-only."""
    path = tmp_path / "a.safetensors"
    ours.write(path, leaves.from_tree(TENSORS))

    leaves_read = ours.read(path)

    check_equal(leaves_read, TENSORS)
    np.testing.assert_array_equal(leaves_read["matrix"].part(1), TENSORS["matrix"][1])
    with pytest.raises(ValueError, match="read-only"):
        leaves_read["matrix"].read()[0] = 1


def test_the_package_reads_what_we_write_and_the_reverse(tmp_path):
    path = tmp_path / "a.safetensors"
    # numpy has no bfloat16.
    tensors = {name: value for name, value in TENSORS.items() if name != "brain"}

    ours.write(path, leaves.from_tree(tensors))
    check_equal(load_file(path), tensors)

    save_file({name: value.copy() for name, value in tensors.items()}, path)
    check_equal(ours.read(path), tensors)


class MemoryOfConversions:
    """What conversions have in memory: the host's peak while files are written, and JAX's arrays
    when the parameters of a loss are placed.
    """

    def __init__(self, monkeypatch):
        self.peaks = []
        self.live = []
        self.before = live_bytes()
        self.losses = conversion._losses
        self.place = portable.place
        monkeypatch.setattr(conversion, "_losses", self.losses_after_peak)
        monkeypatch.setattr(portable, "place", self.place_and_count)

    def convert(self, source, target, to_format):
        tracemalloc.start()
        conversion.convert(source, target, to_format=to_format, log=lambda line: None)
        assert not tracemalloc.is_tracing(), "no losses were computed"

    def losses_after_peak(self, *arguments, **options):
        if tracemalloc.is_tracing():  # The first of two losses. JAX has compiled nothing yet.
            self.peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return self.losses(*arguments, **options)

    def place_and_count(self, *arguments):
        placed = self.place(*arguments)
        self.live.append(live_bytes() - self.before)
        return placed


def test_a_conversion_has_an_array_at_a_time_in_memory_and_the_parameters_once(
    tmp_path, monkeypatch
):
    """From Hugging Face's format and back.

    Losses, of the source and of the result, need all parameters.
    """
    config, params = foreign.make("hf", d_model=256, n_head=4, d_head=64, d_inner=256)
    foreign.huggingface_folder(tmp_path / "theirs", config, params)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    del params
    memory = MemoryOfConversions(monkeypatch)

    memory.convert(tmp_path / "theirs", tmp_path / "ours", TargetFormat.NATIVE)
    memory.convert(tmp_path / "ours", tmp_path / "back", TargetFormat.HUGGINGFACE)

    # Two conversions, each with a loss of the source and of the result.
    assert len(memory.peaks) == 2
    assert len(memory.live) == 4
    # An array may be in memory a few times, for example transposed and as bytes.
    assert 4 * max(sizes) < 0.6 * sum(sizes), "the bound says nothing about such a model"
    assert max(memory.peaks) < 4 * max(sizes)
    assert max(memory.live) < 1.1 * sum(sizes)


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_leaf_that_reads_as_another_array_is_an_error(tmp_path):
    leaf = Leaf((2,), np.dtype(np.float32), lambda _: np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"\ba\b.*\(3,\).*\(2,\)"):
        ours.write(tmp_path / "a", {"a": leaf})


def test_a_dtype_that_the_format_lacks_is_an_error(tmp_path):
    tensors = leaves.from_tree({"a": np.zeros(3, np.complex64)})
    with pytest.raises(ValueError, match="complex64"):
        ours.write(tmp_path / "a", tensors)


def with_header(header: bytes) -> bytes:
    """A file with this header and two numbers of float32."""
    return len(header).to_bytes(8, "little") + header + b"\0" * 8


def with_entry(**changes) -> bytes:
    """A file with one tensor, some of whose entries are changed."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return with_header(json.dumps({"a": entry}).encode())


A_NAME_TWICE = (
    b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
    b'"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"# A title and some text of a page", id="text"),
        pytest.param(with_header(A_NAME_TWICE), id="a name twice"),
        pytest.param(with_entry(dtype="F8_E4M3", shape=[8]), id="unknown dtype"),
        # The package checks sizes and places.
        pytest.param(with_entry(shape=[3]), id="other size"),
    ],
)
def test_a_corrupted_file_is_named(tmp_path, content):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        ours.read(path)


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        ours.read(path)
