"""Tests of files that mean harm, in every reader: one `UserError`, and nothing is run, written or
waited for.

Pickles and files of PyTorch have tests of their own in tests/interop. `.ci/nightly fuzz` looks for
more of them.
"""

import gzip
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import export

import txl_jax
from support import ROOT, drawn_run, foreign, torch_bytes
from txl_jax.data import archives, token_store
from txl_jax.data.corpus import KINDS
from txl_jax.data.vocabulary import TITLE, loads
from txl_jax.errors import CheckpointError, UserError
from txl_jax.interop import exported, formats, leaves, pickles, portable, safetensors
from txl_jax.runs.convert import TargetFormat, convert
from txl_jax.runs.run import Run, read_results, recorded_folders
from txl_jax.runtime import checkpoint, storage

# Python's JSON nests no deeper than its stack, `int` takes 4,300 digits.
DEEP, LONG = b"[" * 100_000, b"9" * 5000
NOT_JSON = [
    DEEP,
    LONG,
    b'{"a": ' * 100_000,
    b"\xff",
    b"null",
    b'["txl_jax_model"]',
    b'"txl_jax_model"',
    b"1e999",
]


def changed(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, its portable checkpoint, and the same model for Hugging Face."""
    folder = tmp_path_factory.mktemp("made")
    run = drawn_run.of_words(folder / "run", **drawn_run.WT103)
    for name, to_format in (
        ("portable", TargetFormat.NATIVE),
        ("theirs", TargetFormat.HUGGINGFACE),
    ):
        convert(run.path, folder / name, to_format=to_format, log=lambda line: None)
    return folder


@pytest.fixture
def folders(made, tmp_path):
    return shutil.copytree(made, tmp_path / "made")


# Records


@pytest.mark.parametrize("content", NOT_JSON, ids=lambda content: repr(content[:9]))
def test_what_is_no_record_is_one_error(folders, content):
    run, step = folders / "run", next((folders / "run" / "checkpoints" / "best").iterdir())
    for folder, name in (
        (step, "digests"),
        (run, "results"),
        (run, "config"),
        (folders / "portable", "config"),
    ):
        (folder / f"{name}.json").write_bytes(content)
    assert checkpoint.find_damage(step) == checkpoint.NO_DIGESTS
    assert read_results(str(run)) == {} and recorded_folders(run) == {}
    assert not portable.is_portable(folders / "portable") or content.startswith((b"[", b'"'))
    for folder in (run, folders / "portable"):
        with pytest.raises(UserError):
            txl_jax.load(folder)
    (folders / "theirs" / "config.json").write_bytes(content)
    with pytest.raises(UserError):
        formats.read(folders / "theirs")
    store = next((folders / "run-text").rglob("store.json"))
    store.write_bytes(content)
    assert not token_store._is_whole(store.parent)


def test_files_without_an_end_are_not_read(tmp_path):
    """A link to a device, and a pipe, at which `open` would wait.

    Other links are followed: caches consist of them.
    """
    (tmp_path / "linked").symlink_to(os.devnull)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("1")
    (tmp_path / "link").symlink_to("file")
    for name in ("linked", "pipe"):
        for read in (storage.read, storage.sha256, storage.read_json):
            with pytest.raises(OSError, match=name):
                read(tmp_path / name)
    assert storage.read_json(tmp_path / "link") == 1
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 40)  # Sparse.
    with pytest.raises(ValueError, match=f"{1 << 40:,}"):
        storage.read_json(tmp_path / "file")


def test_a_member_does_not_lead_out_of_the_workdir(folders):
    path, members = (
        folders / "run" / "config.json",
        [{"seed": 1}, {"data.file": "/../../../outside"}],
    )
    changed(path, members=members[:1])
    assert Run.read(folders / "run", member="seed=1").member == "seed=1"
    changed(path, members=members)
    with pytest.raises(UserError, match=r"config\.json"):
        Run.read(folders / "run", member="data.file=/../../../outside")


def test_digests_vouch_only_for_what_they_list(folders):
    step = next((folders / "run" / "checkpoints" / "best").iterdir())
    digests = json.loads((step / "digests.json").read_text())
    first = min(digests)
    for listed, expected in (
        ({}, checkpoint.NO_DIGESTS),
        (
            {name: digest for name, digest in digests.items() if name != first},
            checkpoint.NO_DIGESTS,
        ),
        (digests | {"../../../config.json": "0" * 64}, "../../../config.json"),
        (digests | {os.devnull: "0" * 64}, os.devnull),
        (digests, None),
    ):
        (step / "digests.json").write_text(json.dumps(listed))
        found = checkpoint.find_damage(step)
        assert found == expected or expected in found
    (step / ".nfs1").touch()  # Of a network file system.
    assert checkpoint.find_damage(step) is None
    summary = next((folders / "run-text").rglob("store.json"))
    assert token_store._is_whole(summary.parent)
    changed(summary, bytes={}, sha256={})
    assert not token_store._is_whole(summary.parent)


# Models of other implementations


def test_a_setting_that_nests_deep(tmp_path):
    value = foreign.nvidia_checkpoint(*foreign.make("pytorch"))
    value["model_config"] = torch_bytes.Raw(
        b"}X\x07\x00\x00\x00n_layer" + b"]" * 100_000 + b"a" * 99_999 + b"s"
    )
    torch_bytes.write_legacy(tmp_path / "checkpoint_best.pt", value)
    with pytest.raises(UserError, match="n_layer"):
        formats.read(tmp_path / "checkpoint_best.pt")


# Vocabularies

LONG_BYTE = f"{TITLE} byte {{}}\n{LONG.decode()}\n"
WORD_LEVEL = {"model": {"type": "WordLevel", "vocab": {"a": (1 << 32) - 1}, "unk_token": "a"}}
TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}


@pytest.mark.parametrize(
    "text",
    [
        LONG_BYTE,
        *(
            f"{TITLE} {kind.kind} {start * 50_000}\na\n"
            for kind in KINDS
            for start in ("[", '{"a":')
        ),
        f'{TITLE} id {{"size": {10**12}}}\n',
        # The package panics: it has no token "ab".
        f"{TITLE} subword {{}}\n{json.dumps(TOKENIZER)}\n",
        f"{TITLE} subword {{}}\n{json.dumps(WORD_LEVEL)}\n",
    ],
    ids=lambda text: text[:40],
)
def test_a_vocabulary_is_read_or_one_error(text):
    with pytest.raises(UserError):
        loads(text, KINDS)


def test_keys_of_a_pickle_have_no_hash_of_its_choice():
    """200,000 numbers with the hash 0, and pairs of them: quadratic time."""
    for pairs in (b"", b"\x86"):
        number = (((1 << 61) - 1) * 3).to_bytes(10, "little")
        keys = b"\x8a\x0a" + number + (b"\x8a\x0a" + number + pairs if pairs else b"")
        with pytest.raises(UserError, match="cannot be a key"):
            pickles.load(b"\x80\x02}(" + keys + b"Nu.", name="file.pt")
    with pytest.raises(UserError, match="cannot be a key"):
        pickles.load(b"Np" + str(((1 << 61) - 1) * 3).encode() + b"\n.", name="file.pt")


# Archives


SPARSE = {
    "GNU.sparse.major": "1",
    "GNU.sparse.minor": "0",
    "GNU.sparse.realsize": "5",
    "GNU.sparse.name": "y",
}


@pytest.mark.parametrize(
    "kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.GNUTYPE_SPARSE, SPARSE]
)
def test_what_gzip_makes_of_few_bytes_is_not_kept_in_memory(kind, tmp_path):
    """`tarfile` reads names, attributes and maps of sparse files whole, in time that grows with the
    square.
    """
    info = tarfile.TarInfo("x")
    info.size = 40 << 20
    if kind is SPARSE:
        info.pax_headers, content = SPARSE, b"99999999\n" + b"1\n" * (20 << 20)
    else:
        info.type, content = kind, bytes(40 << 20)
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(info.tobuf(tarfile.PAX_FORMAT) + content, 1))
    with pytest.raises(UserError, match=r"x\.tar\.gz.*(sparse|8 KiB)"):
        archives.open_files([("x.tar.gz", str(tmp_path / "x.tar.gz"), "http://example.org")])


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_attributes_of_a_tar_are_short(kind, tmp_path):
    """Older Pythons search attributes in quadratic time: 32 kB of digits take seconds, a megabyte
    an hour.
    """
    info = tarfile.TarInfo("x")
    info.type = kind
    info.size = archives._MAX_ATTRIBUTES + 1
    content = info.tobuf(tarfile.USTAR_FORMAT) + b"1" * info.size + bytes(-info.size % 512 + 1024)
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.tar.*8 KiB"):
        archives.open_files([("x.tar", str(tmp_path / "x.tar"), "http://example.org")])


# Whatever a reader raises


@pytest.mark.parametrize(
    "error", [MemoryError(), RecursionError("deep"), OverflowError("big"), KeyError(3)], ids=repr
)
def test_whatever_a_reader_raises_is_one_error_that_names_the_file(error, folders, monkeypatch):
    def broken(*given, **options):
        raise error

    theirs, own = folders / "theirs", folders / "portable"
    for module, name, read, folder in (
        (formats.infer_config, "infer", formats.read, theirs),
        (formats.safetensors, "read", formats.read, theirs),
        (formats.vocabularies, "_of_text", formats.read, theirs),
        (portable, "loads", portable.read_info, own),
        (portable, "from_dict", portable.read_info, own),
        (portable.safetensors, "read", portable.read_leaves, own),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, broken)
            with pytest.raises(UserError, match=re.escape(str(folder))) as raised:
                read(folder)
        assert "\n" not in str(raised.value)


def test_an_error_of_a_later_read_names_the_file(folders):
    found = formats.read(folders / "theirs").leaves
    (folders / "theirs" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        [leaf.read() for leaf in found.values()]
    found = portable.read_leaves(folders / "portable")
    (folders / "portable" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        [leaf.read() for leaf in found.values()]


# Exported models


@pytest.mark.full
def test_an_exported_model_reads_only_what_it_lists(tmp_path):
    """The digests of a stranger's directory fit; a file outside of it would be read without one."""
    folder, shape = tmp_path / "model", jax.ShapeDtypeStruct((2,), np.float32)
    folder.mkdir()
    data = bytes(export.export(jax.jit(lambda x: x + 1))(shape).serialize())
    for path, content in (
        (tmp_path / "outside", data),
        (folder / "good", data),
        (folder / "bad", b"\xff" * 500),
    ):
        path.write_bytes(content)
    safetensors.write(
        folder / "weights.safetensors", leaves.from_tree({"a": np.zeros(2, np.float32)})
    )
    sums = {path.name: storage.sha256(path) for path in folder.iterdir()}

    def read(content: bytes):
        (folder / "manifest.json").write_bytes(content)
        (folder / "manifest.sha256").write_text(
            f"{hashlib.sha256(content).hexdigest()}  manifest.json\n"
        )
        return exported.read(folder)

    def manifest(file, **more):
        return json.dumps({"functions": {"score": {"file": file}}, "sha256": sums | more}).encode()

    assert list(read(manifest("good"))[2]) == ["score"]
    outside = [
        manifest(file)
        for file in ("../outside", str(tmp_path / "outside"), "manifest.json", "", ".")
    ]
    others = [
        manifest("bad"),
        manifest(["good"]),
        manifest("good", more="0" * 64),
        b"null",
        DEEP,
        b'{"sha256": {}}',
    ]
    for content in outside + others:
        with pytest.raises(CheckpointError, match=re.escape(str(folder))):
            read(content)
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "run_exported.py"))["load"]
    with pytest.raises(CheckpointError):
        read(outside[0])
    with pytest.raises(ValueError, match="has changed"):
        example(folder)


# Fuzzing


@pytest.mark.nightly(part="fuzz")
@pytest.mark.parametrize("target", ["pickles", "headers", "vocabularies", "manifests", "archives"])
def test_files_changed_at_random(target, tmp_path):
    """For TXL_FUZZ_SECONDS, guided by the lines that a file reaches."""
    seconds, program = (
        os.environ.get("TXL_FUZZ_SECONDS", "60"),
        ROOT / "tests" / "support" / "fuzz_readers.py",
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, program, target, tmp_path / "out", seconds]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, check=False
    )
    print(re.search(r"Done \d+ runs.*", done.stderr))
    found = [path.name for path in (tmp_path / "out").glob("*-*")]
    assert done.returncode == 0 and not found, done.stdout[-3000:] + done.stderr[-3000:]
