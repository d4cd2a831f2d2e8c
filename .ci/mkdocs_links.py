"""MkDocs hook: links that leave docs/ point to the repository.

Pages link to files beside docs/, such as ../README.md, so that they work in a clone and on a forge. The site has no
such pages. This hook turns these links into addresses of the repository (`extra.repository` of mkdocs.yml), or, without
an address, into plain text. A file that does not exist gives a warning, which ends a strict build.
"""

import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG = logging.getLogger("mkdocs.hooks.links")
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def absolute(target: str, page: str, repository: str, exists: Callable[[str], bool]) -> str:
    """Returns the address of a link's target, which is the target itself for all that the site has.

    Args:
        target: As the page has it: a path from the page's folder, with or without an #anchor, or an address.
        page: The page's path in docs/.
        repository: The address of the branch's files.
        exists: Tells whether a path from the repository's root does.

    >>> def address(target):
    ...     return absolute(target, "api/index.md", "https://forge/tree/main", lambda path: path != "gone.md")
    >>> address("../../README.md#start")
    'https://forge/tree/main/README.md#start'
    >>> [address(target) for target in ("../data.md#words", "#here", "https://arxiv.org", "/data.md")]
    ['../data.md#words', '#here', 'https://arxiv.org', '/data.md']
    >>> LOG.disabled = True  # It warns of a file that does not exist.
    >>> address("../../gone.md")
    '../../gone.md'
    """
    path, mark, anchor = target.partition("#")
    if not path or "://" in path or path.startswith(("/", "mailto:")):
        return target
    from_root = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), path))
    if posixpath.commonpath(["docs", from_root]) == "docs":
        return target
    if from_root.startswith("..") or not exists(from_root):
        LOG.warning("%s links to %s, which is not in the repository", page, target)
        return target
    return f"{repository}/{from_root}{mark}{anchor}"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Returns a page without relative links to files outside docs/. Fenced code stays as it is."""
    root, repository = Path(config.config_file_path).parent, config.extra["repository"]

    def replace(link: re.Match[str]) -> str:
        target = absolute(link["target"], page.file.src_uri, repository or "", lambda path: (root / path).exists())
        if target == link["target"]:
            return link[0]
        return f"[{link['text']}]({target})" if repository else link["text"]

    parts = FENCED.split(markdown)  # Text and fenced code in turn.
    return "".join(part if number % 2 else LINK.sub(replace, part) for number, part in enumerate(parts))
