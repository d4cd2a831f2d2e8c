"""Tests reading files out of folders, zips and tars: what is found, in which order, and what is refused."""

import io
import random
import re
import stat
import tarfile
import zipfile

import pytest

from support import miniature
from txl_jax.data.prepare import fit, open_files
from txl_jax.errors import UserError

URL = "http://example.org/it.zip"
MEMBERS = {"box/b.txt": b"bee" * 50_000, "box/a.txt": b"ay", "box/c.txt": b"", "c.txt": b"sea"}
LAYOUT = {"one": ("b.txt",), "two": ("box/a.txt", "box/c.txt")}


def open_archive(path):
    return open_files(str(path), {path.name: str(path)}, again=URL)


def opened(tmp_path, file, members=MEMBERS):
    (tmp_path / file).write_bytes(miniature.archive(file, members))
    return open_archive(tmp_path / file)


def contents(files, names):
    sizes = {name: files.sizes[name] for name in names}
    return {name: b"".join(blocks) for name, blocks in files.read(sizes)}


@pytest.fixture(params=["x.zip", "x.tar", "x.tar.gz", "x.tgz"])
def container(request, tmp_path):
    return opened(tmp_path, request.param)


def test_sizes_and_contents(container, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert container.sizes == {name: len(content) for name, content in MEMBERS.items()}
    wanted = ["box/a.txt", "box/c.txt", "box/b.txt"]
    assert contents(container, wanted) == {name: MEMBERS[name] for name in wanted}
    assert contents(container, ["c.txt"]) == {"c.txt": b"sea"}
    assert container.name in container.where("c.txt") and "c.txt" in container.where("c.txt")
    assert sorted(tmp_path.rglob("*")) == before, "nothing is unpacked"


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
    first_that_fits = [{"one": ("absent",)}, LAYOUT, {"one": ("a.txt",)}]
    assert fit(moved, first_that_fits) == {
        "one": [f"{prefix}box/b.txt"],
        "two": [f"{prefix}box/a.txt", f"{prefix}box/c.txt"],
    }


def test_missing_files_and_two_that_could_be_meant_are_named(container):
    with pytest.raises(UserError) as caught:
        fit(container, [{"one": ("x", "y", "z")}, {"one": ("b.txt", "absent.txt")}])
    assert re.search(rf"^{container.name}\b.*\babsent\.txt\b.*{URL}", str(caught.value))
    assert not re.search(r"\b[yz]\b", str(caught.value)), "of the layout that lacks more"
    with pytest.raises(UserError, match=rf"{container.name}\b.* box/c\.txt\b.* c\.txt\b"):
        fit(container, [{"one": ("c.txt",)}])


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "box/../../a", "box/..", "C:\\a", "..\\a", "c:/a", "box/../a"])
def test_names_that_lead_out_are_refused(kind, name, tmp_path):
    with pytest.raises(UserError, match=rf"x\.{kind}\b.*{re.escape(repr(name))}"):
        opened(tmp_path, f"x.{kind}", {"good.txt": b"1", name: b"2"})


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
    with pytest.raises(UserError, match=rf"{file}\b.*'box/link'.*{re.escape(repr(target))}"):
        open_archive(tmp_path / file)


@pytest.mark.parametrize("file", ["x.zip", "x.tar"])
def test_links_that_stay_inside_are_no_harm(file, tmp_path):
    write_links(tmp_path / file, {"box/link": "a.txt", "box/up": "../box/a.txt"})
    assert contents(open_archive(tmp_path / file), ["box/a.txt"]) == {"box/a.txt": b"ay"}


def test_hard_links_count_from_the_archives_root(tmp_path):
    write_links(tmp_path / "x.tar", {"box/deep/link": "box/a.txt"}, kind=tarfile.LNKTYPE)
    assert list(open_archive(tmp_path / "x.tar").sizes) == ["box/a.txt"]
    for target in ("../a.txt", "/etc/passwd"):
        write_links(tmp_path / "x.tar", {"box/deep/link": target}, kind=tarfile.LNKTYPE)
        with pytest.raises(UserError, match=r"x\.tar\b.*'box/deep/link'"):
            open_archive(tmp_path / "x.tar")


def test_devices_are_refused(tmp_path):
    for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE):
        write_links(tmp_path / "x.tar", {"box/device": ""}, kind=kind)
        with pytest.raises(UserError, match=r"x\.tar\b.*'box/device'"):
            open_archive(tmp_path / "x.tar")


def read_all(path):
    archive = open_archive(path)
    fit(archive, [{"all": ("a", "b")}])
    return contents(archive, ["a", "b"])


@pytest.mark.parametrize("file", ["x.zip", "x.tar", "x.tar.gz"])
def test_an_archive_cut_anywhere_is_reported_as_damaged_or_lacking_a_file(file, tmp_path):
    members = {"a": b"ay" * 1500, "b": b"bee" * 1000}
    whole = miniature.archive(file, members)
    # A tar's blocks are filled up, and it ends in empty ones, all of which nobody misses.
    needed = len(whole.rstrip(b"\0")) if file == "x.tar" else len(whole)
    for length in [*range(0, needed, max(needed // 60, 1)), needed - 1]:
        (tmp_path / file).write_bytes(whole[:length])
        with pytest.raises(UserError, match=rf"{tmp_path / file}\b.*{URL}"):
            read_all(tmp_path / file)


@pytest.mark.full
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
                found = read_all(tmp_path / file)
                # Some bytes, such as the date, do not matter, and an empty file is refused by its size.
                assert found == members or b"" in found.values()
            except ValueError as error:
                messages.add(str(error))
    assert any(URL in message for message in messages)
    assert all(str(tmp_path / file) in message for message in messages)


def test_a_member_of_another_size_and_one_with_a_password(tmp_path):
    path, whole = tmp_path / "x.zip", miniature.archive("x.zip", {"a": b"text"})
    entry, start = whole.index(b"PK\x01\x02"), whole.index(b"PK\x03\x04")
    longer, locked = bytearray(whole), bytearray(whole)
    longer[entry + 24] = 9  # Where the table of contents holds the size.
    locked[entry + 8] |= 1
    locked[start + 6] |= 1
    for damaged in (longer, locked):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"x\.zip\b.*{URL}"):
            contents(open_archive(path), ["a"])


def test_what_is_no_archive(tmp_path):
    for file in ("x.zip", "x.tar", "x.tgz"):
        (tmp_path / file).write_bytes(b"<html><body>404 Not Found</body></html>" * 30)
        with pytest.raises(UserError, match=rf"{tmp_path / file}\b.*{URL}"):
            open_archive(tmp_path / file)
