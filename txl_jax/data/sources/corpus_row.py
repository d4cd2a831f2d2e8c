"""A row of the table of corpora: files, sources, facts to check them by, and default settings."""

import dataclasses
from collections.abc import Mapping

from txl_jax.config import CorpusName, DataConfig, TokenizerConfig

Layout = Mapping[str, tuple[str, ...]]  # Part -> paths of its files, relative to some folder.


WHOLE = "whole"  # Name of the part that all splits are cut from.


ARCHIVE_SUFFIXES = (".zip", ".tar.gz", ".tgz", ".tar")


@dataclasses.dataclass(frozen=True)
class Remote:
    """A file to download."""

    url: str
    size: int | None = None  # Bytes.
    sha256: str | None = None

    @property
    def file(self) -> str:
        """Returns the name of the saved file."""
        return self.url.rsplit("/", 1)[1]

    @property
    def is_archive(self) -> bool:
        """Returns whether it is an archive of the corpus's files; else it is one of these files."""
        return self.file.endswith(ARCHIVE_SUFFIXES)


@dataclasses.dataclass(frozen=True)
class Facts:
    """Known properties of a part's content."""

    size: int | None = None  # Bytes.
    sha256: str | None = None  # Of a part that is one file. Where tokens are known, other bytes are only noted.
    lines: int | None = None
    tokens: int | None = None  # Words, as white space separates them, and line ends.


@dataclasses.dataclass(frozen=True)
class PublishedCorpus:
    """A published corpus: everything that differs from corpus to corpus."""

    title: str  # For people.
    contents: str  # "words", "bytes of Wikipedia": follows the title in the list of programs.
    folders: tuple[str, ...]  # Possible names of its own folder in the data folder; of archives too.
    layouts: tuple[Layout, ...]  # Paths of its files below a folder or in an archive; the first that fits counts.
    facts: Mapping[str, Facts]  # By part.
    sources: tuple[tuple[Remote, ...], ...]  # Alternatives, each complete: one archive, or all files, unpacked.
    defaults: DataConfig  # Settings of its tokens and their order, with which its program begins.
    # Of the whole corpus with these settings, for programs that read no text. Of bytes: 256, or with `closed_alphabet`
    # the number of values that occur.
    vocab_size: int
    program: str = ""  # Program in experiments/ that trains on it; empty: the one of its name.
    own_layouts: tuple[Layout, ...] = ()  # Layouts with names so common that they count only in its own folder.
    cuts: Mapping[str, int] = dataclasses.field(default_factory=dict)  # Bytes of each split in the whole, in order.
    # Byte tokens are the values that occur in its splits, so that the softmax is smaller; a text with any other value
    # cannot be scored then. False: all 256 values.
    closed_alphabet: bool = False

    @property
    def archives(self) -> dict[str, Remote | None]:
        """Returns the names of archives to search for: the official ones, and those that users make of a folder."""
        # The first source of a name is the one to recommend.
        official = {source[0].file: source[0] for source in reversed(self.sources) if source[0].is_archive}
        made = [name + suffix for name in self.folders for suffix in ARCHIVE_SUFFIXES]
        return dict.fromkeys(made) | official

    @property
    def url(self) -> str:
        """Returns the URL to name in errors."""
        return self.sources[0][0].url

    def ranges(self) -> dict[str, tuple[str, int, int | None]]:
        """Returns for each split its part, and of the part's bytes the first and the one after the last."""
        if not self.cuts:
            return {part: (part, 0, None) for part in self.facts}
        ranges: dict[str, tuple[str, int, int | None]] = {}
        first = 0
        for split, size in self.cuts.items():
            ranges[split] = (WHOLE, first, first + size)
            first += size
        return ranges


def one_file(
    name: CorpusName,
    *,
    title: str,
    contents: str,
    file: str,
    size: int,
    sha256: str,
    urls: tuple[str, ...],
    cuts: tuple[int, int, int],
    tokenizer: TokenizerConfig,
    vocab_size: int,
    packed: tuple[int | None, str | None] | None = None,
    closed_alphabet: bool = False,
) -> PublishedCorpus:
    """Returns the row of a corpus that is one file, split by position.

    Args:
      name: its name, and that of its own folder.
      title: as in the row; so are `contents`, `vocab_size` and `closed_alphabet`.
      file: name of the file.
      size: bytes of the file.
      sha256: of the file, in hexadecimal.
      urls: addresses of the file, or of an archive that holds it; the best one first.
      cuts: bytes (not tokens or lines) of the training, validation and test text, which follow each other.
      tokenizer: default settings of its tokens.
      packed: bytes and sha256 of the archive at `urls`, as far as they are known; None: the file itself is there.
    """
    remote_size, remote_sha256 = (size, sha256) if packed is None else packed
    return PublishedCorpus(
        title=title,
        contents=contents,
        folders=(str(name),),
        layouts=({WHOLE: (file,)},),
        facts={WHOLE: Facts(size=size, sha256=sha256)},
        sources=tuple((Remote(url, remote_size, remote_sha256),) for url in urls),
        defaults=DataConfig(corpus=name, tokenizer=tokenizer),
        vocab_size=vocab_size,
        cuts=dict(zip(("train", "valid", "test"), cuts, strict=True)),
        closed_alphabet=closed_alphabet,
    )
