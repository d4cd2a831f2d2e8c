"""Tests of which files are weights: told by their first bytes, the same for `load` and for a
conversion.
"""

import json
import os
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
def test_a_file_is_told_by_its_first_bytes(write, kind, name, tmp_path):
    path = write(tmp_path / name) or tmp_path / name
    (tmp_path / "README.md").write_text("text")
    (tmp_path / "vocab.bin").write_bytes(b"\x80\x02N.")
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x02N.")
    for source in (path, tmp_path):
        found = weight_files.find(source)
        assert (found.kind, found.path, list(found.parts)) == (kind, path, [path])
        assert holds_other_weights(str(source))


def test_what_is_no_weights(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "other.pkl").write_bytes(b"\x80\x02N.")
    (tmp_path / "texts.zip").write_bytes(b"PK\x03\x04" + bytes(40))
    (tmp_path / "train.bin").write_bytes(bytes(100))  # Ids.
    (tmp_path / "train-00001-of-00002.bin").write_bytes(bytes(100))
    for path in (
        tmp_path,
        tmp_path / "notes.txt",
        tmp_path / "texts.zip",
        tmp_path / "missing.pt",
        tmp_path / ".index",
    ):
        assert weight_files.find(path) is None
        assert not holds_other_weights(str(path))


HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(200)
UNREADABLE = {
    "model.ckpt": (HDF5, "HDF5"),
    "tf_model.h5": (HDF5, "HDF5"),
    "pytorch_model-00001-of-00002.bin": (HDF5, "HDF5"),
    "flax_model.msgpack": (b"\x81\xa1a\x01", "msgpack"),
    "model.gguf": (b"GGUF" + bytes(20), "GGUF"),
    "pytorch_model.bin": (b"", "begins like neither"),
    "model.safetensors": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "git lfs pull",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_load_and_convert_say_the_same_of_what_cannot_be_read(name, tmp_path):
    """One sentence that names the file: neither sends the user to the other."""
    content, reason = UNREADABLE[name]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "transfo-xl"}')
    said = set()
    for act in (
        txl_jax.load,
        lambda path: convert(path, tmp_path / "out", log=lambda line: None),
        formats.read,
    ):
        with pytest.raises(UserError, match=reason) as raised:
            act(folder)
        said.add(str(raised.value))
    assert len(said) == 1 and str(folder / name) in said.pop()
    assert not (tmp_path / "out").exists()


def test_one_of_several_files_must_be_chosen(tmp_path):
    for name in ("epoch=1.ckpt", "epoch=2.ckpt"):
        torch_bytes.write_zip(tmp_path / name, TENSORS)
    with pytest.raises(UserError, match=r"epoch=1\.ckpt, epoch=2\.ckpt"):
        weight_files.find(tmp_path)
    assert weight_files.find(tmp_path / "epoch=1.ckpt").path.name == "epoch=1.ckpt"
    torch_bytes.write_zip(tmp_path / "last.ckpt", TENSORS)
    assert weight_files.find(tmp_path).path.name == "last.ckpt"


# TensorFlow: names decide, as a checkpoint is several files


def test_a_checkpoint_of_tensorflow_by_each_of_its_names(tmp_path):
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/../model.ckpt-1"\n')
    for step in (1, 20):
        for end in ("index", "meta", "data-00000-of-00001"):
            (tmp_path / f"model.ckpt-{step}.{end}").write_bytes(bytes(64))
    for end in ("", ".index", ".meta", ".data-00000-of-00001"):
        path = tmp_path / f"model.ckpt-1{end}"
        assert weight_files.find(path) == (FileKind.TENSORFLOW, tmp_path / "model.ckpt-1", {})
        assert holds_other_weights(str(path))
    for path in (tmp_path, tmp_path / "checkpoint"):
        assert weight_files.find(path).path == tmp_path / "model.ckpt-20"
    (tmp_path / "model.ckpt-1.index").unlink()
    with pytest.raises(UserError, match=r"model\.ckpt-1\.index is missing"):
        weight_files.find(tmp_path / "model.ckpt-1.meta")


def test_variables_inside_the_scopes_of_a_wrapper():
    names = [
        "global_step",
        "tower/transformer/adaptive_embed/lookup_table/Adam",
        "x/transformer/adaptive_embed/proj_W",
    ]
    assert tensorflow._root_of(names) == "x/transformer/"
    assert tensorflow._root_of(["transformer/adaptive_embed/proj_W", *names]) == "transformer/"
    assert tensorflow._root_of(["a", "not_transformer/adaptive_embed/x"]) == "transformer/"


# Weights in several files


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
@pytest.mark.parametrize("has_index", [True, False])
def test_a_model_in_several_files(suffix, has_index, tmp_path):
    config, params = foreign.make("hf", untie_r=True)
    tensors = {
        name: np.array(value)
        for name, value in original.from_flax(params, config, format=Format.HUGGINGFACE).items()
    }
    write = write_safetensors if suffix == ".safetensors" else torch_bytes.write_zip
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    files, placed = [f"{stem}-{number:05}-of-00003{suffix}" for number in (1, 2, 3)], {}
    for number, file in enumerate(files):
        part = {name: value for k, (name, value) in enumerate(tensors.items()) if k % 3 == number}
        write(tmp_path / file, part)
        placed |= dict.fromkeys(part, file)
    index = tmp_path / f"{stem}{suffix}.index.json"
    if has_index:
        index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))
    for source in (tmp_path, *map(tmp_path.joinpath, files), *([index] if has_index else [])):
        foreign.check(formats.read(source), config, params)
    (tmp_path / files[1]).unlink()
    for source in (tmp_path, tmp_path / files[0]):
        with pytest.raises(UserError, match=rf"{re.escape(files[1])} are missing"):
            formats.read(source)


def test_an_index_names_files_next_to_it(tmp_path):
    outside = write_safetensors(tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"

    def read(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))
        return formats._tensors(weight_files.find(folder))[0]

    assert list(read({"a": "part.safetensors"})) == ["a"]
    for name in (
        "../outside.safetensors",
        str(outside),
        "",
        ".",
        "..",
        "x/../../outside.safetensors",
        3,
        None,
        ["a"],
    ):
        with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
            read({"a": name})
    with pytest.raises(UserError, match=r"no tensor b"):
        read({"a": "part.safetensors", "b": "part.safetensors"})
    os.link(folder / "part.safetensors", folder / "again.safetensors")
    for content in ("[1]", "null", "{", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000):
        index.write_text(content)
        with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
            weight_files.find(folder)
