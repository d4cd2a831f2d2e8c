"""Finds the line of Python code of an instruction, from tables at the beginning of a program.

The text of a program begins with four numbered tables:

    FileNames       1 "/home/me/txl_jax/modules/block.py"
    FunctionNames   1 "Block.__call__"
    FileLocations   1 {file_name_id=1 function_name_id=1 line=40 end_line=40 ...}
    StackFrames     2 {file_location_id=1 parent_frame_id=2}

and an instruction names a stack frame. The number of a frame's parent (its caller) is one too high,
so that 1 means that it has no parent.
"""

import re
from typing import NamedTuple

_FILE = re.compile(r'(?m)^(\d+) "(/[^"]*)"$')
_LOCATION = re.compile(r"(?m)^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)")
_FRAME = re.compile(r"(?m)^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}$")
# In the path of an installed package: site-packages, dist-packages.
_INSTALLED = "-packages/"


class _Frame(NamedTuple):
    """A stack frame: one call."""

    # File of the call, or "" if the text does not contain it.
    file: str
    line: str
    # Number of the caller's frame, or "0".
    parent: str


def source_lines(text: str) -> dict[str, str]:
    """Returns file and line of each stack frame by its number.

    For a call inside an installed package, such as JAX or Optax, this is the line that called into
    the package. A frame that has only such lines is omitted.
    """
    frames = _frames(text)
    sources: dict[str, str] = {}
    for number in frames:
        frame = _caller_outside_packages(frames, number)
        if frame is not None:
            sources[number] = f"{short_path(frame.file)}:{frame.line}"
    return sources


def _caller_outside_packages(frames: dict[str, _Frame], number: str) -> _Frame | None:
    # A chain of callers is not longer than the table.
    for _ in range(len(frames)):
        frame = frames.get(number)
        if frame is None or (frame.file and _INSTALLED not in frame.file):
            return frame
        number = frame.parent
    return None


def short_path(file: str) -> str:
    """Returns a file's path starting at the package, or its last three parts."""
    package = file.rfind("/txl_jax/")
    if package >= 0:
        return file[package + 1 :]
    return "/".join(file.split("/")[-3:])


def _frames(text: str) -> dict[str, _Frame]:
    files = dict(_FILE.findall(text))
    locations: dict[str, tuple[str, str]] = {}
    for number, file, line in _LOCATION.findall(text):
        locations[number] = (files.get(file, ""), line)

    frames: dict[str, _Frame] = {}
    for number, location, parent in _FRAME.findall(text):
        file, line = locations.get(location, ("", ""))
        frames[number] = _Frame(file, line, str(int(parent) - 1))
    return frames
