"""Tests of files that a run appends to: one plain file here, parts on object storage."""

import pytest

from txl_jax.errors import LogError
from txl_jax.runtime import log, storage
from txl_jax.runtime.log import AppendFile, read_appended, replace_appended


def test_a_local_file_is_plain(tmp_path):
    path = tmp_path / "log.txt"
    with pytest.raises(FileNotFoundError):
        read_appended(path)
    for text in ("one\n", "two\n"):
        file = AppendFile(path)
        file.write(text)
        file.flush()
        assert path.read_text().endswith(text)
        file.seal()
        file.close()
        file.close()
    replace_appended(path, ["é", "\n"])
    assert read_appended(path) == "é\n".encode()
    assert [each.name for each in tmp_path.iterdir()] == ["log.txt"]


def names(path):
    return storage.names(f"{path}.parts")


@pytest.mark.full
def test_parts_are_joined_in_order(bucket):
    path = bucket / "log.txt"
    with pytest.raises(FileNotFoundError):
        read_appended(path)
    file = AppendFile(path)
    for number in range(12):
        file.write(f"{number}\n")
        file.seal()
        file.seal()  # Nothing new: no part.
    file.write("last\n")
    file.flush()
    assert read_appended(path).splitlines()[-1] == b"11"
    file.close()
    second = AppendFile(path)
    second.write("more\n")
    second.close()
    assert read_appended(path).decode().split() == [*map(str, range(12)), "last", "more"]
    assert names(path) == [f"{number:06}" for number in range(1, 15)]


@pytest.mark.full
def test_readers_see_what_is_not_sealed_after_a_while(bucket, monkeypatch):
    monkeypatch.setattr(log, "SECONDS_BETWEEN_UPLOADS", 0.0)
    file = AppendFile(bucket / "log.txt")
    for text in ("one ", "two "):
        file.write(text)
        file.flush()
        assert read_appended(bucket / "log.txt").endswith(text.encode())
    assert names(bucket / "log.txt") == ["000001"]
    file.close()


@pytest.mark.full
def test_a_replaced_text_counts_as_a_whole(bucket, request):
    path = bucket / "log.txt"
    for text in ("one ", "two "):
        file = AppendFile(path)
        file.write(text)
        file.close()
    part = bucket / "log.txt.parts" / "000002"
    replace_appended(path, ["new ", "text "])
    assert (read_appended(path), names(path)) == (b"new text ", ["000003.all"])
    part.write_text("of a removal that was killed")
    file = AppendFile(path)
    file.write("end")
    file.close()
    assert (read_appended(path), names(path)) == (b"new text end", ["000002", "000003.all", "000004"])
    request.getfixturevalue("storage").refuse("POST /upload")
    with pytest.raises(LogError, match="permission"):
        replace_appended(path, ["lost"])
    assert read_appended(path) == b"new text end"
