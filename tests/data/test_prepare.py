"""Tests published corpora: their table, archives, checks, places of files in miniature, records,
damage, downloads.
"""

import contextlib
import dataclasses
import functools
import hashlib
import http.server
import itertools
import os
import re
import shutil
import tarfile
import threading

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from support import miniature
from support.cases import full_but
from support.miniature import ARRANGEMENTS, arrange, place
from txl_jax.config import CorpusName, DataConfig, Heldout, Tokenizer
from txl_jax.data import prepare
from txl_jax.data.archives import open_files, read_files
from txl_jax.data.corpus_files import fit
from txl_jax.data.prepare import Tally
from txl_jax.data.published import ARCHIVE_SUFFIXES, CORPORA, WHOLE, Facts, Remote, check_file
from txl_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("miniatures")

TABLE = dict(CORPORA)  # As it is shipped.
ONE_FILE = tuple(name for name, row in TABLE.items() if row.cuts)
WORDS = tuple(
    name for name, row in TABLE.items() if all(facts.tokens for facts in row.facts.values())
)


def read(name, tmp_path, **options):
    return prepare.read(
        name, data_dir=str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"), **options
    )


def contents(text):
    return {
        split: b"".join(b"".join(file.blocks()) for file in files)
        for split, files in text.splits.items()
    }


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def expected_digest(name):
    parts = miniature.texts(name)
    if name in ONE_FILE:
        return sha256(b"".join(parts.values()))
    sums = {split: sha256(text) for split, text in parts.items()}
    if name is CorpusName.LM1B:
        sums["train"] = sha256("".join(map(sha256, miniature.shards(parts["train"]))).encode())
    return sha256("".join(sums.values()).encode())


def refusal(name, tmp_path, error=ValueError):
    """The error that reading gives; nothing is left that a later start would take for the
    corpus.
    """
    with pytest.raises(error) as caught:
        read(name, tmp_path)
    assert not list((tmp_path / "cache").rglob("*.array_record*"))
    assert not list((tmp_path / "cache").rglob("incomplete*"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


URL = "http://example.org/it.zip"
MEMBERS = {"box/b.txt": b"bee" * 50_000, "box/a.txt": b"ay", "box/c.txt": b"", "c.txt": b"sea"}
LAYOUT = {"one": ("b.txt",), "two": ("box/a.txt", "box/c.txt")}


def open_archive(path):
    return open_files([(path.name, str(path), URL)])


def opened(tmp_path, file, members=MEMBERS):
    return open_archive(write(tmp_path / file, miniature.archive(file, members)))


def write(path, content):
    path.write_bytes(content)
    return path


def unpacked_from(places, names):
    found = dict.fromkeys(names, b"")
    for each, block in read_files(
        {each: [each.size] for each in places if each.name in names}, 1 << 16
    ):
        found[each.name] += block
    return found


def test_files_are_found_by_the_ends_of_their_paths(tmp_path):
    for prefix in ("", "./", "some/where/"):
        names = ("box/b.txt", "box/a.txt", "box/c.txt", "box/not-b.txt", "b.txt.old")
        moved = opened(tmp_path, "moved.zip", {f"{prefix}{name}": b"" for name in names})
        found = fit(moved, [{"one": ("absent",)}, LAYOUT, {"one": ("a.txt",)}])
        expected = {
            part: [f"{prefix}box/{name[-5:]}" for name in of_part]
            for part, of_part in LAYOUT.items()
        }
        assert {part: [each.name for each in places] for part, places in found.items()} == expected


def test_missing_files_and_two_that_could_be_meant_are_named(tmp_path):
    archive = opened(tmp_path, "x.zip")
    with pytest.raises(UserError) as caught:
        fit(archive, [{"one": ("x", "y", "z")}, {"one": ("b.txt", "absent.txt")}])
    assert re.search(rf"^{tmp_path}/x\.zip\b.*\babsent\.txt\b.*{URL}", str(caught.value))
    assert not re.search(r"\b[yz]\b", str(caught.value)), "of the layout that lacks more"
    with pytest.raises(UserError, match=rf"{tmp_path}/x\.zip\b.* box/c\.txt\b.* c\.txt\b"):
        fit(archive, [{"one": ("c.txt",)}])


def test_links_and_devices_in_an_archive_are_not_files(tmp_path):
    link, content = tarfile.TarInfo("box/link"), miniature.archive("x.tar", MEMBERS)
    for link.type, link.linkname in [
        (tarfile.SYMTYPE, "../../a"),
        (tarfile.LNKTYPE, "c.txt"),
        (tarfile.CHRTYPE, ""),
    ]:
        places = open_archive(write(tmp_path / "x.tar", link.tobuf() + content))
        assert unpacked_from(places, list(MEMBERS)) == MEMBERS and len(places) == len(MEMBERS)


def read_all(path):
    archive = open_archive(path)
    fit(archive, [{"all": ("a", "b")}])
    return unpacked_from(archive, ["a", "b"])


@pytest.mark.parametrize("file", ["x.zip", "x.tar", "x.tar.gz"])
def test_an_archive_cut_anywhere_is_reported_as_damaged_or_lacking_a_file(file, tmp_path):
    members = {"a": b"ay" * 1500, "b": b"bee" * 1000}
    whole = miniature.archive(file, members)
    # A tar's blocks are filled up, and it ends in empty ones, all of which nobody misses.
    needed = len(whole.rstrip(b"\0")) if file == "x.tar" else len(whole)
    for length in [*range(0, needed, max(needed // 60, 1)), needed - 1]:
        with pytest.raises(UserError, match=rf"{tmp_path / file}\b.*{URL}"):
            read_all(write(tmp_path / file, whole[:length]))


def test_a_file_that_became_shorter_is_named(tmp_path):
    places = open_archive(write(tmp_path / "a.txt", b"text"))
    write(tmp_path / "a.txt", b"tex")
    with pytest.raises(UserError, match=rf"{tmp_path}/a\.txt\b.*{URL}"):
        unpacked_from(places, ["a.txt"])


PIECES = st.sampled_from(
    ["a", "bc", " ", "\n", "\r\n", "\n\n", "é", "\u3000", "\u00a0", "日本", "\t"]
)


@given(st.lists(PIECES, max_size=30).map("".join), st.lists(st.integers(0, 60), max_size=6))
def test_blocks_count_as_the_whole(text, cuts):
    content, counted = text.encode(), Tally()
    for first, last in itertools.pairwise(
        [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    ):
        if first < last:
            counted.add(content[first:last], words=True)
    assert counted.lines == text.count("\n") + (bool(text) and not text.endswith("\n"))
    assert counted.words == len(text.split())
    assert counted.sha256.hexdigest() == hashlib.sha256(content).hexdigest()


CASES = [
    (name, how)
    for name in miniature.NAMES
    for how in ARRANGEMENTS
    if TABLE[name].own_layouts or how != "by split"
]
# Each corpus once, and each arrangement once.
QUICK = [(name, "official") for name in miniature.NAMES] + [
    (CorpusName.PTB, how) for how in ARRANGEMENTS
]


@pytest.mark.parametrize(("name", "how"), full_but(QUICK, CASES))
def test_a_corpus_in_each_arrangement_of_files(name, how, tmp_path):
    arrange(tmp_path, name, how)
    records = tmp_path / "cache" / "tfds" / f"txl_{name}"
    (records / "1.0.0.incompleteX").mkdir(parents=True)  # Left by a killed process.
    before = stamps(tmp_path / "data")
    text, expected = read(name, tmp_path), miniature.texts(name)
    assert contents(text) == contents(text) == expected, "a text may be read twice"
    sizes = {split: sum(file.size for file in files) for split, files in text.splits.items()}
    assert sizes == {split: len(part) for split, part in expected.items()}
    assert text.digest == expected_digest(name), (
        "the digest does not depend on the arrangement of the files"
    )
    assert (text.name, text.closed_alphabet) == (name, TABLE[name].closed_alphabet)
    assert re.search(rf"{CORPORA[name].title}.*\b{sum(sizes.values()):,}\b", text.description)
    assert stamps(tmp_path / "data") == before, "the files are left alone"
    left = sorted(os.listdir(tmp_path / "cache" / "tfds"))
    assert left == [f".txl_{name}.lock", f"txl_{name}"] and os.listdir(records) == ["1.0.0"], (
        "nothing is left over"
    )
    shutil.rmtree(tmp_path / "data")
    before, again = stamps(tmp_path / "cache"), read(name, tmp_path)
    assert contents(again) == expected and stamps(tmp_path / "cache") == before, (
        "it needs nothing else"
    )
    assert (again.name, again.description, again.digest) == (
        text.name,
        text.description,
        text.digest,
    )


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("name", full_but([CorpusName.LM1B], miniature.NAMES))
def test_many_files_of_records(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "RECORD_BYTES", 1000)
    monkeypatch.setattr(prepare, "SHARD_RECORDS", 7)
    arrange(tmp_path, name)
    assert contents(read(name, tmp_path)) == miniature.texts(name)
    files = sorted((tmp_path / "cache" / "tfds" / f"txl_{name}").rglob("*train*"))
    assert len(files) == -(-len(miniature.texts(name)["train"]) // 7000) > 5


def test_one_billion_words_files_and_heldout_shards(tmp_path):
    arrange(tmp_path, CorpusName.LM1B)
    texts, separate = miniature.texts(CorpusName.LM1B), read(CorpusName.LM1B, tmp_path)
    same = read(CorpusName.LM1B, tmp_path, heldout=Heldout.PUBLISHED)
    assert contents(separate) == texts and separate.digest != same.digest
    assert contents(same) == texts | {"valid": texts["test"]}
    names = [f"lm1b train, news.en-0000{i}-of-00100" for i in (1, 2, 3)]
    assert [file.name for file in separate.splits["train"]] == names, "for errors"


def test_a_wrong_byte_and_another_number_of_bytes(tmp_path):
    whole, known = (
        miniature.files(CorpusName.ENWIK8)["enwik8"],
        CORPORA[CorpusName.ENWIK8].facts[WHOLE].sha256,
    )
    wrong = whole[:250_000] + bytes([whole[250_000] ^ 1]) + whole[250_001:]
    for text, named in (
        (wrong, rf"{sha256(wrong)}\b.*\b{known}"),
        (b"x" * 1234, r"1,234\b.*\b300,008"),
    ):
        place(tmp_path / "data", {"enwik8": text})
        assert re.search(
            rf"{tmp_path}/data/enwik8\b.*\b{named}\b", refusal(CorpusName.ENWIK8, tmp_path)
        )


@pytest.mark.parametrize("name", miniature.PACKED)
def test_an_official_archive_with_other_content(name, tmp_path):
    path, whole = tmp_path / "data" / miniature.OFFICIAL[name], miniature.official(name)
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    found, known = sha256(changed), sha256(whole)
    sizes = rf"{len(whole) - 1:,}\b.*\b{len(whole):,}"
    for content, wrong in ((whole[:-1], sizes), (changed, rf"{found}\b.*\b{known}")):
        place(tmp_path / "data", {path.name: content})
        assert re.search(rf"^{path}\b.*\b{wrong}\b", refusal(name, tmp_path))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("name", WORDS)
def test_another_number_of_tokens(name, split, tmp_path):
    text, known = miniature.texts(name)[split], CORPORA[name].facts[split].tokens
    changes = {
        text[:-1] + b"\nmore words here\n": known + 4 + (not text.endswith(b" \n")),
        text + b"\n": known + 1,
    }
    for changed, count in changes.items():
        arrange(tmp_path, name, "by split")
        path = tmp_path / "data" / TABLE[name].folders[-1] / f"{split}.txt"
        path.write_bytes(changed)
        assert re.search(rf"^{path}\b.*\b{count:,}\b.*\b{known:,}\b", refusal(name, tmp_path))


def test_the_same_words_in_other_bytes_are_noted(tmp_path, capsys):
    """Copies of the Penn Treebank differ in the white space around lines; the counts do not."""
    stripped = (
        b"\n".join(line.strip() for line in miniature.texts(CorpusName.PTB)["valid"].splitlines())
        + b"\n"
    )
    parts = miniature.texts(CorpusName.PTB) | {"valid": stripped}
    place(tmp_path / "data", {f"ptb.{split}.txt": text for split, text in parts.items()})
    assert contents(read(CorpusName.PTB, tmp_path)) == parts
    (note,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if re.search(r"\b(train|valid|test)\b", line)
    ]
    assert "Penn Treebank" in note and "valid" in note


def test_a_folder_with_another_number_of_sentences_or_without_a_file(tmp_path):
    arrange(tmp_path, CorpusName.LM1B, "unpacked")
    path = next((tmp_path / "data").rglob("news.en-00001-of-00100"))
    path.write_bytes(path.read_bytes() + b"One more .\n")
    known = CORPORA[CorpusName.LM1B].facts["train"].lines
    assert re.search(
        rf"{path.name}.*\b{known + 1:,}\b.*\b{known:,}\b", refusal(CorpusName.LM1B, tmp_path)
    )
    for name, gone in (
        (CorpusName.PTB, "ptb.valid.txt"),
        (CorpusName.LM1B, "news.en-00002-of-00100"),
    ):
        arrange(tmp_path, name, "unpacked")
        (path,) = (tmp_path / "data").rglob(gone)
        path.unlink()
        lacking = path.relative_to(tmp_path / "data")
        assert re.search(
            rf"{tmp_path}/data\b.* {lacking}\b.*{CORPORA[name].title}", refusal(name, tmp_path)
        )


def test_common_names_count_only_in_the_corpuss_own_folder_and_a_whole_corpus_wins(tmp_path):
    place(
        tmp_path / "data",
        {f"{split}.txt": text for split, text in miniature.texts(CorpusName.PTB).items()},
    )
    refusal(CorpusName.PTB, tmp_path, UserError)
    os.rename(tmp_path / "data", tmp_path / "ptb")
    text = prepare.read(
        CorpusName.PTB, data_dir=str(tmp_path / "ptb"), cache_dir=str(tmp_path / "cache")
    )
    assert contents(text) == miniature.texts(CorpusName.PTB)
    arrange(tmp_path, CorpusName.WIKITEXT2, "by split")
    next((tmp_path / "data").rglob("valid.txt")).unlink()
    arrange(tmp_path, CorpusName.WIKITEXT2, "downloads/manual")
    assert contents(read(CorpusName.WIKITEXT2, tmp_path)) == miniature.texts(CorpusName.WIKITEXT2)


@pytest.mark.parametrize("name", miniature.NAMES)
def test_without_files_and_network_every_source_is_asked_once_and_named(
    name, tmp_path, monkeypatch
):
    monkeypatch.setitem(CORPORA, name, TABLE[name])
    asked, head = [], requests.head
    monkeypatch.setattr(
        requests, "head", lambda url, **options: (asked.append(url), head(url, **options))
    )
    message = refusal(name, tmp_path, UserError)
    assert sorted(asked) == sorted(source[0].url for source in TABLE[name].sources)
    assert all(source[0].url in message for source in TABLE[name].sources)
    assert all(remote.file in message for source in TABLE[name].sources for remote in source)
    assert re.search(rf"{tmp_path / 'data' / TABLE[name].folders[0]}\b.*--data_dir\b", message)
    assert ("--data.file=PATH" in message) == (name in ONE_FILE)


def test_a_damaged_cache(tmp_path):
    arrange(tmp_path, CorpusName.ENWIK8)
    read(CorpusName.ENWIK8, tmp_path)
    folder = tmp_path / "cache" / "tfds" / "txl_enwik8" / "1.0.0"
    (path,) = folder.rglob("*train*")
    whole = path.read_bytes()
    flipped = whole[:70_000] + bytes([whole[70_000] ^ 1]) + whole[70_001:]
    for content in (whole[: len(whole) // 2], b"", flipped, None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{folder}\b"):
            contents(read(CorpusName.ENWIK8, tmp_path))
    path.write_bytes(whole)
    for name, content in itertools.product(("metadata.json", "dataset_info.json"), (b"", b"{")):
        (folder / name).write_bytes(content)
        with contextlib.suppress(UserError):  # Never another text.
            assert contents(read(CorpusName.ENWIK8, tmp_path)) == miniature.texts(CorpusName.ENWIK8)
    shutil.rmtree(folder)
    assert contents(read(CorpusName.ENWIK8, tmp_path)) == miniature.texts(CorpusName.ENWIK8)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the server's folder, and keeps what it was asked."""

    def log_request(self, *args):
        self.server.asked.append(f"{self.command} {self.path}")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A running server on this machine, with its URL and the requests that it had.

    `serve` gives it a file, and `set_sources` makes files the sources of a corpus.
    """
    (folder := tmp_path / "served").mkdir()
    running = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=folder)
    )

    def serve(file, content):
        write(folder / file, content)
        return miniature.remote(file, content, running.url)

    def set_sources(name, *sources):
        monkeypatch.setitem(
            CORPORA, name, dataclasses.replace(miniature.corpus(name), sources=sources)
        )

    running.asked, running.serve, running.set_sources = [], serve, set_sources
    running.url = f"http://127.0.0.1:{running.server_port}/"
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "packed"), [*((name, True) for name in miniature.NAMES), (CorpusName.PTB, False)]
)
def test_a_corpus_is_downloaded_once(name, packed, server, tmp_path):
    files = {f"ptb.{split}.txt": text for split, text in miniature.texts(name).items()}
    files = {miniature.OFFICIAL[name]: miniature.official(name)} if packed else files
    server.set_sources(name, tuple(server.serve(file, content) for file, content in files.items()))
    assert contents(read(name, tmp_path)) == miniature.texts(name)
    assert server.asked == [f"HEAD /{next(iter(files))}", *(f"GET /{file}" for file in files)]
    assert sorted(os.listdir(tmp_path / "cache" / "tfds")) == [
        f".txl_{name}.lock",
        f"txl_{name}",
    ], "no copy is kept"
    assert not (tmp_path / "data").exists()
    read(name, tmp_path)
    assert len(server.asked) == 1 + len(files)


@pytest.mark.full
@pytest.mark.parametrize(
    "dead", ["nothing listens", "not found", "other file", "other size", "no archive"]
)
def test_the_next_source_is_taken(dead, server, tmp_path):
    whole = miniature.official(CorpusName.ENWIK8)
    good = server.serve("enwik8.zip", whole)
    bad = {
        "nothing listens": miniature.remote("enwik8.zip", whole),
        "not found": miniature.remote("absent.zip", whole, server.url),
        "other file": dataclasses.replace(
            server.serve("other.zip", b"x" * len(whole)), sha256=good.sha256
        ),
        "other size": Remote(server.serve("short.zip", whole[:-1]).url, size=len(whole)),
        "no archive": Remote(server.serve("page.zip", b"<html>sign in</html>").url),
    }[dead]
    server.set_sources(CorpusName.ENWIK8, (bad,), (good,))
    assert contents(read(CorpusName.ENWIK8, tmp_path)) == miniature.texts(CorpusName.ENWIK8)
    assert "GET /enwik8.zip" in server.asked
    assert sorted(os.listdir(tmp_path / "cache" / "tfds")) == [".txl_enwik8.lock", "txl_enwik8"]


@pytest.mark.full
def test_a_download_outlives_a_failure_that_came_after_it(server, tmp_path, monkeypatch):
    server.set_sources(
        CorpusName.PTB, (server.serve("simple-examples.tgz", miniature.official(CorpusName.PTB)),)
    )

    def full(self, block, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(prepare.Tally, "add", full)
        # Rest of a killed download, which the next start removes.
        cut = tmp_path / "cache" / "tfds" / "txl_ptb_downloads" / "txl_ptb" / "x.tmp.123"
        cut.mkdir(parents=True)
        with pytest.raises(
            UserError, match=r"\bPenn Treebank\b.*\bNo space left on device\b.*--cache_dir\b"
        ):
            read(CorpusName.PTB, tmp_path)
        assert not cut.exists()
    assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)
    assert [line for line in server.asked if line.startswith("GET")] == ["GET /simple-examples.tgz"]
    assert sorted(os.listdir(tmp_path / "cache" / "tfds")) == [".txl_ptb.lock", "txl_ptb"]


@pytest.mark.full
def test_what_came_and_is_not_the_corpus(server, tmp_path):
    """An unknown checksum lets it in, its content does not; the next start asks again instead of
    keeping it.
    """
    members = dict(miniature.files(CorpusName.PTB))
    members["./simple-examples/data/ptb.test.txt"] += b"more\n"
    server.serve("simple-examples.tgz", miniature.archive(".tgz", members))
    server.set_sources(CorpusName.PTB, (Remote(server.url + "simple-examples.tgz"),))
    known = CORPORA[CorpusName.PTB].facts["test"].tokens
    # The line that was added counts as a word and a line's end.
    with pytest.raises(
        UserError, match=rf"ptb\.test\.txt\b.*\b{known + 2:,}\b.*\b{known:,}\b.*{server.url}simple"
    ):
        read(CorpusName.PTB, tmp_path)
    server.serve("simple-examples.tgz", miniature.official(CorpusName.PTB))
    assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)


@pytest.mark.parametrize("name", TABLE)
def test_a_row_is_complete(name):
    row = TABLE[name]
    row.defaults.validate()
    assert row.defaults.corpus is name and row.vocab_size > 1
    assert set(row.facts) == ({WHOLE} if row.cuts else {"train", "valid", "test"})
    assert all(set(layout) == set(row.facts) for layout in row.layouts + row.own_layouts)
    assert row.contents and not row.contents.endswith(".")
    assert sum(row.cuts.values()) in (0, row.facts.get(WHOLE, Facts(size=0)).size)
    layouts = [
        {file for files in layout.values() for file in files}
        for layout in row.layouts + row.own_layouts
    ]
    for source in row.sources:
        plain = {remote.file for remote in source if not remote.is_archive}
        unknown = plain.difference(*layouts)
        assert not unknown, (
            f"{unknown} are in no layout, and end in none of the archives' {ARCHIVE_SUFFIXES}"
        )
        assert not plain or {remote.file for remote in source} in layouts, (
            "files are found by a layout"
        )
    for known in (*row.facts.values(), *itertools.chain(*row.sources)):
        assert known.sha256 is None or re.fullmatch("[0-9a-f]{64}", known.sha256), known
    if row.defaults.tokenizer.kind is Tokenizer.BYTE and not row.closed_alphabet:
        assert row.vocab_size == 256


def test_a_part_is_read_of_one_file_alone_and_only_local_files_have_no_row():
    assert set(CorpusName) - set(TABLE) == {CorpusName.TEXT, CorpusName.PYTHON_STDLIB}
    for name in CorpusName:
        data = DataConfig(corpus=name, file="a")
        if name is CorpusName.TEXT or (name in CORPORA and CORPORA[name].cuts):
            check_file(data)
        else:
            with pytest.raises(UserError, match=rf"^data\.file is 'a'.*\b{name}\b"):
                check_file(data)
            check_file(dataclasses.replace(data, file=None))
