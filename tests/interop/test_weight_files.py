"""Tests of which files are weights: recognized by their first bytes, the same for `load` and for a
conversion.
"""

import json
import re

import numpy as np
import pytest

import txl_jax
from support import foreign, torch_bytes
from txl_jax.errors import UserError
from txl_jax.interop import formats, leaves, original, safetensors, tensorflow, weight_files
from txl_jax.interop.original import Format
from txl_jax.interop.weight_files import FileKind
from txl_jax.runs.convert import convert
from txl_jax.runs.trained import holds_other_weights

TENSORS = {"a": np.zeros((2, 3), np.float32)}


def write_safetensors(path, tensors=TENSORS):
    safetensors.write(path, leaves.from_tree(tensors))
    return path


KINDS = {
    "safetensors": (write_safetensors, FileKind.SAFETENSORS),
    "zip": (lambda path: torch_bytes.write_zip(path, TENSORS), FileKind.TORCH),
    "legacy": (lambda path: torch_bytes.write_legacy(path, TENSORS), FileKind.TORCH),
}


@pytest.mark.parametrize("name", ["last.ckpt", "model.pt", "weights", "epoch=3.ckpt", "x.bin"])
@pytest.mark.parametrize(("write", "kind"), KINDS.values(), ids=KINDS)
def test_a_file_is_recognized_by_its_first_bytes(write, kind, name, tmp_path):
    """By its path, and in a directory with other files."""
    path = tmp_path / name
    write(path)
    (tmp_path / "README.md").write_text("text")
    # Pickles of None, by names that Hugging Face gives to vocabularies and to arguments.
    (tmp_path / "vocab.bin").write_bytes(b"\x80\x02N.")
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x02N.")

    for source in (path, tmp_path):
        weights = weight_files.find(source)
        assert weights.kind == kind, source
        assert weights.path == path, source
        assert list(weights.parts) == [path], source
        assert holds_other_weights(str(source)), source


@pytest.mark.parametrize("name", [".", "notes.txt", "texts.zip", "missing.pt", ".index"])
def test_other_files_are_not_weights(name, tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "other.pkl").write_bytes(b"\x80\x02N.")
    (tmp_path / "texts.zip").write_bytes(b"PK\x03\x04" + bytes(40))
    # Ids of tokens, in one file and in parts.
    (tmp_path / "train.bin").write_bytes(bytes(100))
    (tmp_path / "train-00001-of-00002.bin").write_bytes(bytes(100))
    assert weight_files.find(tmp_path / name) is None
    assert not holds_other_weights(str(tmp_path / name))


HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(200)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


def error_of(function, *arguments):
    """The message of the `UserError` that a call raises."""
    with pytest.raises(UserError) as raised:
        function(*arguments)
    return str(raised.value)


# `reason` is what the error says of the content.
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.ckpt", HDF5, "HDF5"),
        ("tf_model.h5", HDF5, "HDF5"),
        ("pytorch_model-00001-of-00002.bin", HDF5, "HDF5"),
        ("flax_model.msgpack", b"\x81\xa1a\x01", "msgpack"),
        ("model.gguf", b"GGUF" + bytes(20), "GGUF"),
        ("pytorch_model.bin", b"", "begins like neither"),
        ("model.safetensors", LFS_POINTER, "git lfs pull"),
    ],
    ids=["ckpt", "h5", "bin", "msgpack", "gguf", "empty", "a pointer of Git LFS"],
)
def test_load_and_convert_say_the_same_of_what_cannot_be_read(name, content, reason, tmp_path):
    """An error that names the file: neither sends the user to the other."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "transfo-xl"}')

    message = error_of(formats.read, folder)
    assert re.search(reason, message)
    assert str(folder / name) in message
    assert error_of(txl_jax.load, folder) == message
    assert error_of(convert, folder, tmp_path / "out") == message
    assert not (tmp_path / "out").exists()


def test_one_of_several_files_must_be_chosen(tmp_path):
    """Unless one of them is called the last."""
    for name in ("epoch=1.ckpt", "epoch=2.ckpt"):
        torch_bytes.write_zip(tmp_path / name, TENSORS)
    with pytest.raises(UserError, match=r"epoch=1\.ckpt, epoch=2\.ckpt"):
        weight_files.find(tmp_path)
    assert weight_files.find(tmp_path / "epoch=1.ckpt").path.name == "epoch=1.ckpt"

    torch_bytes.write_zip(tmp_path / "last.ckpt", TENSORS)
    assert weight_files.find(tmp_path).path.name == "last.ckpt"


# TensorFlow: names decide, because a checkpoint is several files


@pytest.fixture
def tensorflow_checkpoints(tmp_path):
    """A directory with the checkpoints of two steps. Its file `checkpoint` names the earlier one,
    at a path on another machine.
    """
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/../model.ckpt-1"\n')
    for step in (1, 20):
        for end in ("index", "meta", "data-00000-of-00001"):
            (tmp_path / f"model.ckpt-{step}.{end}").write_bytes(bytes(64))
    return tmp_path


@pytest.mark.parametrize("end", ["", ".index", ".meta", ".data-00000-of-00001"])
def test_a_checkpoint_of_tensorflow_by_each_of_its_names(end, tensorflow_checkpoints):
    path = tensorflow_checkpoints / f"model.ckpt-1{end}"
    prefix = tensorflow_checkpoints / "model.ckpt-1"
    assert weight_files.find(path) == (FileKind.TENSORFLOW, prefix, {})
    assert holds_other_weights(str(path))


@pytest.mark.parametrize("name", [".", "checkpoint"])
def test_of_several_checkpoints_of_tensorflow_the_last_is_read(name, tensorflow_checkpoints):
    weights = weight_files.find(tensorflow_checkpoints / name)
    assert weights.path == tensorflow_checkpoints / "model.ckpt-20"


def test_a_missing_index_of_tensorflow_is_named(tensorflow_checkpoints):
    (tensorflow_checkpoints / "model.ckpt-1.index").unlink()
    with pytest.raises(UserError, match=r"model\.ckpt-1\.index is missing"):
        weight_files.find(tensorflow_checkpoints / "model.ckpt-1.meta")


def test_variables_inside_the_scopes_of_a_wrapper():
    """The model's are behind the first "transformer/" that is not of an optimizer's variable, or
    behind the usual one.
    """
    names = [
        "global_step",
        "tower/transformer/adaptive_embed/lookup_table/Adam",
        "x/transformer/adaptive_embed/proj_W",
    ]
    assert tensorflow._root_of(names) == "x/transformer/"
    assert tensorflow._root_of(["transformer/adaptive_embed/proj_W", *names]) == "transformer/"
    assert tensorflow._root_of(["a", "not_transformer/adaptive_embed/x"]) == "transformer/"


# Weights in several files


def write_in_three_files(folder, suffix, tensors):
    """Writes every third tensor to a file. Returns the names of the files, and each tensor's."""
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    write = write_safetensors if suffix == ".safetensors" else torch_bytes.write_zip
    names = list(tensors)
    files = []
    file_of = {}
    for k in range(3):
        file = f"{stem}-{k + 1:05}-of-00003{suffix}"
        part = {name: tensors[name] for name in names[k::3]}
        write(folder / file, part)
        files.append(file)
        file_of |= dict.fromkeys(part, file)
    return files, file_of


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
@pytest.mark.parametrize("has_index", [True, False])
def test_a_model_in_several_files(suffix, has_index, tmp_path):
    """By the directory, each of the files, or their index."""
    config, params = foreign.make("hf", untie_r=True)
    tensors = {}
    for name, value in original.from_flax(params, config, format=Format.HUGGINGFACE).items():
        tensors[name] = np.array(value)  # Tensors that are shared become two.
    files, file_of = write_in_three_files(tmp_path, suffix, tensors)
    sources = [tmp_path, *(tmp_path / file for file in files)]
    if has_index:
        index = files[0].partition("-")[0] + suffix + ".index.json"
        content = {"metadata": {"total_size": 1}, "weight_map": file_of}
        (tmp_path / index).write_text(json.dumps(content))
        sources.append(tmp_path / index)

    for source in sources:
        foreign.check(formats.read(source), config, params)

    (tmp_path / files[1]).unlink()
    for source in (tmp_path, tmp_path / files[0]):
        with pytest.raises(UserError, match=rf"{re.escape(files[1])} are missing"):
            formats.read(source)


@pytest.fixture
def part_with_index(tmp_path):
    """The index of a directory with one part of a model. Another part is outside."""
    write_safetensors(tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "part.safetensors")
    return folder / "model.safetensors.index.json"


def read_by_index(index, weight_map):
    """The tensors of a directory whose index has this map."""
    index.write_text(json.dumps({"weight_map": weight_map}))
    return formats._tensors(weight_files.find(index.parent))[0]


def test_an_index_names_files_next_to_it(part_with_index):
    assert list(read_by_index(part_with_index, {"a": "part.safetensors"})) == ["a"]
    with pytest.raises(UserError, match=r"no tensor b"):
        read_by_index(part_with_index, {"a": "part.safetensors", "b": "part.safetensors"})


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "OUTSIDE",
        "",
        ".",
        "..",
        "x/../../outside.safetensors",
        3,
        None,
        ["a"],
    ],
    ids=str,
)
def test_an_index_names_no_files_elsewhere(name, part_with_index):
    if name == "OUTSIDE":
        name = str(part_with_index.parent.parent / "outside.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        read_by_index(part_with_index, {"a": name})


@pytest.mark.parametrize(
    "content", ["[1]", "null", "{", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000]
)
def test_a_corrupted_index_is_named(content, part_with_index):
    """The part next to it is not read instead."""
    part_with_index.write_text(content)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        weight_files.find(part_with_index.parent)
