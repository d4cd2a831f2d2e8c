"""Tests published corpora: their table, archives, checks, places of files in miniature, records,
corruption, downloads.
"""

import contextlib
import dataclasses
import errno
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
ONE_FILE = (CorpusName.ENWIK8, CorpusName.TEXT8)
WORDS = (CorpusName.WIKITEXT103, CorpusName.WIKITEXT2, CorpusName.PTB)


def read(name, tmp_path, **options):
    return prepare.read(
        name, data_dir=str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"), **options
    )


def contents(text):
    """The bytes of each split."""
    splits = {}
    for split, files in text.splits.items():
        content = b""
        for file in files:
            content += b"".join(file.blocks())
        splits[split] = content
    return splits


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def split_files(texts):
    """Files of splits as Penn Treebank has them, by their names."""
    return {f"ptb.{split}.txt": text for split, text in texts.items()}


def expected_digest(name):
    """The digest of a miniature, computed only from its splits."""
    parts = miniature.texts(name)
    if name in ONE_FILE:
        return sha256(b"".join(parts.values()))
    sums = {split: sha256(text) for split, text in parts.items()}
    if name is CorpusName.LM1B:
        sums["train"] = sha256("".join(map(sha256, miniature.shards(parts["train"]))).encode())
    return sha256("".join(sums.values()).encode())


def reading_error(name, tmp_path, error=ValueError):
    """The error message of reading. Nothing is left that a later start would take for the
    corpus.
    """
    with pytest.raises(error) as caught:
        read(name, tmp_path)
    assert not list((tmp_path / "cache").rglob("*.array_record*"))
    assert not list((tmp_path / "cache").rglob("incomplete*"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


URL = "http://example.org/it.zip"
# The largest member comes in several blocks.
MEMBERS = {"box/b.txt": b"bee" * 50_000, "box/a.txt": b"ay", "box/c.txt": b"", "c.txt": b"sea"}
LAYOUT = {"one": ("b.txt",), "two": ("box/a.txt", "box/c.txt")}


def open_archive(path):
    return open_files([(path.name, str(path), URL)])


def opened(tmp_path, file, members=MEMBERS):
    """The files of a new archive with these members."""
    return open_archive(write(tmp_path / file, miniature.archive(file, members)))


def write(path, content):
    path.write_bytes(content)
    return path


def unpacked_from(places, names):
    """The bytes of some files of an archive, by their names."""
    wanted = {file: [file.size] for file in places if file.name in names}
    unpacked = dict.fromkeys(names, b"")
    for file, block in read_files(wanted, 1 << 16):
        unpacked[file.name] += block
    return unpacked


def names_of(places):
    """The names of each part's files."""
    return {part: [file.name for file in files] for part, files in places.items()}


@pytest.mark.parametrize("prefix", ["", "./", "some/where/"])
def test_files_are_found_by_the_ends_of_their_paths(prefix, tmp_path):
    """Whole names count: box/not-b.txt is not b.txt. The first layout that fits is taken."""
    names = ("box/b.txt", "box/a.txt", "box/c.txt", "box/not-b.txt", "b.txt.old")
    moved = opened(tmp_path, "moved.zip", {f"{prefix}{name}": b"" for name in names})

    places = fit(moved, [{"one": ("absent",)}, LAYOUT, {"one": ("a.txt",)}])

    assert names_of(places) == {
        "one": [f"{prefix}box/b.txt"],
        "two": [f"{prefix}box/a.txt", f"{prefix}box/c.txt"],
    }


def test_missing_files_are_named(tmp_path):
    """Only in the layout that lacks the fewest."""
    archive = opened(tmp_path, "x.zip")
    with pytest.raises(UserError) as caught:
        fit(archive, [{"one": ("x", "y", "z")}, {"one": ("b.txt", "absent.txt")}])
    assert re.search(rf"^{tmp_path}/x\.zip\b.*\babsent\.txt\b.*{URL}", str(caught.value))
    assert not re.search(r"\b[yz]\b", str(caught.value)), "of the layout that lacks more"


def test_two_files_that_could_be_meant_are_named(tmp_path):
    archive = opened(tmp_path, "x.zip")
    with pytest.raises(UserError, match=rf"{tmp_path}/x\.zip\b.* box/c\.txt\b.* c\.txt\b"):
        fit(archive, [{"one": ("c.txt",)}])


# `target` is where a link leads.
@pytest.mark.parametrize(
    ("kind", "target"),
    [(tarfile.SYMTYPE, "../../a"), (tarfile.LNKTYPE, "c.txt"), (tarfile.CHRTYPE, "")],
    ids=["symbolic link", "hard link", "device"],
)
def test_links_and_devices_in_an_archive_are_not_files(kind, target, tmp_path):
    link = tarfile.TarInfo("box/link")
    link.type = kind
    link.linkname = target
    content = miniature.archive("x.tar", MEMBERS)

    places = open_archive(write(tmp_path / "x.tar", link.tobuf() + content))

    assert len(places) == len(MEMBERS)
    assert unpacked_from(places, list(MEMBERS)) == MEMBERS


def read_all(path):
    """Reads both files of an archive."""
    archive = open_archive(path)
    fit(archive, [{"all": ("a", "b")}])
    return unpacked_from(archive, ["a", "b"])


def error_of_reading_all(path):
    """The error message, which is empty if the archive can be read."""
    try:
        read_all(path)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("file", ["x.zip", "x.tar", "x.tar.gz"])
def test_an_archive_cut_anywhere_is_reported_as_corrupted_or_lacking_a_file(file, tmp_path):
    members = {"a": b"ay" * 1500, "b": b"bee" * 1000}
    whole = miniature.archive(file, members)
    # A tar's blocks are filled up, and it ends in empty ones, all of which nobody misses.
    needed = len(whole.rstrip(b"\0")) if file == "x.tar" else len(whole)
    # At about sixty places, and before the last byte.
    for length in [*range(0, needed, max(needed // 60, 1)), needed - 1]:
        message = error_of_reading_all(write(tmp_path / file, whole[:length]))
        assert re.search(rf"{tmp_path / file}\b.*{URL}", message), f"{length} of {needed} bytes"


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
    """Lines, words and the sum, wherever a text is cut."""
    content = text.encode()
    edges = sorted([0, *cuts, len(content)])
    tally = Tally()
    for first, last in itertools.pairwise(edges):
        if content[first:last]:
            tally.add(content[first:last], words=True)

    n_open_lines = 1 if text and not text.endswith("\n") else 0
    assert tally.lines == text.count("\n") + n_open_lines
    assert tally.words == len(text.split())
    assert tally.sha256.hexdigest() == sha256(content)


def cases():
    """Each corpus in each arrangement of files that it can have."""
    pairs = []
    for name in miniature.NAMES:
        for how in ARRANGEMENTS:
            if TABLE[name].own_layouts or how != "by split":
                pairs.append((name, how))
    return pairs


# Each corpus once, and each arrangement once.
QUICK = [(name, "official") for name in miniature.NAMES]
QUICK += [(CorpusName.PTB, how) for how in ARRANGEMENTS]


@pytest.mark.parametrize(("name", "how"), full_but(QUICK, cases()))
def test_a_corpus_in_each_arrangement_of_files(name, how, tmp_path):
    """Its text, metadata and digest do not depend on the arrangement. The files are not touched."""
    arrange(tmp_path, name, how)
    records = tmp_path / "cache" / "tfds" / f"txl_{name}"
    (records / "1.0.0.incompleteX").mkdir(parents=True)  # Left by a killed process.
    files_before = stamps(tmp_path / "data")

    text = read(name, tmp_path)

    expected = miniature.texts(name)
    assert contents(text) == expected
    assert contents(text) == expected, "a text may be read twice"
    sizes = {split: sum(file.size for file in files) for split, files in text.splits.items()}
    assert sizes == {split: len(part) for split, part in expected.items()}
    assert text.name == name
    assert text.digest == expected_digest(name)
    assert text.closed_alphabet == TABLE[name].closed_alphabet
    assert re.search(rf"{CORPORA[name].title}.*\b{sum(sizes.values()):,}\b", text.description)
    assert stamps(tmp_path / "data") == files_before
    assert sorted(os.listdir(records.parent)) == [f".txl_{name}.lock", f"txl_{name}"]
    assert os.listdir(records) == ["1.0.0"], "nothing is left over"

    # The records need nothing else.
    shutil.rmtree(tmp_path / "data")
    records_before = stamps(tmp_path / "cache")
    again = read(name, tmp_path)
    assert contents(again) == expected
    assert stamps(tmp_path / "cache") == records_before
    assert again.name == text.name
    assert again.description == text.description
    assert again.digest == text.digest


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("name", full_but([CorpusName.LM1B], miniature.NAMES))
def test_many_files_of_records(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "RECORD_BYTES", 1000)
    monkeypatch.setattr(prepare, "SHARD_RECORDS", 7)
    file_bytes = 7 * 1000
    arrange(tmp_path, name)

    assert contents(read(name, tmp_path)) == miniature.texts(name)
    files = sorted((tmp_path / "cache" / "tfds" / f"txl_{name}").rglob("*train*"))
    n_expected = -(-len(miniature.texts(name)["train"]) // file_bytes)
    assert len(files) == n_expected
    assert n_expected > 5, "the miniature is too small for this test"


def test_one_billion_words_files_and_heldout_shards(tmp_path):
    """The test split may also be the validation split, as published."""
    arrange(tmp_path, CorpusName.LM1B)
    texts = miniature.texts(CorpusName.LM1B)

    separate = read(CorpusName.LM1B, tmp_path)
    same = read(CorpusName.LM1B, tmp_path, heldout=Heldout.PUBLISHED)

    assert contents(separate) == texts
    assert contents(same) == texts | {"valid": texts["test"]}
    assert separate.digest != same.digest
    # For errors.
    assert [file.name for file in separate.splits["train"]] == [
        "lm1b train, news.en-00001-of-00100",
        "lm1b train, news.en-00002-of-00100",
        "lm1b train, news.en-00003-of-00100",
    ]


def flip_byte(content, place):
    """The bytes with one bit of one byte changed."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_a_wrong_byte_is_reported_with_both_sums(tmp_path):
    known = CORPORA[CorpusName.ENWIK8].facts[WHOLE].sha256
    content = flip_byte(miniature.files(CorpusName.ENWIK8)["enwik8"], 250_000)
    place(tmp_path / "data", {"enwik8": content})
    message = reading_error(CorpusName.ENWIK8, tmp_path)
    assert re.search(rf"{tmp_path}/data/enwik8\b.*\b{sha256(content)}\b.*\b{known}\b", message)


def test_another_number_of_bytes_is_reported_with_the_known_one(tmp_path):
    place(tmp_path / "data", {"enwik8": b"x" * 1234})
    known = sum(miniature.CUTS.values())
    message = reading_error(CorpusName.ENWIK8, tmp_path)
    assert re.search(rf"{tmp_path}/data/enwik8\b.*\b1,234\b.*\b{known:,}\b", message)


@pytest.mark.parametrize("name", miniature.PACKED)
def test_an_official_archive_with_other_content(name, tmp_path):
    path = tmp_path / "data" / miniature.OFFICIAL[name]
    whole = miniature.official(name)

    place(tmp_path / "data", {path.name: whole[:-1]})
    sizes = rf"{len(whole) - 1:,}\b.*\b{len(whole):,}"
    assert re.search(rf"^{path}\b.*\b{sizes}\b", reading_error(name, tmp_path))

    changed = flip_byte(whole, len(whole) - 1)
    place(tmp_path / "data", {path.name: changed})
    sums = rf"{sha256(changed)}\b.*\b{sha256(whole)}"
    assert re.search(rf"^{path}\b.*\b{sums}\b", reading_error(name, tmp_path))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("name", WORDS)
def test_another_number_of_tokens(name, split, tmp_path):
    """A line of three words more, or an empty line more. Each line's end counts as a token."""
    text = miniature.texts(name)[split]
    known = CORPORA[name].facts[split].tokens
    assert text.endswith(b" \n")
    changes = {
        text[:-1] + b"\nmore words here\n": known + 4,
        text + b"\n": known + 1,
    }
    for changed, count in changes.items():
        arrange(tmp_path, name, "by split")
        path = tmp_path / "data" / TABLE[name].folders[-1] / f"{split}.txt"
        path.write_bytes(changed)
        message = reading_error(name, tmp_path)
        assert re.search(rf"^{path}\b.*\b{count:,}\b.*\b{known:,}\b", message), message


def test_the_same_words_in_other_bytes_are_noted(tmp_path, capsys):
    """Copies of the Penn Treebank differ in the white space around lines. The counts do not."""
    texts = miniature.texts(CorpusName.PTB)
    stripped = [line.strip() for line in texts["valid"].splitlines()]
    texts = texts | {"valid": b"\n".join(stripped) + b"\n"}
    place(tmp_path / "data", split_files(texts))

    assert contents(read(CorpusName.PTB, tmp_path)) == texts

    # One line names a split, and it is the split that was changed.
    lines = capsys.readouterr().out.splitlines()
    [note] = [line for line in lines if re.search(r"\b(train|valid|test)\b", line)]
    assert "Penn Treebank" in note
    assert "valid" in note


def test_another_number_of_sentences_is_reported_with_the_known_one(tmp_path):
    arrange(tmp_path, CorpusName.LM1B, "unpacked")
    path = next((tmp_path / "data").rglob("news.en-00001-of-00100"))
    path.write_bytes(path.read_bytes() + b"One more .\n")
    known = CORPORA[CorpusName.LM1B].facts["train"].lines
    message = reading_error(CorpusName.LM1B, tmp_path)
    assert re.search(rf"{path.name}.*\b{known + 1:,}\b.*\b{known:,}\b", message)


@pytest.mark.parametrize(
    ("name", "file"),
    [(CorpusName.PTB, "ptb.valid.txt"), (CorpusName.LM1B, "news.en-00002-of-00100")],
)
def test_a_missing_file_of_a_directory_is_named(name, file, tmp_path):
    arrange(tmp_path, name, "unpacked")
    [path] = (tmp_path / "data").rglob(file)
    path.unlink()
    missing = path.relative_to(tmp_path / "data")
    message = reading_error(name, tmp_path)
    assert re.search(rf"{tmp_path}/data\b.* {missing}\b.*{CORPORA[name].title}", message)


def test_common_names_count_only_in_the_corpuss_own_directory(tmp_path):
    """A train.txt in the data directory may be any text."""
    texts = miniature.texts(CorpusName.PTB)
    place(tmp_path / "data", {f"{split}.txt": text for split, text in texts.items()})
    reading_error(CorpusName.PTB, tmp_path, UserError)

    directory = tmp_path / "ptb"
    os.rename(tmp_path / "data", directory)
    text = prepare.read(CorpusName.PTB, data_dir=str(directory), cache_dir=str(tmp_path / "cache"))
    assert contents(text) == texts


def test_a_whole_corpus_wins_over_a_part(tmp_path):
    arrange(tmp_path, CorpusName.WIKITEXT2, "by split")
    next((tmp_path / "data").rglob("valid.txt")).unlink()
    arrange(tmp_path, CorpusName.WIKITEXT2, "downloads/manual")
    assert contents(read(CorpusName.WIKITEXT2, tmp_path)) == miniature.texts(CorpusName.WIKITEXT2)


@pytest.mark.parametrize("name", miniature.NAMES)
def test_without_files_and_network_every_source_is_asked_once_and_named(
    name, tmp_path, monkeypatch
):
    """Of a source of several files, only the first is asked for."""
    monkeypatch.setitem(CORPORA, name, TABLE[name])  # Its real sources, none of which is reached.
    requested = []
    head = requests.head

    def recorded_head(url, **options):
        requested.append(url)
        return head(url, **options)

    monkeypatch.setattr(requests, "head", recorded_head)

    message = reading_error(name, tmp_path, UserError)

    first_urls = [source[0].url for source in TABLE[name].sources]
    assert sorted(requested) == sorted(first_urls)
    for url in first_urls:
        assert url in message
    for remote in itertools.chain(*TABLE[name].sources):
        assert remote.file in message
    assert re.search(rf"{tmp_path / 'data' / TABLE[name].folders[0]}\b.*--data_dir\b", message)
    assert ("--data.file=PATH" in message) == (name in ONE_FILE)


@pytest.fixture
def prepared_enwik8(tmp_path):
    """The directory of the records of a miniature enwik8."""
    arrange(tmp_path, CorpusName.ENWIK8)
    read(CorpusName.ENWIK8, tmp_path)
    return tmp_path / "cache" / "tfds" / "txl_enwik8" / "1.0.0"


def test_corrupted_records_are_an_error_that_names_their_directory(prepared_enwik8, tmp_path):
    [path] = prepared_enwik8.rglob("*train*")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", flip_byte(whole, 70_000)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{prepared_enwik8}\b"):
            contents(read(CorpusName.ENWIK8, tmp_path))

    path.unlink()
    with pytest.raises(UserError, match=rf"{prepared_enwik8}\b"):
        contents(read(CorpusName.ENWIK8, tmp_path))


def test_corrupted_metadata_never_gives_another_text(prepared_enwik8, tmp_path):
    """It may be an error. Without the directory, the corpus is prepared again."""
    expected = miniature.texts(CorpusName.ENWIK8)
    for name in ("metadata.json", "dataset_info.json"):
        for content in (b"", b"{"):
            (prepared_enwik8 / name).write_bytes(content)
            with contextlib.suppress(UserError):
                assert contents(read(CorpusName.ENWIK8, tmp_path)) == expected, name

    shutil.rmtree(prepared_enwik8)
    assert contents(read(CorpusName.ENWIK8, tmp_path)) == expected


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the server's directory, and records the requests."""

    def log_request(self, *args):
        self.server.requested.append(f"{self.command} {self.path}")


class Server(http.server.ThreadingHTTPServer):
    """A server on this machine, with its URL and the requests that it had."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.requested = []

    def serve(self, file, content):
        """Makes a file downloadable."""
        write(self.folder / file, content)
        return miniature.remote(file, content, self.url)


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    server = Server(folder)
    # It looks every hundredth of a second whether it is to end, so that tests end soon.
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def set_sources(monkeypatch):
    """Makes files the sources of a miniature."""

    def set_sources_of(name, *sources):
        corpus = dataclasses.replace(miniature.corpus(name), sources=sources)
        monkeypatch.setitem(CORPORA, name, corpus)

    return set_sources_of


def check_one_download(name, files, server, set_sources, tmp_path):
    """Asserts that a corpus is downloaded from these files, once, and that no copy is kept."""
    set_sources(name, tuple(server.serve(file, content) for file, content in files.items()))

    assert contents(read(name, tmp_path)) == miniature.texts(name)

    first = next(iter(files))
    assert server.requested == [f"HEAD /{first}", *(f"GET /{file}" for file in files)]
    assert sorted(os.listdir(tmp_path / "cache" / "tfds")) == [f".txl_{name}.lock", f"txl_{name}"]
    assert not (tmp_path / "data").exists()

    read(name, tmp_path)
    assert len(server.requested) == 1 + len(files)


@pytest.mark.full
@pytest.mark.parametrize("name", miniature.NAMES)
def test_an_archive_is_downloaded_once(name, server, set_sources, tmp_path):
    files = {miniature.OFFICIAL[name]: miniature.official(name)}
    check_one_download(name, files, server, set_sources, tmp_path)


@pytest.mark.full
def test_each_file_of_a_split_is_downloaded_once(server, set_sources, tmp_path):
    files = split_files(miniature.texts(CorpusName.PTB))
    check_one_download(CorpusName.PTB, files, server, set_sources, tmp_path)


def bad_source(kind, server, whole, sha256):
    """A source that does not give the archive `whole`."""
    match kind:
        case "nothing listens":
            return miniature.remote("enwik8.zip", whole)
        case "not found":
            return miniature.remote("absent.zip", whole, server.url)
        case "other file":
            other = server.serve("other.zip", b"x" * len(whole))
            return dataclasses.replace(other, sha256=sha256)
        case "other size":
            return Remote(server.serve("short.zip", whole[:-1]).url, size=len(whole))
        case "no archive":
            return Remote(server.serve("page.zip", b"<html>sign in</html>").url)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["nothing listens", "not found", "other file", "other size", "no archive"]
)
def test_the_next_source_is_taken(kind, server, set_sources, tmp_path):
    whole = miniature.official(CorpusName.ENWIK8)
    good = server.serve("enwik8.zip", whole)
    bad = bad_source(kind, server, whole, good.sha256)
    set_sources(CorpusName.ENWIK8, (bad,), (good,))

    assert contents(read(CorpusName.ENWIK8, tmp_path)) == miniature.texts(CorpusName.ENWIK8)

    assert "GET /enwik8.zip" in server.requested
    assert sorted(os.listdir(tmp_path / "cache" / "tfds")) == [".txl_enwik8.lock", "txl_enwik8"]


@pytest.mark.full
def test_a_download_outlives_a_failure_that_came_after_it(
    server, set_sources, tmp_path, monkeypatch
):
    """The next start takes the archive from the disk. What a killed download left is removed."""
    archive = server.serve("simple-examples.tgz", miniature.official(CorpusName.PTB))
    set_sources(CorpusName.PTB, (archive,))
    records = tmp_path / "cache" / "tfds"
    rest = records / "txl_ptb_downloads" / "txl_ptb" / "x.tmp.123"
    rest.mkdir(parents=True)

    def fail_as_on_a_full_disk(self, block, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    message = r"\bPenn Treebank\b.*\bNo space left on device\b.*--cache_dir\b"
    with monkeypatch.context() as patch:
        patch.setattr(prepare.Tally, "add", fail_as_on_a_full_disk)
        with pytest.raises(UserError, match=message):
            read(CorpusName.PTB, tmp_path)
    assert not rest.exists()

    assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)
    downloads = [line for line in server.requested if line.startswith("GET")]
    assert downloads == ["GET /simple-examples.tgz"]
    assert sorted(os.listdir(records)) == [".txl_ptb.lock", "txl_ptb"]


@pytest.mark.full
def test_an_archive_with_other_content_is_downloaded_again_by_the_next_start(
    server, set_sources, tmp_path
):
    """An unknown checksum lets it in, its content does not. It is not kept."""
    members = dict(miniature.files(CorpusName.PTB))
    members["./simple-examples/data/ptb.test.txt"] += b"more\n"
    server.serve("simple-examples.tgz", miniature.archive(".tgz", members))
    set_sources(CorpusName.PTB, (Remote(server.url + "simple-examples.tgz"),))

    # The line that was added counts as a word and a line's end.
    known = CORPORA[CorpusName.PTB].facts["test"].tokens
    counts = rf"\b{known + 2:,}\b.*\b{known:,}\b"
    with pytest.raises(UserError, match=rf"ptb\.test\.txt\b.*{counts}.*{server.url}simple"):
        read(CorpusName.PTB, tmp_path)

    server.serve("simple-examples.tgz", miniature.official(CorpusName.PTB))
    assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)


def layouts_of(row):
    """The names of each layout's files."""
    return [set(itertools.chain(*layout.values())) for layout in row.layouts + row.own_layouts]


@pytest.mark.parametrize("name", TABLE)
def test_a_row_is_complete(name):
    row = TABLE[name]

    row.defaults.validate()
    assert row.defaults.corpus is name
    assert row.vocab_size > 1
    if row.defaults.tokenizer.kind is Tokenizer.BYTE and not row.closed_alphabet:
        assert row.vocab_size == 256
    assert set(row.facts) == ({WHOLE} if row.cuts else {"train", "valid", "test"})
    # The splits that are cut from one file are the whole file.
    assert sum(row.cuts.values()) in (0, row.facts.get(WHOLE, Facts(size=0)).size)
    for layout in row.layouts + row.own_layouts:
        assert set(layout) == set(row.facts), layout
    # It is shown in the middle of a line.
    assert row.contents
    assert not row.contents.endswith(".")
    for known in (*row.facts.values(), *itertools.chain(*row.sources)):
        assert known.sha256 is None or re.fullmatch("[0-9a-f]{64}", known.sha256), known


@pytest.mark.parametrize("name", TABLE)
def test_files_of_a_source_are_found_by_a_layout(name):
    """Archives are left out: their files are found after they are opened."""
    layouts = layouts_of(TABLE[name])
    for source in TABLE[name].sources:
        plain = {remote.file for remote in source if not remote.is_archive}
        unknown = plain.difference(*layouts)
        assert not unknown, (
            f"{unknown} are in no layout, and end in none of the archives' {ARCHIVE_SUFFIXES}"
        )
        if plain:
            assert {remote.file for remote in source} in layouts


def test_the_lists_above_are_those_of_the_table():
    assert tuple(name for name, row in TABLE.items() if row.cuts) == ONE_FILE
    for name, row in TABLE.items():
        has_tokens = all(facts.tokens for facts in row.facts.values())
        assert has_tokens == (name in WORDS), name


def test_only_local_files_have_no_row():
    assert set(CorpusName) - set(TABLE) == {CorpusName.TEXT, CorpusName.PYTHON_STDLIB}


@pytest.mark.parametrize("name", CorpusName)
def test_a_file_may_be_passed_for_own_text_and_for_corpora_of_one_file(name):
    data = DataConfig(corpus=name, file="a")
    if name in (CorpusName.TEXT, *ONE_FILE):
        check_file(data)
    else:
        with pytest.raises(UserError, match=rf"^data\.file is 'a'.*\b{name}\b"):
            check_file(data)
        check_file(dataclasses.replace(data, file=None))
