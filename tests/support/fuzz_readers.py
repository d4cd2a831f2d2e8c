"""Fuzzes the readers of strangers' files with atheris: `python fuzz_readers.py TARGET FOLDER
SECONDS [FLAGS]`.

An input is a byte, which chooses one of the target's whole files, and content that replaces the
file's. A reader must return or raise `UserError`, in a second and with little memory. It may not
write, start a program or open a connection. The first input that breaks this ends the program,
which keeps it in FOLDER.
"""

import contextlib
import copy
import functools
import gc
import gzip
import hashlib
import json
import operator
import os
import pickle
import random
import re
import resource
import struct
import sys
import tarfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

# Files that reach other lines of these modules are kept, and changed further.
with atheris.instrument_imports(
    include=[f"txl_jax.{name}" for name in ("interop", "data", "runs", "config", "runtime")]
    + ["json", "pickletools", "tarfile", "zipfile", "numpy.lib"],
    enable_loader_override=False,
):
    from txl_jax.data import archives as archive_files
    from txl_jax.data import subwords, text, token_store, vocabulary
    from txl_jax.data.corpus import KINDS
    from txl_jax.data.id_tokens import IdVocabulary
    from txl_jax.errors import UserError
    from txl_jax.interop import exported, foreign_vocabulary, formats, portable, safetensors
    from txl_jax.runs import dynamic_statistics, run_tables, trained
    from txl_jax.runs.run import Run, recorded_folders
    from txl_jax.runtime import checkpoint
    from txl_jax.runtime.checkpoint import Checkpointer

import numpy as np

from experiments import export
from support import drawn_run, foreign, hf_tokenizers, miniature, recorded_run, torch_bytes
from txl_jax.data import id_files
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.word_tokens import CharacterVocabulary, WordVocabulary
from txl_jax.runs.build import build_for
from txl_jax.runs.convert import TargetFormat, convert

_SECONDS = 1.0  # Processor time per example.
_MEMORY = 1 << 30  # Bytes of address space that are added while the program runs.
convert_quietly = functools.partial(convert, log=lambda line: None)
Reader = Callable[[Path], Any]  # Takes the file's path.
Seed = tuple[Path, Reader]  # A file that is whole, and what reads it.


# Readers


def read_model(path: Path) -> None:
    model = path if path.suffix in (".bin", ".pt") else path.parent
    for leaf in formats.read(model).leaves.values():
        assert leaf.read().shape == leaf.shape


def read_tensors(path: Path) -> None:
    for leaf in safetensors.read(path).values():
        assert leaf.read().shape == leaf.shape
    read_model(path)


def read_statistics(path: Path) -> None:
    """Reads the statistics of dynamic evaluation of a model with the arrays of `headers`."""
    file = dynamic_statistics._read(str(path))
    dynamic_statistics._mismatch(file, {"eval.mem_len": "3"})
    dynamic_statistics._check(file, {"a": (2,), "b/c": (3, 5)})


def use(words: vocabulary.Vocabulary) -> None:
    """Calls all methods of a vocabulary, whose saved form must be the same vocabulary."""
    assert vocabulary.loads(vocabulary.dumps(words), KINDS) == words
    words.decode(np.arange(min(words.size, 1 << 20)))
    words.byte_lengths  # noqa: B018
    if words.size < 1 << 16:
        words.names()
    words.start, words.unknown_id, words.mark  # noqa: B018
    with contextlib.suppress(UserError):
        words.encode(b"one a\nthe banana")


def read_foreign_vocabulary(path: Path) -> None:
    with contextlib.suppress(UserError):
        foreign_vocabulary.find(path.parent, 3)
    if path.suffix == ".txt":
        reading = foreign_vocabulary._of_text(path)
    else:
        root = foreign_vocabulary.torch_files.read(path).root
        reading = foreign_vocabulary.of_object(root, name=str(path))
    if reading.vocabulary:
        use(reading.vocabulary)


def read_portable(path: Path) -> None:
    """Opens a portable checkpoint, builds its model, and compares both with the weights."""
    model = trained.open_weights(path.parent)
    portable._card(model.source, 1)
    portable.place(portable.read_leaves(path.parent), _abstract(model.config, model.vocabulary))


@functools.lru_cache(maxsize=64)
def _abstract(config: Any, words: vocabulary.Vocabulary) -> Any:
    return build_for(config, words).abstract_state.params


def read_run(path: Path) -> None:
    """Reads a run, its records and its checkpoints' digests and notes, as programs do."""
    folder = next(parent for parent in path.parents if (parent / "vocabulary.txt").exists())
    recorded_folders(folder)
    for run in run_tables.read_runs([str(folder)]):
        assert "\n".join(run_tables.markdown([], [run.row(["model.n_layer", "train.steps"])]))
    for member in [*Run.read_all(folder).member_names, None]:
        with contextlib.suppress(UserError):
            run = Run.read(folder, member=member)
            for directory in (run.latest, run.best):
                with Checkpointer(directory, keep=1, log=lambda line: None) as steps:
                    steps.notes()
                for _, step in checkpoint.find_steps(directory):
                    checkpoint.find_damage(step)


def read_exported(path: Path) -> None:
    """Reads an exported model after its digests are computed from the changed files."""
    folder = path.parent
    manifest_path = folder / exported._MANIFEST
    if path != manifest_path:
        manifest = json.loads(manifest_path.read_bytes())
        manifest["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest_path.write_text(json.dumps(manifest))
    digest_line = exported._digest_line(manifest_path.read_bytes())
    (folder / exported._DIGEST).write_bytes(digest_line)
    exported.read(folder)


def read_json_lines(path: Path) -> None:
    with open(path, "rb") as lines:
        list(text.json_texts(lines, "text", name=str(path)))


def read_ids(path: Path) -> None:
    id_files._scan(id_files._open("file", [str(path)]), "file")


def read_store(path: Path) -> None:
    if token_store._is_whole(path.parent):
        token_store._load(path.parent)


def read_saved_vocabulary(path: Path) -> None:
    use(portable.read_vocabulary(path))


def read_tokenizer(path: Path) -> None:
    use(subwords.given_tokenizer(str(path)))


def read_archive(path: Path) -> None:
    """Reads all members of an archive, as many bytes as a corpus has."""
    places = archive_files.open_files([(path.name, str(path), "http://example.org")])
    pieces = {place: [min(place.size, 100_000)] for place in places}
    list(archive_files.read_files(pieces, 1 << 16))


# Whole files


def _models(folder: Path) -> list[Path]:
    """Weights and a vocabulary of other implementations, each in its own directory."""
    folder.mkdir(exist_ok=True)
    paths = []
    for name, changes in (("tied", {}), ("clusters", foreign.CONFIGS["div_val 2"])):
        config, params = foreign.make("hf", **changes)
        legacy = foreign.huggingface_folder(folder / name, config, params)
        (legacy / "vocab.txt").write_text("\n".join(foreign.WORDS))
        zipped = foreign.huggingface_folder(
            folder / f"{name}-zip", config, params, write=torch_bytes.write_zip
        )
        paths.append(legacy / "pytorch_model.bin")
        paths.append(zipped / "pytorch_model.bin")

    config, params = foreign.make("pytorch", untie_r=True)
    original = folder / "original" / "model.pt"
    original.parent.mkdir()
    paths.append(torch_bytes.write_zip(original, foreign.pickled_module(config, params)))

    config, params = foreign.make("pytorch", **foreign.CONFIGS["div_val 1"])
    nvidia = folder / "nvidia" / "checkpoint_best.pt"
    nvidia.parent.mkdir()
    paths.append(torch_bytes.write_legacy(nvidia, foreign.nvidia_checkpoint(config, params)))
    return paths


def pickles(folder: Path) -> list[Seed]:
    return [(path, read_model) for path in _models(folder)]


def headers(folder: Path) -> list[Seed]:
    config, params = foreign.make("hf", untie_r=True)
    theirs = foreign.huggingface_folder(folder / "theirs", config, params)
    leaves = formats.read(theirs).leaves
    convert_quietly(theirs, folder / "original", to_format=TargetFormat.ORIGINAL)
    safetensors.write(theirs / "model.safetensors", leaves)
    statistics = folder / dynamic_statistics.NAME
    sums = {"a": np.ones(2, np.float32), "b": {"c": np.ones((3, 5), np.float32)}}
    dynamic_statistics._write(str(statistics), sums, {"eval.mem_len": "3"})
    return [
        (statistics, read_statistics),
        (theirs / "model.safetensors", read_tensors),
        (folder / "original" / "model.safetensors", read_tensors),
    ]


def vocabularies(folder: Path) -> list[Seed]:
    tokenizers = [
        hf_tokenizers.byte_level(),
        hf_tokenizers.word_pieces(),
        hf_tokenizers.meta_space(),
        hf_tokenizers.whole_words(),
        hf_tokenizers.few_letters(),
    ]
    ours = [
        ByteVocabulary(b"\n abc"),
        CharacterVocabulary("ab c\N{REPLACEMENT CHARACTER}"),
        IdVocabulary(size=5),
        WordVocabulary(foreign.WORDS),
        *map(subwords.SubwordVocabulary, tokenizers),
    ]
    seeds: list[Seed] = []
    for number, kind in enumerate(ours):
        path = folder / f"ours{number}" / "vocabulary.txt"
        seeds.append((_write(path, vocabulary.dumps(kind).encode()), read_saved_vocabulary))
    for number, tokenizer in enumerate(tokenizers):
        path = folder / f"given{number}" / "tokenizer.json"
        seeds.append((_write(path, tokenizer.encode()), read_tokenizer))

    lists = [list(foreign.WORDS), ["101", "10", "97"], ["_", "a", "b"]]
    for number, words in enumerate(lists):
        value = {"dataset": "enwik8", "vocab": {"idx2sym": words, "lower_case": False}}
        paths = [
            _write(folder / f"words{number}" / "vocab.txt", "\n".join(words).encode()),
            _write(folder / f"pickle{number}" / "cache.pkl", pickle.dumps(value, 2)),
            _write(folder / f"torch{number}" / "vocab.bin", pickle.dumps(value["vocab"], 4)),
        ]
        seeds += [(path, read_foreign_vocabulary) for path in paths]
    return seeds


def manifests(folder: Path) -> list[Seed]:
    """Records, indices and manifests: the small files of a directory that name and describe the
    others.
    """
    workdir = Path(drawn_run.of_words(folder / "run", **drawn_run.WT103).path)
    convert_quietly(workdir, folder / "portable")
    convert_quietly(workdir, folder / "theirs", to_format=TargetFormat.HUGGINGFACE)
    finished = recorded_run.make(folder / "finished")
    ensemble = recorded_run.make(folder / "ensemble", member_settings=[{"seed": 1}, {"seed": 2}])
    start = {
        "path": "x",
        "step": 3,
        "sha256": "0" * 64,
        "tokens": {"kept": 1, "new": 2, "moved": 0, "dropped": 0},
    }
    record = json.loads((ensemble / "config.json").read_text())
    record |= {"attention": {"training": "tiled 8x8"}, "warm_start": start}
    (ensemble / "config.json").write_text(json.dumps(record))
    seeds: list[Seed] = []
    for run in (finished, ensemble):
        seeds.append((run / "config.json", read_run))
        seeds.append((run / "results.json", read_run))
        seeds.append((run / "metrics.jsonl", read_run))
    step = next((workdir / "checkpoints" / "best").iterdir())
    seeds.append((workdir / "config.json", read_run))
    seeds.append((workdir / "vocabulary.txt", read_run))
    seeds.append((step / "digests.json", read_run))
    seeds.append((step / "notes" / "metadata", read_run))

    # Three times, since it has the most settings.
    seeds += [(folder / "portable" / "config.json", read_portable)] * 3
    seeds.append((folder / "theirs" / "config.json", read_model))
    for path in _models(folder / "models")[:2]:
        seeds.append((path.with_name("config.json"), read_model))

    exported_folder = folder / "exported"
    with contextlib.redirect_stdout(None):
        export.run(export.Plan(from_=str(workdir), to=str(exported_folder)), None)
    seeds.append((exported_folder / "manifest.json", read_exported))
    seeds.append((exported_folder / "score.jax_export", read_exported))

    store = next((folder / "run-text").rglob("store.json"))
    seeds.append((store, read_store))
    documents = folder / "own" / "a.jsonl"
    _write(documents, b'{"text": "a"}\n{"text": "b\\u00e9"}\n')
    seeds.append((documents, read_json_lines))
    ids = folder / "own" / "a.npy"
    np.save(ids, np.arange(9, dtype=np.uint16))
    seeds.append((ids, read_ids))
    return seeds


def archives(folder: Path) -> list[Seed]:
    members = {"box/b.txt": b"bee" * 500, "box/a.txt": b"ay", "box/c.txt": b"", "c.txt": b"sea"}
    files = ("x.zip", "x.tar", "x.tar.gz")
    paths = [_write(folder / file, miniature.archive(file, members)) for file in files]
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        info = tarfile.TarInfo("é" * 200)
        info.pax_headers = {"comment": "x" * 20}
        content = info.tobuf(format) + bytes(1024)
        paths.append(_write(folder / f"{format}.tar", content))
        paths.append(_write(folder / f"{format}.tar.gz", gzip.compress(content, mtime=0)))
    return [(path, read_archive) for path in paths]


TARGETS: dict[str, Callable[[Path], list[Seed]]] = {
    "pickles": pickles,
    "headers": headers,
    "vocabularies": vocabularies,
    "manifests": manifests,
    "archives": archives,
}


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# Changes of a file, in addition to libFuzzer's

ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1e308, 1.5]
ODD += [
    "",
    "a",
    "..",
    "../../x",
    "/dev/zero",
    "a\0b",
    "\ud800",
    "9" * 5000,
    "NaN",
    "tiled 8x8",
    "\u00e9",
]
ODD += [[], {}, [1], {"a": 1}, [[]], float("nan"), float("inf"), [None] * 50]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns each container in a JSON value with each of its keys or indices."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    places = []
    for key, inner in items:
        places.append((value, key))
        places += _places(inner)
    return places


def change_json(data: bytes, draw: random.Random) -> bytes:
    """Replaces parts of a JSON value by odd values or by other parts.

    It also removes, renames and nests some.
    """
    value = json.loads(data)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        places = _places(value)
        if not places:
            return data
        container, key = draw.choice(places)
        match draw.randrange(6):
            case 0:
                container[key] = copy.deepcopy(operator.getitem(*draw.choice(places)))
            case 1:
                del container[key]
            case 2 if isinstance(container, dict):
                container[str(draw.choice(ODD))] = container.pop(key)
            case 3:
                for _ in range(draw.choice([3, 200])):
                    if draw.randrange(2):
                        container[key] = [container[key]]
                    else:
                        container[key] = {"a": container[key]}
            case _:
                container[key] = draw.choice(ODD)
    return json.dumps(value).encode()


def json_in(path: Path, data: bytes, draw: random.Random) -> tuple[int, int]:
    """Returns the place where a JSON value of a file begins and ends, or raises if it has none."""
    if path.suffix == ".safetensors":
        return 8, 8 + struct.unpack("<Q", data[:8])[0]
    if path.suffix == ".jsonl":
        return draw.choice([line.span() for line in re.finditer(rb"[^\n]+", data)])
    if path.name == "vocabulary.txt":
        return data.index(b"{"), data.index(b"\n")
    return 0, len(data)


def change(data: bytes, limit: int, seed: int) -> bytes:
    """Changes bytes as libFuzzer does, or values of JSON, or bytes before their compression."""
    draw = random.Random(seed)
    start = data[:1] or b"\0"
    rest = data[1:]
    with contextlib.suppress(Exception):
        if rest[:2] == b"\x1f\x8b" and draw.randrange(8):
            return start + gzip.compress(atheris.Mutate(gzip.decompress(rest), limit), 1, mtime=0)
        if draw.randrange(4):
            path = _SEEDS[start[0] % len(_SEEDS)][0]
            first, last = json_in(path, rest, draw)
            changed = change_json(rest[first:last], draw)
            before = rest[:first]
            if path.suffix == ".safetensors":
                before = struct.pack("<Q", len(changed))
            return start + before + changed + rest[last:]
    return start + atheris.Mutate(rest, limit - 1)


# One example

_SEEDS: list[Seed] = []
_CONTENTS: list[bytes] = []
_BUSY: list[Path] = []  # The directory that an example may write in, while it runs.
_FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
    "pickle.find_class",
)
_WRITING = (
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
)


class ForbiddenError(BaseException):
    """An operation that no file may make a reader do."""


def watch(event: str, args: tuple[Any, ...]) -> None:
    if not _BUSY:
        return
    writes = event in _WRITING
    if event == "open" and isinstance(args[2], int):
        writes = bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    is_outside = not (args and str(args[0]).startswith(str(_BUSY[0])))
    if event in _FORBIDDEN or (is_outside and writes):
        raise ForbiddenError(f"{event} {args}")


def example(data: bytes) -> None:
    """Writes a changed file, reads it, and restores the whole file."""
    number = data[0] % len(_SEEDS) if data else 0
    path, read = _SEEDS[number]
    path.write_bytes(data[1:])
    contents = {manifest: manifest.read_bytes() for manifest in path.parent.glob("manifest.*")}
    contents[path] = _CONTENTS[number]
    began = time.thread_time()
    _BUSY.append(path.parent)
    try:
        with contextlib.suppress(UserError):
            read(path)
        seconds = time.thread_time() - began
        if seconds > _SECONDS:
            raise TimeoutError(f"{seconds:.1f} seconds")
    finally:
        _BUSY.clear()
        for file, content in contents.items():
            file.write_bytes(content)
        gc.collect()  # Errors and their frames are circles, which may hold large arrays.


def main(target: str, folder: Path, seconds: str, *flags: str) -> None:
    warnings.simplefilter("ignore")
    made = folder / "files"
    corpus = folder / "corpus"
    made.mkdir(parents=True)
    corpus.mkdir()
    _SEEDS.extend(TARGETS[target](made))
    _CONTENTS.extend(path.read_bytes() for path, _ in _SEEDS)
    for number, content in enumerate(_CONTENTS):
        whole = bytes([number]) + content
        example(whole)
        (corpus / str(number)).write_bytes(whole)
    sys.addaudithook(watch)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, resource.RLIM_INFINITY))
    longest = 2 * max(map(len, _CONTENTS)) + 10_000
    options = [
        f"-max_total_time={seconds}",
        f"-artifact_prefix={folder}/",
        f"-max_len={longest}",
        "-len_control=0",
    ]
    options += ["-timeout=120", "-rss_limit_mb=0", "-print_final_stats=1", *flags, str(corpus)]
    atheris.Setup(
        [sys.argv[0], *options],
        example,
        custom_mutator=lambda data, limit, seed: change(data, limit, seed)[:limit],
    )
    gc.freeze()
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
