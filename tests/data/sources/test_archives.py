"""Tests reading files out of folders, zips and tars: what is found, in which order, and what is refused."""

import io
import random
import re
import stat
import tarfile
import zipfile

import pytest

from support import miniature
from txl_jax.data.sources.archives import Files, fit, open_archive
from txl_jax.errors import UserError

URL = "http://example.org/it.zip"
MEMBERS = {"box/b.txt": b"bee" * 50_000, "box/a.txt": b"ay", "box/c.txt": b"", "c.txt": b"sea"}
LAYOUT = {"one": ("b.txt",), "two": ("box/a.txt", "box/c.txt")}


def opened(tmp_path, file, members=MEMBERS):
    (tmp_path / file).write_bytes(miniature.archive(file, members))
    return open_archive(str(tmp_path / file), again=URL)


def contents(container, files):
    return {
        file: b"".join(iter(lambda stream=stream: stream.read(1000), b"")) for file, stream in container.read(files)
    }


@pytest.fixture(params=["x.zip", "x.tar", "x.tar.gz", "x.tgz"])
def container(request, tmp_path):
    return opened(tmp_path, request.param)


def test_sizes_and_contents(container):
    assert container.sizes == {name: len(content) for name, content in MEMBERS.items()}
    wanted = ["box/a.txt", "box/c.txt", "box/b.txt"]
    assert contents(container, wanted) == {name: MEMBERS[name] for name in wanted}
    assert contents(container, ["c.txt"]) == {"c.txt": b"sea"}
    assert container.name in container.where("c.txt") and "c.txt" in container.where("c.txt")


def test_files_of_this_machine(tmp_path):
    paths = {}
    for name, content in MEMBERS.items():
        paths[name] = str(tmp_path / name.replace("/", "-"))
        (tmp_path / name.replace("/", "-")).write_bytes(content)
    files = Files("here", paths)
    assert files.sizes == {name: len(content) for name, content in MEMBERS.items()}
    assert contents(files, list(MEMBERS)) == MEMBERS
    assert files.where("box/a.txt") == str(tmp_path / "box-a.txt")


def test_a_tar_is_read_in_its_own_order_and_not_beyond_what_is_wanted(tmp_path):
    tar = opened(tmp_path, "x.tar", {"z": b"1", "m": b"2", "a": b"3"})
    assert list(contents(tar, ["a", "z"])) == ["z", "a"]
    long = opened(tmp_path, "long.tar.gz", {"z": b"1", "a": random.Random(0).randbytes(1_000_000)})
    with open(long.name, "r+b") as file:
        file.truncate(500_000)
    assert contents(long, ["z"]) == {"z": b"1"}


@pytest.mark.parametrize("prefix", ["", "./", "some/where/"])
def test_files_are_found_by_the_ends_of_their_paths(prefix, container, tmp_path):
    members = {f"{prefix}{name}": content for name, content in MEMBERS.items() if name != "c.txt"}
    moved = opened(tmp_path, "moved.zip", members | {f"{prefix}box/not-b.txt": b"", f"{prefix}b.txt.old": b""})
    assert fit(moved, [LAYOUT], again=URL) == {
        "one": [f"{prefix}box/b.txt"],
        "two": [f"{prefix}box/a.txt", f"{prefix}box/c.txt"],
    }


def test_paths_that_windows_wrote(tmp_path):
    assert fit(opened(tmp_path, "x.zip", {"box\\b.txt": b"x"}), [{"one": ("box/b.txt",)}], again=URL) == {
        "one": ["box\\b.txt"]
    }


def test_the_first_layout_that_fits(container):
    assert fit(container, [{"one": ("absent",)}, {"one": ("a.txt",)}, LAYOUT], again=URL) == {"one": ["box/a.txt"]}


def test_missing_files_are_named_with_what_is_there(container):
    with pytest.raises(UserError) as caught:
        fit(container, [{"one": ("x", "y", "z")}, {"one": ("b.txt", "absent.txt")}], again=URL)
    message, there = str(caught.value), ", ".join(MEMBERS)
    assert re.search(rf"^{container.name}\b.*\babsent\.txt\b.*\b{there}\b.*{URL}", message)
    assert not re.search(r"\b[yz]\b", message), "of the layout that lacks more"


def test_an_empty_archive_holds_nothing(tmp_path):
    with pytest.raises(UserError, match=rf"x\.zip\b.*\bb\.txt\b.*{URL}"):
        fit(opened(tmp_path, "x.zip", {}), [{"one": ("b.txt",)}], again=URL)


def test_two_files_that_could_be_meant(container):
    with pytest.raises(UserError, match=rf"{container.name}\b.* box/c\.txt\b.* c\.txt\b"):
        fit(container, [{"one": ("c.txt",)}], again=URL)


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "box/../../a", "box/..", "C:\\a", "..\\a", "c:/a", "box/../a"])
def test_names_that_lead_out_are_refused(kind, name, tmp_path):
    with pytest.raises(UserError) as caught:
        opened(tmp_path, f"x.{kind}", {"good.txt": b"1", name: b"2"})
    assert re.search(rf"x\.{kind}\b.*{re.escape(repr(name))}", str(caught.value))
    assert "good.txt" not in str(caught.value)


def write_links(path, links, kind=tarfile.SYMTYPE):
    """An archive with the file box/a.txt and links, from name to target."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("box/a.txt", "ay")
            for name, target in links.items():
                info = zipfile.ZipInfo(name)
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
                archive.writestr(info, target)
        return
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("box/a.txt")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"ay"))
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)


@pytest.mark.parametrize("file", ["x.zip", "x.tar"])
@pytest.mark.parametrize("target", ["/etc/passwd", "../../a", "../box/../../a", "..\\..\\a", "c:\\a"])
def test_links_that_lead_out_are_refused(file, target, tmp_path):
    write_links(tmp_path / file, {"box/link": target})
    with pytest.raises(UserError) as caught:
        open_archive(str(tmp_path / file), again=URL)
    assert re.search(rf"{file}\b.*'box/link'.*{re.escape(repr(target))}", str(caught.value))


@pytest.mark.parametrize("file", ["x.zip", "x.tar"])
def test_links_that_stay_inside_are_no_harm(file, tmp_path):
    write_links(tmp_path / file, {"box/link": "a.txt", "box/up": "../box/a.txt"})
    assert contents(open_archive(str(tmp_path / file), again=URL), ["box/a.txt"]) == {"box/a.txt": b"ay"}


def test_hard_links_count_from_the_archives_root(tmp_path):
    write_links(tmp_path / "x.tar", {"box/deep/link": "box/a.txt"}, kind=tarfile.LNKTYPE)
    assert list(open_archive(str(tmp_path / "x.tar"), again=URL).sizes) == ["box/a.txt"]
    for target in ("../a.txt", "/etc/passwd"):
        write_links(tmp_path / "x.tar", {"box/deep/link": target}, kind=tarfile.LNKTYPE)
        with pytest.raises(UserError, match=r"x\.tar\b.*'box/deep/link'"):
            open_archive(str(tmp_path / "x.tar"), again=URL)


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_are_refused(kind, tmp_path):
    write_links(tmp_path / "x.tar", {"box/device": ""}, kind=kind)
    with pytest.raises(UserError, match=r"x\.tar\b.*'box/device'"):
        open_archive(str(tmp_path / "x.tar"), again=URL)


def test_nothing_is_unpacked(container, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    contents(container, list(MEMBERS))
    assert sorted(tmp_path.rglob("*")) == before


def read_all(path):
    archive = open_archive(str(path), again=URL)
    fit(archive, [{"all": ("a", "b")}], again=URL)
    contents(archive, ["a", "b"])


@pytest.mark.parametrize("file", ["x.zip", "x.tar", "x.tar.gz"])
def test_an_archive_cut_anywhere_is_reported_as_damaged_or_lacking_a_file(file, tmp_path):
    members = {"a": b"ay" * 1500, "b": b"bee" * 1000}
    whole = miniature.archive(file, members)
    # A tar's blocks are filled up, and it ends in empty ones, all of which nobody misses.
    needed = len(whole.rstrip(b"\0")) if file == "x.tar" else len(whole)
    for length in [*range(0, needed, max(needed // 60, 1)), needed - 1]:
        (tmp_path / file).write_bytes(whole[:length])
        with pytest.raises(UserError) as caught:
            read_all(tmp_path / file)
        assert str(tmp_path / file) in str(caught.value) and URL in str(caught.value), length


@pytest.mark.parametrize("file", ["x.zip", "x.tar.gz"])
def test_flipped_bits_give_the_right_text_or_a_clear_error(file, tmp_path):
    members = {"a": b"one two three\n" * 5, "b": b"four"}
    whole = miniature.archive(file, members)
    messages = set()
    for offset in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << bit
            (tmp_path / file).write_bytes(damaged)
            try:
                got = open_archive(str(tmp_path / file), again=URL)
                fit(got, [{"all": ("a", "b")}], again=URL)
                assert contents(got, ["a", "b"]) == members  # Some bytes, such as the date, do not matter.
            except ValueError as error:
                messages.add(str(error))
    assert any(URL in message for message in messages)
    assert all(str(tmp_path / file) in message for message in messages)


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_other_compressions(method, tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a", b"some text " * 1000)
    assert contents(open_archive(str(path), again=URL), ["a"]) == {"a": b"some text " * 1000}
    whole = path.read_bytes()
    path.write_bytes(whole[:45] + bytes(byte ^ 0x55 for byte in whole[45:60]) + whole[60:])
    with pytest.raises(UserError, match=rf"{path}\b.*{URL}"):
        contents(open_archive(str(path), again=URL), ["a"])


def test_a_member_shorter_than_declared_in_its_entry(tmp_path):
    path = tmp_path / "x.zip"
    path.write_bytes(miniature.archive("x.zip", {"a": b"text"}))
    size, wrong = (4).to_bytes(4, "little"), (9).to_bytes(4, "little")
    whole = bytearray(path.read_bytes())
    entry = whole.index(b"PK\x01\x02") + 24  # Where the table of contents holds the size.
    assert whole[entry : entry + 4] == size
    whole[entry : entry + 4] = wrong
    path.write_bytes(whole)
    with pytest.raises(UserError, match=rf"x\.zip\b.*\b5\b.*{URL}"):
        contents(open_archive(str(path), again=URL), ["a"])


@pytest.mark.parametrize("file", ["x.zip", "x.tar"])
def test_an_archive_that_may_not_be_read_is_not_damaged(file, tmp_path, monkeypatch):
    """Permissions do not stop root, so the error is made."""
    (tmp_path / file).write_bytes(miniature.archive(file, MEMBERS))

    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(tmp_path / file))

    monkeypatch.setattr("builtins.open", denied)
    monkeypatch.setattr(zipfile, "ZipFile", denied)
    with pytest.raises(PermissionError, match="Permission denied"):
        open_archive(str(tmp_path / file), again=URL)


def test_what_is_no_archive(tmp_path):
    for file in ("x.zip", "x.tar", "x.tgz"):
        (tmp_path / file).write_bytes(b"<html><body>404 Not Found</body></html>" * 30)
        with pytest.raises(UserError, match=rf"{tmp_path / file}\b.*{URL}"):
            open_archive(str(tmp_path / file), again=URL)


def test_a_zip_with_a_password(tmp_path):
    whole = bytearray(miniature.archive("x.zip", {"a": b"text"}))
    for flags in (whole.index(b"PK\x03\x04") + 6, whole.index(b"PK\x01\x02") + 8):
        whole[flags] |= 1
    (tmp_path / "x.zip").write_bytes(whole)
    with pytest.raises(UserError, match=rf"x\.zip\b.*{URL}"):
        contents(open_archive(str(tmp_path / "x.zip"), again=URL), ["a"])
