"""A folder of some installed packages alone, as the `sys.path` of a process that must not find the others."""

import importlib.metadata
import pathlib


def link(folder: pathlib.Path, *distributions: str) -> pathlib.Path:
    """Fills a new folder with links to the packages of these distributions; returns it."""
    folder.mkdir()
    for name in distributions:
        found = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in found.files or () if file.parts[0] != ".."}
        for top in tops - {path.name for path in folder.iterdir()}:
            (folder / top).symlink_to(found.locate_file(top))
    return folder
