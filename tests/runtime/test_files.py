"""Tests locks and the error of a folder that cannot be written to; replacing files: test_metrics_log."""

import errno
import threading

import pytest

from txl_jax.errors import UserError
from txl_jax.runtime import storage


def test_a_lock_keeps_others_out_until_it_is_released(tmp_path):
    lines, entered = [], threading.Event()

    def enter():
        with storage.locked(tmp_path / "lock", log=lines.append):
            entered.set()

    other = threading.Thread(target=enter)
    with storage.locked(tmp_path / "lock", log=lines.append):
        other.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    other.join()
    assert len(lines) == 1 and str(tmp_path / "lock") in lines[0], "only the one that waits logs a line"


def test_an_error_of_writing_names_what_the_folder_and_the_flag(tmp_path):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "new" / "file"))

    with (
        pytest.raises(UserError, match=r"tokens.*/new\b.*No space.*--cache_dir"),
        storage.writable(tmp_path / "new", what="tokens"),
    ):
        full()
    elsewhere = FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere/file")
    with pytest.raises(FileNotFoundError) as caught, storage.writable(tmp_path, what="tokens"):
        raise elsewhere
    assert caught.value is elsewhere
