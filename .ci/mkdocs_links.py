"""MkDocs hook: links that leave docs/ point to the repository, and pictures follow the theme.

Pages link to files outside docs/, such as ../README.md, so that they work in a clone and on a
forge. The site has no such pages. This hook turns these links into addresses of the repository
(`extra.repository` of mkdocs.yml) or, without one, into paths from a site in the clone (`site/`). A
file that does not exist gives a warning, which ends a strict build.

A forge shows the light or the dark one of two pictures by a <picture> element. MkDocs would leave
its paths as they are, which is wrong one directory below, and the site has a switch of its own. So
the element becomes two images, of which the theme shows one.
"""

import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.links")
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]*)"\s+src="(?P<light>[^"]+)">\s*</picture>'
)
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def outside(target: str, page: str, repository: str, exists: Callable[[str], bool]) -> str | None:
    """Returns the address of a link's target outside docs/, or None.

    Returns None for all other targets and for missing files.

    Args:
        target: As the page has it: a path from the page's directory, with or without an #anchor, or
          an address.
        page: The page's path in docs/.
        repository: The address of the branch's files. If empty, the address is a path from the
          built page.
        exists: Tells whether a path from the repository's root does.

    >>> def address(target):
    ...     exists = lambda path: path != "gone.md"
    ...     return outside(target, "api/index.md", "https://forge/tree/main", exists)
    >>> address("../../README.md#start")
    'https://forge/tree/main/README.md#start'
    >>> targets = ["../data.md#words", "#here", "https://arxiv.org", "/data.md"]
    >>> [address(target) for target in targets]
    [None, None, None, None]
    >>> [outside("../README.md", page, "", lambda path: True) for page in ("index.md", "data.md")]
    ['../README.md', '../../README.md']
    >>> LOG.disabled = True  # It warns of a file that does not exist.
    >>> address("../../gone.md")
    """
    path, mark, anchor = target.partition("#")
    if not path or "://" in path or path.startswith(("/", "mailto:")):
        return None
    from_root = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    if posixpath.commonpath(["docs", from_root]) == "docs":
        return None
    if from_root.startswith("..") or not exists(from_root):
        LOG.warning("%s links to %s, which is not in the repository", page, target)
        return None
    # Of the built page.
    directory = posixpath.join("site", page.removesuffix(".md").removesuffix("index"))
    found = f"{repository}/{from_root}" if repository else posixpath.relpath(from_root, directory)
    return f"{found}{mark}{anchor}"


def for_both_themes(markdown: str) -> str:
    r"""Replaces each <picture> of a light and a dark image by two images of the theme.

    >>> source = '<source media="(prefers-color-scheme: dark)" srcset="a-dark.svg">'
    >>> for_both_themes(f'<picture> {source} <img alt="An a." src="a-light.svg"> </picture>')
    '![An a.](a-light.svg#only-light)\n![An a.](a-dark.svg#only-dark)'
    """

    def replace(picture: re.Match[str]) -> str:
        words = " ".join(picture["alt"].split())
        light = f"![{words}]({picture['light']}#only-light)"
        return f"{light}\n![{words}]({picture['dark']}#only-dark)"

    return PICTURE.sub(replace, markdown)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Returns a page with links and pictures of the site; fenced code stays as it is."""
    root = Path(config.config_file_path).parent

    def replace(link: re.Match[str]) -> str:
        address = outside(
            link["target"],
            page.file.src_uri,
            config.extra["repository"],
            lambda path: (root / path).exists(),
        )
        # A relative Markdown link would be one to a page.
        return link[0] if address is None else f'<a href="{address}">{link["text"]}</a>'

    parts = FENCED.split(markdown)  # Text and fenced code in turn.
    return "".join(
        part if number % 2 else for_both_themes(LINK.sub(replace, part))
        for number, part in enumerate(parts)
    )
