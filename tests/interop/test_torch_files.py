"""Tests of reading PyTorch's files without torch: files written by hand, and by torch if it is
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
    """Zeros and ones in random order, which every dtype has."""
    return np.random.default_rng(5).integers(0, 2, shape).astype(dtype)


def tensors(path):
    """The tensors of a file's state dict."""
    return state_dict.of(torch_files.read(path))


def check_equal(leaves, expected):
    """Asserts that tensors have these names in this order, dtypes, shapes and values."""
    assert len(leaves) == len(expected)
    assert list(leaves) == list(expected)
    for name, value in expected.items():
        assert leaves[name].dtype == value.dtype, name
        assert leaves[name].shape == value.shape, name
        np.testing.assert_array_equal(leaves[name].read(), value, err_msg=name)


@by_format
def test_tensors_of_all_dtypes(write, tmp_path):
    expected = {str(dtype): array((3, 4), dtype) for dtype in torch_bytes.STORAGES}
    check_equal(tensors(write(tmp_path / "a.bin", expected)), expected)


@by_format
def test_views_share_a_storage(write, tmp_path):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = {
        "whole": base,
        "transposed": base.T,
        "part": base[1:3, 2:],
        "every other": base[::2, ::3],
        "one": base[2, 3:4],
        "number": base[1, 1:2].reshape(()),
        "empty": base[:0],
    }
    path = write(tmp_path / "a.bin", expected)

    leaves = tensors(path)
    check_equal(leaves, expected)
    assert not leaves["part"].read().flags.writeable

    root = torch_files.read(path).root
    assert root["whole"] != root["transposed"]
    assert root["whole"].storage is root["part"].storage


WEIGHTS = {"a.weight": array((2, 3)), "a.bias": array(2)}
TRAINING = {"state_dict": WEIGHTS, "optimizer": {"state": {0: {"exp_avg": array((2, 3))}}}}
ARGUMENTS = Object(Name("argparse", "Namespace"), {"lr": 0.1})
ITEMS = [list(item) for item in WEIGHTS.items()]


@by_format
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(WEIGHTS, id="state_dict"),
        pytest.param(TRAINING | {"epoch": 3}, id="state_dict="),
        pytest.param({"model_state": WEIGHTS, "args": ARGUMENTS}, id="model_state="),
        pytest.param({"model": {"state_dict": WEIGHTS}}, id="model="),
        pytest.param({**WEIGHTS, "step": 3}, id="with a number"),
        pytest.param(Call(Name("collections", "OrderedDict"), (ITEMS,)), id="OrderedDict"),
    ],
)
def test_state_dicts_and_what_is_around_them(write, value, tmp_path):
    check_equal(tensors(write(tmp_path / "a.pt", value)), WEIGHTS)


def language_model():
    """A module with a linear layer under two names, and a buffer that is not saved.

    Classes are named as persistent ids with their source, as in the older format.
    """
    linear = torch_bytes.module(
        "torch.nn.modules.linear.Linear", parameters={"weight": WEIGHTS["a.weight"]}
    )
    source = ("module", linear.cls, "linear.py", "import os; os.system('touch marker')")
    linear.cls = Persistent(source)
    layers = torch_bytes.module(
        "torch.nn.modules.container.ModuleList", **{"0": linear, "1": linear}
    )
    model = torch_bytes.module(
        "mem_transformer.MemTransformerLM",
        parameters={"u": WEIGHTS["a.bias"]},
        buffers={"kept": array(3), "left": array(3), "none": None},
        layers=layers,
        n_head=10,
    )
    model.attributes["_non_persistent_buffers_set"] = Call(Name("__builtin__", "set"), (["left"],))
    return model


@by_format
@pytest.mark.parametrize("replicas", [False, True])
def test_a_module_gives_the_names_of_its_state_dict(write, replicas, tmp_path):
    """Its source does not run."""
    root = language_model()
    if replicas:
        root = torch_bytes.module("torch.nn.parallel.DataParallel", module=root)
    file = torch_files.read(write(tmp_path / "model.pt", root))

    leaves = state_dict.of(file)
    assert list(leaves) == ["u", "kept", "layers.0.weight", "layers.1.weight"]
    assert leaves["layers.0.weight"] is leaves["layers.1.weight"]
    np.testing.assert_array_equal(leaves["layers.1.weight"].read(), WEIGHTS["a.weight"])

    record = state_dict.model_in(file.root)
    assert isinstance(record, Record)
    assert record.attributes()["n_head"] == 10
    assert os.listdir(tmp_path) == ["model.pt"]


def test_modules_that_share_children_are_not_walked_without_end(tmp_path):
    """Levels that hold the next one twice, 32 deep, are 2^32 modules."""
    inner = torch_bytes.module("a.B", parameters={"w": array(2)})
    code = torch_bytes.Writer(legacy=True).code
    nested = code(inner)
    # Each level is stored in the memo, and taken from there as the children 0 and 1 of the next.
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
    # The module in the middle is stored as number 5 of the memo, and taken from there.
    middle = start + b"}" + code("_modules") + b"}" + code(child) + inner + b"ssb" + b"q\x05"
    children = code("0") + middle
    for number in range(1, names):
        children += code(str(number)) + b"h\x05"
    return b"\x80\x02" + start + b"}" + code("_modules") + b"}(" + children + b"usb."


# 250,000 names of tensors, and 500 names of 8,000 characters, from files of 11 and 14 kB.
@pytest.mark.parametrize(
    "data",
    [shared_module(500, child="a", names=500), shared_module(1, child="N" * 8000, names=500)],
    ids=["many tensors", "a long name"],
)
def test_names_of_shared_modules_are_not_longer_than_the_file(data, tmp_path):
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.pt: .*names"):
        tensors(tmp_path / "a.pt")


def numbered(arrays):
    """A state dict of layers with these arrays."""
    return {f"layers.{k}": value for k, value in enumerate(arrays)}


def test_a_matrix_under_a_few_names_is_one_tensor(tmp_path):
    """Published models that repeat one layer have up to 24 of them."""
    base = np.arange(4096, dtype=np.float32)
    path = torch_bytes.write_zip(tmp_path / "a.pt", numbered([base] * 24))
    assert len({id(leaf) for leaf in tensors(path).values()}) == 1


def test_tensors_share_numbers_only_a_few_times(tmp_path):
    """A file of one matrix under 2,000 names, or in 2,000 views, would become 2,000 times as many
    numbers.
    """
    base = np.arange(4096, dtype=np.float32)
    for views in ([base] * 2000, [base[k:] for k in range(2000)]):
        path = torch_bytes.write_zip(tmp_path / "a.pt", numbered(views))
        with pytest.raises(UserError, match=r"a\.pt: its tensors share numbers"):
            tensors(path)


STORAGE_ID = ("storage", Name("torch", "FloatStorage"), "0", "cpu", 6)
LONG_SIZES = [{"shape": (255,) * 50_000}, {"strides": (1,) * 50_000}, {"shape": (0, 1 << 64)}]


@pytest.mark.parametrize("sizes", LONG_SIZES, ids=["shape", "strides", "a long size"])
def test_a_tensor_has_few_and_short_sizes(sizes, tmp_path):
    """The product of a million sizes takes minutes."""
    path = torch_bytes.write_zip(tmp_path / "a.pt", {"b": array(6), **tensor_of(**sizes)})
    with pytest.raises(UserError, match=r"corrupted"):
        torch_files.read(path)


# At most 8 parts, and names of at most 200 characters.
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((*STORAGE_ID, None, None, None, None), id="many parts"),
        pytest.param((*STORAGE_ID[:2], "0" * 201, *STORAGE_ID[3:]), id="a long part"),
    ],
)
def test_a_persistent_id_is_short(parts, tmp_path):
    """Each use of a long one would copy it."""
    path = torch_bytes.write_zip(tmp_path / "a.pt", {"b": Persistent(parts)})
    with pytest.raises(UserError, match=r"persistent id|too long"):
        torch_files.read(path)


def move_directory(path):
    """Moves the directory of an archive back by a copy of a storage's header, which becomes the
    archive's comment.
    """
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
        entries = archive.infolist()
        storage = archive.getinfo("archive/data/0")
    # Headers, entries of the directory, and the record at its end have 30, 46 and 22 bytes besides
    # names. An entry has its header's offset at byte 42, and the record has the directory's offset
    # and the comment's length at byte 16.
    header_len = 30 + len(storage.filename)
    header = data[storage.header_offset : storage.header_offset + header_len]
    comment = header + bytes(100)
    moved = storage.header_offset + len(comment)

    at = directory
    for entry in entries:
        if entry.filename != storage.filename:
            data[at + 42 : at + 46] = struct.pack("<I", entry.header_offset + moved)
        at += 46 + len(entry.filename)
    data[at + 16 : at + 22] = struct.pack("<IH", directory + moved, len(comment))
    path.write_bytes(data + comment)


def test_an_archive_whose_directory_was_moved(tmp_path):
    """`zipfile` then takes an entry to begin before the file.

    From the end, there is a header in the comment.
    """
    path = torch_bytes.write_zip(tmp_path / "a.pt", {"a": array(6)})
    move_directory(path)
    with pytest.raises(UserError, match=r"a\.pt .*before the file"):
        tensors(path)


@by_format
@pytest.mark.parametrize(
    ("value", "named"),
    [
        pytest.param({}, r"\{\}", id="an empty dict"),
        pytest.param([1], r"\[1\]", id="a list"),
        pytest.param(
            Object(Name("data_utils", "Corpus"), {"a": 1}), r"data_utils\.Corpus", id="a corpus"
        ),
        pytest.param(array(3), "Tensor", id="a tensor"),
    ],
)
def test_a_file_without_weights_is_an_error_that_shows_its_content(write, value, named, tmp_path):
    path = write(tmp_path / "a.pt", value)
    with pytest.raises(UserError, match=rf"a\.pt .*{named}"):
        tensors(path)


def tensor_of(begin=0, shape=(2, 3), strides=(3, 1), numel=6, kind="FloatStorage", view=None):
    """A tensor of a storage of 6 numbers, with some of its sizes changed."""
    storage = Persistent(("storage", Name("torch", kind), "0", "cpu", numel, view))
    arguments = (storage, begin, shape, strides, False, None)
    return {"a": Call(Name("torch._utils", "_rebuild_tensor_v2"), arguments)}


NOT_COMPLETE = r"a\.pt(: the pickle.* corrupted| is not a complete torch.save file)"


# Places outside of the storage, strides of 0 that repeat its numbers, more than 32 sizes and
# strides, another number of sizes than of strides, and storages of an unknown kind or that are
# views of another one.
@by_format
@pytest.mark.parametrize(
    "sizes",
    [
        {"begin": 1},
        {"begin": -1},
        {"numel": 1 << 60},
        {"strides": (4, 1)},
        {"strides": (-3, 1)},
        {"shape": (3, 3)},
        {"shape": (1 << 60, 1), "strides": (0, 0)},
        {"shape": (1,) * 40, "strides": (1,) * 40},
        {"shape": (2, 3, 1)},
        {"kind": "ComplexStorage"},
        {"view": ("0", 0, 6)},
    ],
    ids=str,
)
def test_a_tensor_beyond_its_storage_is_an_error(write, sizes, tmp_path):
    base = np.arange(6, dtype=np.float32)
    leaves = tensors(write(tmp_path / "a.pt", {"b": base, **tensor_of()}))
    np.testing.assert_array_equal(leaves["a"].read(), base.reshape(2, 3))

    path = write(tmp_path / "a.pt", {"b": base, **tensor_of(**sizes)})
    with pytest.raises(UserError, match=NOT_COMPLETE):
        torch_files.read(path)


@by_format
def test_a_truncated_file_is_an_error(write, tmp_path):
    path = write(tmp_path / "a.pt", WEIGHTS)
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):  # At every seventh byte, to take less time.
        path.write_bytes(whole[:end])
        with pytest.raises(UserError, match=r"a\.pt"):
            tensors(path)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x00" * 100, b"\x89HDF\r\n", b"version https://git-lfs"]
)
def test_other_files_are_an_error(data, tmp_path):
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.bin"):
        torch_files.read(tmp_path / "a.bin")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"a\.bin"):
        torch_files.read(tmp_path / "a.bin")


def test_a_compressed_archive_is_an_error(tmp_path):
    path = torch_bytes.write_zip(tmp_path / "a.bin", WEIGHTS)
    packed_path = tmp_path / "b.bin"
    with (
        zipfile.ZipFile(path) as archive,
        zipfile.ZipFile(packed_path, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    with pytest.raises(UserError, match="compressed"):
        torch_files.read(packed_path)


def test_an_archive_of_other_files_is_an_error(tmp_path):
    path = tmp_path / "a.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("weights.txt", "1")
    with pytest.raises(UserError, match=r"data\.pkl"):
        torch_files.read(path)


def test_a_storage_of_another_length_is_an_error(tmp_path):
    path = torch_bytes.write_legacy(tmp_path / "a.bin", {"a": array(3)})
    data = path.read_bytes()
    # The length, of 8 bytes, is before the three numbers of 4 bytes.
    path.write_bytes(data[:-20] + struct.pack("<q", 4) + data[-12:])
    with pytest.raises(UserError, match="storage 0"):
        torch_files.read(path)


def torch_tensors(torch):
    """Tensors of all dtypes, and views."""
    base = torch.randn(4, 6)
    made = {
        "base": base,
        "view": base[1:, ::2].t(),
        "bool": base > 0,
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
    }
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64):
        made[str(dtype)] = base.to(dtype)
    return made


def torch_layers(torch):
    """Modules with a transposed parameter, a list of parameters, and a buffer that is not saved."""
    base = torch.randn(4, 6)
    layers = torch.nn.ModuleList(
        [torch.nn.Linear(3, 2), torch.nn.Embedding(4, 3), torch.nn.LayerNorm(3)]
    )
    layers[1].weight = torch.nn.Parameter(torch.randn(3, 4).t())
    layers.register_buffer("frequencies", torch.arange(3, dtype=torch.float64))
    layers.register_buffer("left", torch.arange(3), persistent=False)
    layers.u = torch.nn.ParameterList([torch.nn.Parameter(base[1]), torch.nn.Parameter(base[:, 2])])
    return layers


def optimizer_state(torch, layers):
    """The state of an optimizer after a step."""
    optimizer = torch.optim.Adam(layers.parameters())
    sum(parameter.sum() for parameter in layers.parameters()).backward()
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.nightly(part="huggingface")
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("legacy", [False, True])
def test_files_that_torch_writes(legacy, tmp_path):
    import torch

    torch.manual_seed(0)
    plain = torch_tensors(torch)
    layers = torch_layers(torch)
    whole = {
        "model_state": plain,
        "optimizer_state": optimizer_state(torch, layers),
        "args": {"lr": 0.1},
    }
    cases = [
        (plain, plain),
        (whole, plain),
        (layers, layers.state_dict()),
        ({"model": layers}, layers.state_dict()),
    ]
    for value, expected in cases:
        torch.save(value, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
        leaves = tensors(tmp_path / "a.pt")
        assert list(leaves) == list(expected)
        for name, tensor in expected.items():
            assert str(tensor.dtype) == f"torch.{leaves[name].dtype}", name
            values = np.asarray(leaves[name].read(), np.float64)
            exact = tensor.detach().double().numpy()
            np.testing.assert_array_equal(values, exact, err_msg=name)
