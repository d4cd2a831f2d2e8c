"""Fuzzes the readers of strangers' files with atheris: `python fuzz_readers.py TARGET FOLDER
SECONDS [FLAGS]`.

An input is a byte, which chooses one of the target's whole files, and what that file holds in its
place. A reader must return or raise `UserError`, in a second and little memory, and may write, run
and reach nothing. The first input for which it does anything else ends the program, which keeps it
in FOLDER.
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

# Files that reach other lines of these are kept, and changed further.
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

_SECONDS = 1.0  # Of the processor, per example.
_MEMORY = 1 << 30  # Bytes of address space beyond what the program has when it begins.
convert_quietly = functools.partial(convert, log=lambda line: None)
Reader = Callable[[Path], Any]  # Takes the file's path.
Seed = tuple[Path, Reader]  # A file that is whole, and what reads it.


# What reads a file


def read_model(path: Path) -> None:
    for leaf in formats.read(
        path if path.suffix in (".bin", ".pt") else path.parent
    ).leaves.values():
        assert leaf.read().shape == leaf.shape


def read_tensors(path: Path) -> None:
    found = safetensors.read(path)
    for leaf in found.values():
        assert leaf.read().shape == leaf.shape
    read_model(path)


def read_statistics(path: Path) -> None:
    """Reads the statistics of dynamic evaluation of a model with the arrays of `headers`."""
    file = dynamic_statistics._read(str(path))
    dynamic_statistics._mismatch(file, {"eval.mem_len": "3"})
    dynamic_statistics._check(file, {"a": (2,), "b/c": (3, 5)})


def use(found: vocabulary.Vocabulary) -> None:
    """Calls everything that a vocabulary offers; the saved form must be the same vocabulary."""
    assert vocabulary.loads(vocabulary.dumps(found), KINDS) == found
    found.decode(np.arange(min(found.size, 1 << 20)))
    found.byte_lengths  # noqa: B018
    if found.size < 1 << 16:
        found.names()
    found.start, found.unknown_id, found.mark  # noqa: B018
    with contextlib.suppress(UserError):
        found.encode(b"one a\nthe banana")


def read_foreign_vocabulary(path: Path) -> None:
    with contextlib.suppress(UserError):
        foreign_vocabulary.find(path.parent, 3)
    if found := (
        foreign_vocabulary._of_text(path)
        if path.suffix == ".txt"
        else foreign_vocabulary.of_object(
            foreign_vocabulary.torch_files.read(path).root, name=str(path)
        )
    ).vocabulary:
        use(found)


def read_portable(path: Path) -> None:
    """Opens a portable checkpoint, builds its model, and compares it with the weights."""
    found = trained.open_weights(path.parent)
    portable._card(found.source, 1)
    portable.place(portable.read_leaves(path.parent), _abstract(found.config, found.vocabulary))


@functools.lru_cache(maxsize=64)
def _abstract(config: Any, words: vocabulary.Vocabulary) -> Any:
    return build_for(config, words).abstract_state.params


def read_run(path: Path) -> None:
    """Reads a run, its records and its checkpoints' digests and notes, as programs do."""
    folder = next(each for each in path.parents if (each / "vocabulary.txt").exists())
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
    folder = path.parent
    if path.name != exported._MANIFEST:
        manifest = json.loads((folder / exported._MANIFEST).read_bytes())
        manifest["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        (folder / exported._MANIFEST).write_text(json.dumps(manifest))
    content = (folder / exported._MANIFEST).read_bytes()
    (folder / exported._DIGEST).write_bytes(exported._digest_line(content))
    exported.read(folder)


def read_json_lines(path: Path) -> None:
    with open(path, "rb") as lines:
        list(text.json_texts(lines, "text", name=str(path)))


def read_archive(path: Path) -> None:
    """Reads all members of an archive, as many bytes as a corpus has."""
    places = archive_files.open_files([(path.name, str(path), "http://example.org")])
    pieces = {place: [min(place.size, 100_000)] for place in places}
    list(archive_files.read_files(pieces, 1 << 16))


# Whole files


def _models(folder: Path) -> list[Path]:
    """Weights and a vocabulary of other implementations, each in its own directory."""
    folder.mkdir(exist_ok=True)
    found = []
    for name, changes in (("tied", {}), ("clusters", foreign.CONFIGS["div_val 2"])):
        config, params = foreign.make("hf", **changes)
        made = foreign.huggingface_folder(folder / name, config, params)
        (made / "vocab.txt").write_text("\n".join(foreign.WORDS))
        zipped = foreign.huggingface_folder(
            folder / f"{name}-zip", config, params, write=torch_bytes.write_zip
        )
        found += [made / "pytorch_model.bin", zipped / "pytorch_model.bin"]
    config, params = foreign.make("pytorch", untie_r=True)
    (folder / "original").mkdir()
    torch_bytes.write_zip(folder / "original" / "model.pt", foreign.pickled_module(config, params))
    config, params = foreign.make("pytorch", **foreign.CONFIGS["div_val 1"])
    (folder / "nvidia").mkdir()
    torch_bytes.write_legacy(
        folder / "nvidia" / "checkpoint_best.pt", foreign.nvidia_checkpoint(config, params)
    )
    return [*found, folder / "original" / "model.pt", folder / "nvidia" / "checkpoint_best.pt"]


def pickles(folder: Path) -> list[Seed]:
    return [(path, read_model) for path in _models(folder)]


def headers(folder: Path) -> list[Seed]:
    config, params = foreign.make("hf", untie_r=True)
    theirs = foreign.huggingface_folder(folder / "theirs", config, params)
    found = formats.read(theirs)
    convert_quietly(theirs, folder / "original", to_format=TargetFormat.ORIGINAL)
    safetensors.write(theirs / "model.safetensors", found.leaves)
    statistics = folder / dynamic_statistics.NAME
    sums = {"a": np.ones(2, np.float32), "b": {"c": np.ones((3, 5), np.float32)}}
    dynamic_statistics._write(str(statistics), sums, {"eval.mem_len": "3"})
    return [
        (statistics, read_statistics),
        (theirs / "model.safetensors", read_tensors),
        (folder / "original" / "model.safetensors", read_tensors),
    ]


def vocabularies(folder: Path) -> list[Seed]:
    ours = [
        ByteVocabulary(b"\n abc"),
        CharacterVocabulary("ab c\N{REPLACEMENT CHARACTER}"),
        IdVocabulary(size=5),
    ]
    ours += [WordVocabulary(foreign.WORDS)]
    kinds = ("byte_level", "word_pieces", "meta_space", "whole_words", "few_letters")
    tokenizers = [getattr(hf_tokenizers, kind)() for kind in kinds]
    files: dict[str, tuple[bytes, Reader]] = {}
    for number, each in enumerate([*ours, *map(subwords.SubwordVocabulary, tokenizers)]):
        content = vocabulary.dumps(each).encode()
        files[f"ours{number}/vocabulary.txt"] = (
            content,
            lambda path: use(portable.read_vocabulary(path)),
        )
    for number, each in enumerate(tokenizers):
        files[f"given{number}/tokenizer.json"] = (
            each.encode(),
            lambda path: use(subwords.given_tokenizer(str(path))),
        )
    lists = [list(foreign.WORDS), ["101", "10", "97"], ["_", "a", "b"]]
    for number, words in enumerate(lists):
        files[f"words{number}/vocab.txt"] = ("\n".join(words).encode(), read_foreign_vocabulary)
        value = {"dataset": "enwik8", "vocab": {"idx2sym": words, "lower_case": False}}
        files[f"pickle{number}/cache.pkl"] = (pickle.dumps(value, 2), read_foreign_vocabulary)
        files[f"torch{number}/vocab.bin"] = (
            pickle.dumps(value["vocab"], 4),
            read_foreign_vocabulary,
        )
    return [(_write(folder / name, content), reader) for name, (content, reader) in files.items()]


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
    record = json.loads((ensemble / "config.json").read_text()) | {
        "attention": {"training": "tiled 8x8"}
    }
    (ensemble / "config.json").write_text(json.dumps(record | {"warm_start": start}))
    step = next((workdir / "checkpoints" / "best").iterdir())
    names = ("config.json", "results.json", "metrics.jsonl")
    found = [(run / name, read_run) for run in (finished, ensemble) for name in names]
    found += [(workdir / "config.json", read_run), (workdir / "vocabulary.txt", read_run)]
    found += [(step / "digests.json", read_run), (step / "notes" / "metadata", read_run)]
    found += [(folder / "portable" / "config.json", read_portable)] * 3
    found += [(folder / "theirs" / "config.json", read_model)]
    models = _models(folder / "models")
    found += [(path.with_name("config.json"), read_model) for path in models[:2]]
    with contextlib.redirect_stdout(None):
        export.run(export.Plan(from_=str(workdir), to=str(folder / "exported")), None)
    found += [
        (folder / "exported" / name, read_exported)
        for name in ("manifest.json", "score.jax_export")
    ]
    store = next((folder / "run-text").rglob("store.json"))
    found += [
        (store, lambda path: token_store._is_whole(path.parent) and token_store._load(path.parent))
    ]
    found += [
        (
            _write(folder / "own" / "a.jsonl", b'{"text": "a"}\n{"text": "b\\u00e9"}\n'),
            read_json_lines,
        )
    ]
    np.save(folder / "own" / "a.npy", np.arange(9, dtype=np.uint16))
    found += [
        (
            folder / "own" / "a.npy",
            lambda path: id_files._scan(id_files._open("file", [str(path)]), "file"),
        )
    ]
    return found


def archives(folder: Path) -> list[Seed]:
    members = {"box/b.txt": b"bee" * 500, "box/a.txt": b"ay", "box/c.txt": b"", "c.txt": b"sea"}
    files = ("x.zip", "x.tar", "x.tar.gz")
    found = [_write(folder / file, miniature.archive(file, members)) for file in files]
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        info = tarfile.TarInfo("é" * 200)
        info.pax_headers = {"comment": "x" * 20}
        content = info.tobuf(format) + bytes(1024)
        found.append(_write(folder / f"{format}.tar", content))
        found.append(_write(folder / f"{format}.tar.gz", gzip.compress(content, mtime=0)))
    return [(path, read_archive) for path in found]


TARGETS: dict[str, Callable[[Path], list[Seed]]] = {
    each.__name__: each for each in (pickles, headers, vocabularies, manifests, archives)
}


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# Changes of a file beside libFuzzer's own

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


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        found.append((value, key))
        _places(inner, found)
    return found


def change_json(data: bytes, draw: random.Random) -> bytes:
    """Puts odd values, or others of its own, in places of a JSON value; removes, renames and nests
    some.
    """
    value = json.loads(data)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        places = _places(value, [])
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
                    container[key] = (
                        [container[key]] if draw.randrange(2) else {"a": container[key]}
                    )
            case _:
                container[key] = draw.choice(ODD)
    return json.dumps(value).encode()


def json_in(path: Path, data: bytes, draw: random.Random) -> tuple[int, int]:
    """Returns where a JSON value of a file begins and ends; raises for a file without one."""
    if path.suffix == ".safetensors":
        return 8, 8 + struct.unpack("<Q", data[:8])[0]
    if path.suffix == ".jsonl":
        return draw.choice([line.span() for line in re.finditer(rb"[^\n]+", data)])
    if path.name == "vocabulary.txt":
        return data.index(b"{"), data.index(b"\n")
    return 0, len(data)


def change(data: bytes, limit: int, seed: int) -> bytes:
    """Changes bytes as libFuzzer does, or JSON's values, or what is compressed below the
    compression.
    """
    draw, start, rest = random.Random(seed), data[:1] or b"\0", data[1:]
    with contextlib.suppress(Exception):
        if rest[:2] == b"\x1f\x8b" and draw.randrange(8):
            return start + gzip.compress(atheris.Mutate(gzip.decompress(rest), limit), 1, mtime=0)
        if draw.randrange(4):
            path = _SEEDS[start[0] % len(_SEEDS)][0]
            first, last = json_in(path, rest, draw)
            changed = change_json(rest[first:last], draw)
            before = (
                struct.pack("<Q", len(changed)) if path.suffix == ".safetensors" else rest[:first]
            )
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
    """What no file may make a reader do."""


def watch(event: str, args: tuple[Any, ...]) -> None:
    if not _BUSY:
        return
    is_written = (
        event == "open"
        and isinstance(args[2], int)
        and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    )
    outside = not str(args[0] if args else "").startswith(str(_BUSY[0]))
    if event in _FORBIDDEN or (outside and (event in _WRITING or is_written)):
        raise ForbiddenError(f"{event} {args}")


def example(data: bytes) -> None:
    """Writes one changed file, reads it, and puts the whole one back."""
    number = data[0] % len(_SEEDS) if data else 0
    path, read = _SEEDS[number]
    path.write_bytes(data[1:])
    beside = {each: each.read_bytes() for each in path.parent.glob("manifest.*") if each != path}
    began = time.thread_time()
    _BUSY.append(path.parent)
    try:
        with contextlib.suppress(UserError):
            read(path)
        if (seconds := time.thread_time() - began) > _SECONDS:
            raise TimeoutError(f"{seconds:.1f} seconds")
    finally:
        _BUSY.clear()
        for each, content in [*beside.items(), (path, _CONTENTS[number])]:
            each.write_bytes(content)
        gc.collect()  # Errors and their frames are circles, which may hold large arrays.


def main(target: str, folder: Path, seconds: str, *flags: str) -> None:
    warnings.simplefilter("ignore")
    made, corpus = folder / "files", folder / "corpus"
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
        [sys.argv[0], *options], example, custom_mutator=lambda *given: change(*given)[: given[1]]
    )
    gc.freeze()
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
