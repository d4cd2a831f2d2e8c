"""Tests of reading PyTorch's files without torch: files written by hand, and by torch where that is
installed.
"""

import os
import struct
import zipfile

import numpy as np
import pytest

from support import torch_bytes
from support.torch_bytes import Call, Name, Object, Persistent, by_format
from txl_jax.errors import UserError
from txl_jax.interop import state_dict, torch_files
from txl_jax.interop.pickles import Record


def array(shape, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 2, shape).astype(dtype)


def tensors(path):
    return state_dict.of(torch_files.read(path))


def check_equal(found, expected):
    assert list(found) == list(expected) and len(found) == len(expected)
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        np.testing.assert_array_equal(found[name].read(), value, err_msg=name)


@by_format
def test_tensors_of_all_types_and_views_that_share_a_storage(write, tmp_path):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = {
        "whole": base,
        "transposed": base.T,
        "part": base[1:3, 2:],
        "every other": base[::2, ::3],
        "one": base[2, 3:4],
        "number": base[1, 1:2].reshape(()),
        "empty": base[:0],
        **{str(dtype): array((3, 4), dtype) for dtype in torch_bytes.STORAGES},
    }
    path = write(tmp_path / "a.bin", expected)
    found = tensors(path)
    check_equal(found, expected)
    assert not found["part"].read().flags.writeable
    root = torch_files.read(path).root
    assert root["whole"] != root["transposed"]
    assert root["whole"].storage is root["part"].storage


WEIGHTS = {"a.weight": array((2, 3)), "a.bias": array(2)}
AROUND = {
    "state_dict": WEIGHTS,
    "state_dict=": {
        "state_dict": WEIGHTS,
        "optimizer": {"state": {0: {"exp_avg": array((2, 3))}}},
        "epoch": 3,
    },
    "model_state=": {
        "model_state": WEIGHTS,
        "args": Object(Name("argparse", "Namespace"), {"lr": 0.1}),
    },
    "model=": {"model": {"state_dict": WEIGHTS}},
    "with a number": {**WEIGHTS, "step": 3},
    "OrderedDict": Call(
        Name("collections", "OrderedDict"), ([list(item) for item in WEIGHTS.items()],)
    ),
}


@by_format
@pytest.mark.parametrize("value", AROUND.values(), ids=AROUND)
def test_state_dicts_and_what_is_around_them(write, value, tmp_path):
    found = tensors(write(tmp_path / "a.pt", value))
    check_equal(found, WEIGHTS)


@by_format
@pytest.mark.parametrize("replicas", [False, True])
def test_a_module_gives_the_names_of_its_state_dict(write, replicas, tmp_path):
    """Classes are named as persistent ids in the older format, with their source."""
    linear = torch_bytes.module(
        "torch.nn.modules.linear.Linear", parameters={"weight": WEIGHTS["a.weight"]}
    )
    source = ("module", linear.cls, "linear.py", "import os; os.system('touch marker')")
    linear.cls = Persistent(source)
    model = torch_bytes.module(
        "mem_transformer.MemTransformerLM",
        parameters={"u": WEIGHTS["a.bias"]},
        buffers={"kept": array(3), "left": array(3), "none": None},
        layers=torch_bytes.module(
            "torch.nn.modules.container.ModuleList", **{"0": linear, "1": linear}
        ),
        n_head=10,
    )
    model.attributes["_non_persistent_buffers_set"] = Call(Name("__builtin__", "set"), (["left"],))
    root = torch_bytes.module("torch.nn.parallel.DataParallel", module=model) if replicas else model
    path = write(tmp_path / "model.pt", root)
    file = torch_files.read(path)
    found = state_dict.of(file)
    assert list(found) == ["u", "kept", "layers.0.weight", "layers.1.weight"]
    assert found["layers.0.weight"] is found["layers.1.weight"]
    np.testing.assert_array_equal(found["layers.1.weight"].read(), WEIGHTS["a.weight"])
    record = state_dict.model_in(file.root)
    assert isinstance(record, Record) and record.attributes()["n_head"] == 10
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_module_that_holds_itself_ends(tmp_path):
    """Two levels that hold the next one twice, 32 deep, are 2^32 modules."""
    inner = torch_bytes.module("a.B", parameters={"w": array(2)})
    code = torch_bytes.Writer(legacy=True).code
    nested = code(inner)
    for _ in range(32):
        parts = code({"_parameters": {}, "_buffers": {}})
        children = b"X\x08\x00\x00\x00_modules}(X\x01\x00\x00\x000h\x00X\x01\x00\x00\x001h\x00us"
        nested += b"q\x000ca\nB\n)\x81" + parts + children + b"b"
    (tmp_path / "a.pt").write_bytes(b"\x80\x02" + nested + b".")
    with pytest.raises(UserError, match=r"modules|tensor"):
        tensors(tmp_path / "a.pt")


def shared_module(count: int, *, child: str, names: int) -> bytes:
    """A pickled module that is the child of `names` others' names and has, behind `child`, `count`
    tensors of None.
    """
    code = torch_bytes.Writer(legacy=True).code
    start = b"ca\nB\n)\x81"
    parameters = {str(number): None for number in range(count)}
    inner = start + code({"_parameters": parameters}) + b"b"
    middle = start + b"}" + code("_modules") + b"}" + code(child) + inner + b"ssb" + b"q\x05"
    others = b"".join(code(str(number)) + b"h\x05" for number in range(1, names))
    return (
        b"\x80\x02"
        + start
        + b"}"
        + code("_modules")
        + b"}("
        + code("0")
        + middle
        + others
        + b"usb."
    )


@pytest.mark.parametrize(
    "data",
    [shared_module(500, child="a", names=500), shared_module(1, child="N" * 8000, names=500)],
    ids=["many tensors", "a long name"],
)
def test_names_of_shared_modules_are_not_longer_than_the_file(data, tmp_path):
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.pt: .*names"):
        tensors(tmp_path / "a.pt")


def test_tensors_share_numbers_a_few_times(tmp_path):
    """A file of one matrix under 2,000 names, or in 2,000 views, would become 2,000 times as many
    numbers.
    """
    base = np.arange(4096, dtype=np.float32)
    path = torch_bytes.write_zip(tmp_path / "a.pt", {f"layers.{k}": base for k in range(24)})
    assert len({id(leaf) for leaf in tensors(path).values()}) == 1
    for views in ([base] * 2000, [base[k:] for k in range(2000)]):
        torch_bytes.write_zip(path, {f"layers.{k}": view for k, view in enumerate(views)})
        with pytest.raises(UserError, match=r"a\.pt: its tensors share numbers"):
            tensors(path)


LONG_SIZES = [{"shape": (255,) * 50_000}, {"strides": (1,) * 50_000}, {"shape": (0, 1 << 64)}]


@pytest.mark.parametrize("sizes", LONG_SIZES, ids=["shape", "strides", "a long size"])
def test_a_tensor_has_few_and_short_sizes(sizes, tmp_path):
    """The product of a million sizes takes minutes."""
    with pytest.raises(UserError, match=r"corrupted"):
        torch_files.read(
            torch_bytes.write_zip(tmp_path / "a.pt", {"b": array(6), **tensor_of(**sizes)})
        )


def test_a_persistent_id_is_short(tmp_path):
    """Each use of a long one would copy it."""
    key = ("storage", Name("torch", "FloatStorage"), "0", "cpu", 6)
    for parts in (key + (None,) * 4, (*key[:2], "0" * 201, *key[3:])):
        with pytest.raises(UserError, match=r"persistent id|too long"):
            torch_files.read(torch_bytes.write_zip(tmp_path / "a.pt", {"b": Persistent(parts)}))


def test_an_archive_whose_directory_was_moved(tmp_path):
    """`zipfile` then takes an entry to begin before the file.

    From the end, there is a header in the comment.
    """
    path = torch_bytes.write_zip(tmp_path / "a.pt", {"a": array(6)})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        directory, entries = archive.start_dir, archive.infolist()
    moved = entry_of_storage = 0
    comment = b""
    for entry in entries:
        if entry.filename == "archive/data/0":
            entry_of_storage = entry.header_offset
            comment = data[entry_of_storage : entry_of_storage + 30 + len(entry.filename)] + bytes(
                100
            )
            moved = entry_of_storage + len(comment)
    at = directory
    for entry in entries:
        if entry.header_offset != entry_of_storage:
            data[at + 42 : at + 46] = struct.pack("<I", entry.header_offset + moved)
        at += 46 + len(entry.filename)
    data[at + 16 : at + 22] = struct.pack("<IH", directory + moved, len(comment))
    path.write_bytes(data + comment)
    with pytest.raises(UserError, match=r"a\.pt .*before the file"):
        tensors(path)


@by_format
def test_a_file_without_weights_is_refused(write, tmp_path):
    corpus = Object(Name("data_utils", "Corpus"), {"a": 1})
    for value, message in (
        ({}, r"\{\}"),
        ([1], r"\[1\]"),
        (corpus, r"data_utils\.Corpus"),
        (array(3), "Tensor"),
    ):
        with pytest.raises(UserError, match=rf"a\.pt .*{message}"):
            tensors(write(tmp_path / "a.pt", value))


def tensor_of(begin=0, shape=(2, 3), strides=(3, 1), numel=6, kind="FloatStorage", view=None):
    """A tensor of a storage of 6 numbers, with some of its sizes wrong."""
    storage = Persistent(("storage", Name("torch", kind), "0", "cpu", numel, view))
    return {
        "a": Call(
            Name("torch._utils", "_rebuild_tensor_v2"),
            (storage, begin, shape, strides, False, None),
        )
    }


BEYOND = [
    {"begin": 1},
    {"begin": -1},
    {"numel": 1 << 60},
    {"strides": (4, 1)},
    {"strides": (-3, 1)},
    {"shape": (3, 3)},
]
BEYOND += [
    {"shape": (1 << 60, 1), "strides": (0, 0)},
    {"shape": (1,) * 40, "strides": (1,) * 40},
    {"shape": (2, 3, 1)},
]
BEYOND += [{"kind": "ComplexStorage"}, {"view": ("0", 0, 6)}]


@by_format
@pytest.mark.parametrize("sizes", BEYOND, ids=str)
def test_a_tensor_beyond_its_storage_is_refused(write, sizes, tmp_path):
    base = np.arange(6, dtype=np.float32)
    found = tensors(write(tmp_path / "a.pt", {"b": base, **tensor_of()}))
    np.testing.assert_array_equal(found["a"].read(), base.reshape(2, 3))
    with pytest.raises(
        UserError, match=r"a\.pt(: the pickle.* corrupted| is not a complete torch.save file)"
    ):
        torch_files.read(write(tmp_path / "a.pt", {"b": base, **tensor_of(**sizes)}))


@by_format
def test_a_truncated_file_is_refused(write, tmp_path):
    path = write(tmp_path / "a.pt", WEIGHTS)
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError, match=r"a\.pt"):
            tensors(path)


@pytest.mark.parametrize(
    "data", [None, b"", b"hello", b"\x00" * 100, b"\x89HDF\r\n", b"version https://git-lfs"]
)
def test_other_files_are_refused(data, tmp_path):
    if data is not None:
        (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.bin"):
        torch_files.read(tmp_path / "a.bin")


def test_other_archives_are_refused(tmp_path):
    path = torch_bytes.write_zip(tmp_path / "a.bin", WEIGHTS)
    with (
        zipfile.ZipFile(path) as archive,
        zipfile.ZipFile(tmp_path / "b.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    with pytest.raises(UserError, match="compressed"):
        torch_files.read(tmp_path / "b.bin")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.txt", "1")
    with pytest.raises(UserError, match=r"data\.pkl"):
        torch_files.read(path)
    path = torch_bytes.write_legacy(path, {"a": array(3)})
    data = path.read_bytes()
    path.write_bytes(data[:-20] + struct.pack("<q", 4) + data[-12:])
    with pytest.raises(UserError, match="storage 0"):  # Of another length.
        torch_files.read(path)


@pytest.mark.nightly(part="huggingface")
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("legacy", [False, True])
def test_files_that_torch_writes(legacy, tmp_path):
    import torch

    torch.manual_seed(0)
    base = torch.randn(4, 6)
    layers = torch.nn.ModuleList(
        [torch.nn.Linear(3, 2), torch.nn.Embedding(4, 3), torch.nn.LayerNorm(3)]
    )
    layers[1].weight = torch.nn.Parameter(torch.randn(3, 4).t())
    layers.register_buffer("frequencies", torch.arange(3, dtype=torch.float64))
    layers.register_buffer("left", torch.arange(3), persistent=False)
    layers.u = torch.nn.ParameterList([torch.nn.Parameter(base[1]), torch.nn.Parameter(base[:, 2])])
    expected = {
        "base": base,
        "view": base[1:, ::2].t(),
        **{
            str(dtype): base.to(dtype)
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64)
        },
        "bool": base > 0,
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
    }
    optimizer = torch.optim.Adam(layers.parameters())
    sum(parameter.sum() for parameter in layers.parameters()).backward()
    optimizer.step()
    whole = {
        "model_state": expected,
        "optimizer_state": optimizer.state_dict(),
        "args": {"lr": 0.1},
    }
    cases = [
        (expected, expected),
        (whole, expected),
        (layers, layers.state_dict()),
        ({"model": layers}, None),
    ]
    for value, names in cases:
        torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
        found = tensors(tmp_path / "a.pt")
        names = layers.state_dict() if names is None else names
        assert list(found) == list(names)
        for name, tensor in names.items():
            assert str(tensor.dtype) == f"torch.{found[name].dtype}"
            exact = tensor.detach().double().numpy()
            np.testing.assert_array_equal(
                np.asarray(found[name].read(), np.float64), exact, err_msg=name
            )
