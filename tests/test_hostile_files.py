"""Tests that a file that means harm is one `UserError` in every reader, and that nothing is run,
written or waited for.

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
from txl_jax.runs import convert as convert_lib
from txl_jax.runs.convert import TargetFormat, convert
from txl_jax.runs.run import Run, read_results, recorded_folders
from txl_jax.runtime import checkpoint, storage

DEEP = b"[" * 100_000  # Python's JSON nests no deeper than its stack.
LONG = b"9" * 5000  # `int` takes 4,300 digits.
NO_RECORDS = {
    "deep lists": DEEP,
    "a long number": LONG,
    "deep objects": b'{"a": ' * 100_000,
    "not utf-8": b"\xff",
    "null": b"null",
    "a list": b'["txl_jax_model"]',
    "a string": b'"txl_jax_model"',
    "infinity": b"1e999",
}


def change_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | values))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with a run, its portable checkpoint, and the same model for Hugging Face."""
    directory = tmp_path_factory.mktemp("made")
    run = drawn_run.of_words(directory / "run", **drawn_run.WT103)
    with pytest.MonkeyPatch.context() as patch:
        # Tests of convert compare the losses of both models, which takes seconds to compile.
        patch.setattr(convert_lib, "_losses", lambda *arguments, **options: np.zeros(1))
        convert(run.path, directory / "portable", to_format=TargetFormat.NATIVE, log=print)
        convert(run.path, directory / "theirs", to_format=TargetFormat.HUGGINGFACE, log=print)
    return directory


@pytest.fixture
def folders(made, tmp_path):
    return shutil.copytree(made, tmp_path / "made")


# Records


def last_step(run: Path) -> Path:
    return next((run / "checkpoints" / "best").iterdir())


@pytest.mark.parametrize("content", NO_RECORDS.values(), ids=NO_RECORDS)
def test_what_is_no_record_is_one_error(folders, content):
    run = folders / "run"
    portable_folder = folders / "portable"
    step = last_step(run)
    store = next((folders / "run-text").rglob("store.json"))
    for path in (
        step / "digests.json",
        run / "results.json",
        run / "config.json",
        portable_folder / "config.json",
        folders / "theirs" / "config.json",
        store,
    ):
        path.write_bytes(content)

    assert checkpoint.find_damage(step) == checkpoint.NO_DIGESTS
    assert read_results(str(run)) == {}
    assert recorded_folders(run) == {}
    assert not token_store._is_whole(store.parent)
    # A list or a string with the right word passes for one here, and is an error when it is loaded.
    assert not portable.is_portable(portable_folder) or content.startswith((b"[", b'"'))
    for folder in (run, portable_folder):
        with pytest.raises(UserError):
            txl_jax.load(folder)
    with pytest.raises(UserError):
        formats.read(folders / "theirs")


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
    run = folders / "run"
    members = [{"seed": 1}, {"data.file": "/../../../outside"}]

    change_json(run / "config.json", members=members[:1])
    assert Run.read(run, member="seed=1").member == "seed=1"

    change_json(run / "config.json", members=members)
    with pytest.raises(UserError, match=r"config\.json"):
        Run.read(run, member="data.file=/../../../outside")


def test_digests_vouch_only_for_what_they_list(folders):
    step = last_step(folders / "run")
    digests = json.loads((step / "digests.json").read_text())

    def damage_with(listed):
        (step / "digests.json").write_text(json.dumps(listed))
        return checkpoint.find_damage(step)

    first = min(digests)
    without_first = {name: digest for name, digest in digests.items() if name != first}
    assert damage_with({}) == checkpoint.NO_DIGESTS
    assert damage_with(without_first) == checkpoint.NO_DIGESTS
    for outside in ("../../../config.json", os.devnull):
        assert outside in damage_with(digests | {outside: "0" * 64})
    assert damage_with(digests) is None

    (step / ".nfs1").touch()  # Network file systems make such files.
    assert checkpoint.find_damage(step) is None


def test_a_store_of_tokens_without_digests_is_not_whole(folders):
    summary = next((folders / "run-text").rglob("store.json"))
    assert token_store._is_whole(summary.parent)
    change_json(summary, bytes={}, sha256={})
    assert not token_store._is_whole(summary.parent)


# Models of other implementations


def test_a_setting_that_nests_deep(tmp_path):
    value = foreign.nvidia_checkpoint(*foreign.make("pytorch"))
    # A dict whose value is a list in a list, 100,000 deep.
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


NESTED = ("[" * 50_000, '{"a":' * 50_000)


def vocabulary_texts():
    """Yields texts of vocabularies that cannot be read."""
    yield pytest.param(LONG_BYTE, id="a long number")
    for kind in KINDS:
        for number, settings in enumerate(NESTED):
            yield pytest.param(
                f"{TITLE} {kind.kind} {settings}\na\n", id=f"{kind.kind}, nested {number}"
            )
    yield pytest.param(f'{TITLE} id {{"size": {10**12}}}\n', id="a size of 10^12")
    # The package panics: it has no token "ab".
    yield pytest.param(f"{TITLE} subword {{}}\n{json.dumps(TOKENIZER)}\n", id="an unknown merge")
    yield pytest.param(f"{TITLE} subword {{}}\n{json.dumps(WORD_LEVEL)}\n", id="an id of 2^32 - 1")


@pytest.mark.parametrize("text", list(vocabulary_texts()))
def test_a_vocabulary_is_read_or_one_error(text):
    with pytest.raises(UserError):
        loads(text, KINDS)


@pytest.mark.parametrize("keys", ["numbers", "pairs"])
def test_keys_of_a_pickle_have_no_hash_of_its_choice(keys):
    """200,000 numbers with the hash 0, or pairs of them, take quadratic time.

    One of them is refused already.
    """
    # The hash of an int is its remainder by 2^61 - 1.
    number = b"\x8a\x0a" + (((1 << 61) - 1) * 3).to_bytes(10, "little")
    key = number if keys == "numbers" else number + number + b"\x86"
    with pytest.raises(UserError, match="cannot be a key"):
        pickles.load(b"\x80\x02}(" + key + b"Nu.", name="file.pt")


def test_the_memo_of_a_pickle_has_no_hash_of_its_choice():
    """The index of an entry is a key, too, here one with the hash 0."""
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
    "kind",
    [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.GNUTYPE_SPARSE, SPARSE],
    ids=["a long name", "attributes", "a sparse file of GNU", "a sparse file"],
)
def test_what_gzip_makes_of_few_bytes_is_not_kept_in_memory(kind, tmp_path):
    """`tarfile` reads names, attributes and maps of sparse files whole, in quadratic time."""
    info = tarfile.TarInfo("x")
    info.size = 40 << 20
    if kind is SPARSE:
        info.pax_headers = SPARSE
        content = b"99999999\n" + b"1\n" * (20 << 20)
    else:
        info.type = kind
        content = bytes(40 << 20)
    archive = tmp_path / "x.tar.gz"
    archive.write_bytes(gzip.compress(info.tobuf(tarfile.PAX_FORMAT) + content, 1))

    with pytest.raises(UserError, match=r"x\.tar\.gz.*(sparse|8 KiB)"):
        archives.open_files([("x.tar.gz", str(archive), "http://example.org")])


@pytest.mark.parametrize(
    "kind",
    [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE],
    ids=["a long name", "attributes", "attributes of all files"],
)
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


# What a reader calls, by its module and name, what reads, and the directory that is read.
CALLED = [
    (formats.infer_config, "infer", formats.read, "theirs"),
    (formats.safetensors, "read", formats.read, "theirs"),
    (formats.vocabularies, "_of_text", formats.read, "theirs"),
    (portable, "loads", portable.read_info, "portable"),
    (portable, "from_dict", portable.read_info, "portable"),
    (portable.safetensors, "read", portable.read_leaves, "portable"),
]


@pytest.mark.parametrize(
    "error", [MemoryError(), RecursionError("deep"), OverflowError("big"), KeyError(3)], ids=repr
)
def test_whatever_a_reader_raises_is_one_error_that_names_the_file(error, folders, monkeypatch):
    def fail(*arguments, **options):
        raise error

    for module, name, read, directory in CALLED:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, fail)
            with pytest.raises(UserError, match=re.escape(str(folders / directory))) as raised:
                read(folders / directory)
        assert "\n" not in str(raised.value), name


def test_an_error_of_a_later_read_names_the_file(folders):
    def read_all(lazy_leaves):
        for leaf in lazy_leaves.values():
            leaf.read()

    theirs = formats.read(folders / "theirs").leaves
    (folders / "theirs" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        read_all(theirs)

    ours = portable.read_leaves(folders / "portable")
    (folders / "portable" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        read_all(ours)


# Exported models


@pytest.mark.full
def test_an_exported_model_reads_only_what_it_lists(tmp_path):
    """The digests of a stranger's directory fit. A file outside of it would be read without one."""
    folder = tmp_path / "model"
    folder.mkdir()
    shape = jax.ShapeDtypeStruct((2,), np.float32)
    program = bytes(export.export(jax.jit(lambda x: x + 1))(shape).serialize())
    (tmp_path / "outside").write_bytes(program)
    (folder / "good").write_bytes(program)
    (folder / "bad").write_bytes(b"\xff" * 500)
    weights = leaves.from_tree({"a": np.zeros(2, np.float32)})
    safetensors.write(folder / "weights.safetensors", weights)
    sums = {path.name: storage.sha256(path) for path in folder.iterdir()}

    def manifest(file, **other_sums):
        functions = {"score": {"file": file}}
        return json.dumps({"functions": functions, "sha256": sums | other_sums}).encode()

    def read(content: bytes):
        digest = hashlib.sha256(content).hexdigest()
        (folder / "manifest.json").write_bytes(content)
        (folder / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
        return exported.read(folder)

    assert list(read(manifest("good"))[2]) == ["score"]

    for content in (
        # Files outside of the directory, and names that are none of its files.
        manifest("../outside"),
        manifest(str(tmp_path / "outside")),
        manifest("manifest.json"),
        manifest(""),
        manifest("."),
        # A file that is not a program, a list for a name, and a file that is missing.
        manifest("bad"),
        manifest(["good"]),
        manifest("good", more="0" * 64),
        # Not a manifest.
        b"null",
        DEEP,
        b'{"sha256": {}}',
    ):
        with pytest.raises(CheckpointError, match=re.escape(str(folder))):
            read(content)

    load = runpy.run_path(str(ROOT / "docs" / "examples" / "run_exported.py"))["load"]
    with pytest.raises(CheckpointError):
        read(manifest("../outside"))
    with pytest.raises(ValueError, match="has changed"):
        load(folder)


# Fuzzing


@pytest.mark.nightly(part="fuzz")
@pytest.mark.parametrize("target", ["pickles", "headers", "vocabularies", "manifests", "archives"])
def test_files_changed_at_random(target, tmp_path):
    """For TXL_FUZZ_SECONDS, guided by the lines that a file reaches."""
    seconds = os.environ.get("TXL_FUZZ_SECONDS", "60")
    program = ROOT / "tests" / "support" / "fuzz_readers.py"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, program, target, tmp_path / "out", seconds]

    ended = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, check=False
    )

    print(re.search(r"Done \d+ runs.*", ended.stderr))
    output = ended.stdout[-3000:] + ended.stderr[-3000:]
    assert ended.returncode == 0, output
    assert list((tmp_path / "out").glob("*-*")) == [], output
