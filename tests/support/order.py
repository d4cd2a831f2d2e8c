"""Records the file operations of a process, in order, for tests of which file must last first.

An event is (what, name): ("sync", "config.json"), ("rename", the new name) or ("remove", name).
Names are relative to a directory, which itself is ".". A temporary name has no process number, as
in ".config.json.tmp".
"""

import os
import re
import shutil
from pathlib import Path


def record(patch, directory):
    """Returns the list to which events below a directory are added, each before it is done."""
    events = []
    real = {"fsync": os.fsync, "rename": os.rename, "replace": os.replace, "rmtree": shutil.rmtree}
    root = Path(directory).resolve()

    def add(what, path):
        path = Path(os.fspath(path))
        if path.is_relative_to(root):
            name = str(path.relative_to(root))
            events.append((what, re.sub(r"\.\d+\.tmp\b", ".tmp", name)))

    def fsync(handle):
        add("sync", os.readlink(f"/proc/self/fd/{handle}"))
        real["fsync"](handle)

    def rename(source, target, **options):
        add("rename", target)
        real["rename"](source, target, **options)

    def replace(source, target, **options):
        add("rename", target)
        real["replace"](source, target, **options)

    def rmtree(path, *arguments, **options):
        add("remove", path)
        real["rmtree"](path, *arguments, **options)

    patch.setattr(os, "fsync", fsync)
    patch.setattr(os, "rename", rename)
    patch.setattr(os, "replace", replace)
    patch.setattr(shutil, "rmtree", rmtree)
    return events


def add_calls(patch, events, owner, method, describe):
    """Adds `describe(arguments)` to the events at each call of a class's method, before it."""
    real = getattr(owner, method)

    def called(*arguments, **options):
        events.append(describe(*arguments))
        return real(*arguments, **options)

    patch.setattr(owner, method, called)


def assert_in_order(events, *wanted):
    """Asserts that the first occurrences of some events come in this order."""
    places = [events.index(event) for event in wanted]
    assert places == sorted(places), [events[place] for place in sorted(places)]
