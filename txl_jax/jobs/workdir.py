"""The folder of a run: which config and which text it belongs to, and that only one run writes to it.

config.json       what the run was started with
vocabulary.txt    what its token ids mean
checkpoints/      latest/ (everything), best/ (parameters of the lowest validation loss)
metrics.jsonl, log.txt, tensorboard/
results.json      written when training has ended
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.data.tokens.build_vocabulary import KINDS
from txl_jax.data.tokens.vocabulary import Vocabulary, digest, dumps, loads
from txl_jax.runtime import distributed
from txl_jax.runtime.files import write_json, write_text
from txl_jax.runtime.metrics_log import METRICS

_SECONDS_TO_APPEAR = 30  # Network file systems show a new file to other hosts when what they remember has expired.
_SECONDS_OF_A_LOOK = 1.0
_SECONDS_OF_A_START = 3600  # No start waits for others that long.
_TEXT_FACTS = ("name", "description", "digest", "data_dir", "cache_dir")


@dataclasses.dataclass(frozen=True)
class TextInfo:
    """What a run remembers of its text."""

    name: str
    description: str
    digest: str
    vocabulary: Vocabulary
    data_dir: str = ""  # Where it was read from, and
    cache_dir: str = ""  # where its ids lay; on another machine they may lie elsewhere.

    @classmethod
    def of(cls, corpus: Corpus) -> "TextInfo":
        return cls(corpus.name, corpus.description, corpus.digest, corpus.vocabulary, corpus.data_dir, corpus.cache_dir)


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of a run, and the record of what it is."""

    path: Path

    @property
    def latest(self) -> Path:
        """Checkpoints that training goes on from."""
        return self.path / "checkpoints" / "latest"

    @property
    def best(self) -> Path:
        """Parameters of the lowest validation loss."""
        return self.path / "checkpoints" / "best"

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def vocabulary_file(self) -> Path:
        return self.path / "vocabulary.txt"

    def create(self) -> "Workdir":
        """Makes the folder, and shows that it can be written to.

        Raises:
          OSError: it cannot; the message names the folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.write_bytes(b"\0" * 4096)
            probe.unlink(missing_ok=True)  # Another run that holds the lock may have swept it.
        except OSError as error:
            raise OSError(
                f"cannot write to the workdir {self.path} ({error.strerror}); "
                "give --workdir=... a folder that you may write to, on a disk with space"
            ) from error
        return self

    def check_shared(self) -> None:
        """Shows that all processes see the same folder; they call it together, once it is there.

        Raises:
          ValueError: one sees another; in all of them (or `RemoteProcessError`).
        """
        if not distributed.is_multiprocess():
            return
        name = distributed.broadcast_from_primary(lambda: f".seen-by-all-{secrets.token_hex(8)}")
        distributed.broadcast_from_primary(lambda: (self.path / name).touch())
        try:
            distributed.run_on_all(lambda: self._wait_for(name))
        finally:
            if distributed.is_primary():
                (self.path / name).unlink(missing_ok=True)

    def _wait_for(self, name: str) -> None:
        until = time.monotonic() + _SECONDS_TO_APPEAR
        while not (self.path / name).exists():
            if time.monotonic() > until:
                raise ValueError(
                    f"the workdir {self.path} is not the folder that process 0 writes to; give all hosts a --workdir on "
                    "a file system that they share"
                )
            time.sleep(0.1)

    def lock(self) -> Any:
        """An open file that keeps other runs out until it is closed or the process ends.

        Raises:
          OSError: another run has it.
        """
        handle = open(self.path / ".lock", "a+")
        try:
            _lock(handle)
        except BlockingIOError as error:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            handle.close()
            raise OSError(
                f"another run (process {holder}) is training in {self.path}; stop it, or give another --workdir"
            ) from error
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        self._sweep()
        return handle

    def _sweep(self) -> None:
        """Removes half-written files of killed runs; those of other programs may be of one that is running."""
        names = (self.config_file.name, self.vocabulary_file.name, METRICS, "results.json")
        for pattern in (".probe-*", *(f".{name}.*.tmp" for name in names)):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        for path in self.path.glob(".seen-by-all-*"):  # A scoring that is beginning may have one too.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _SECONDS_OF_A_START:
                    path.unlink()

    def record(self, config: ExperimentConfig, text: TextInfo) -> None:
        """Writes config.json and vocabulary.txt."""
        write_text(self.vocabulary_file, dumps(text.vocabulary))
        facts = {name: getattr(text, name) for name in _TEXT_FACTS} | {"vocabulary_sha256": digest(text.vocabulary)}
        write_json(self.config_file, {"config": config_tree.to_dict(config), "text": facts})

    def load(self) -> tuple[ExperimentConfig, TextInfo]:
        """What the run was started with.

        Raises:
          FileNotFoundError: nothing was started here.
          ValueError: config.json cannot be read.
        """
        try:
            saved = json.loads(self.config_file.read_bytes())
            config, text = config_tree.from_dict(saved["config"]), saved["text"]
            facts = {name: text[name] for name in _TEXT_FACTS}
            expected = text["vocabulary_sha256"]
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.path} holds no run (no {self.config_file.name}); give the --workdir of a run that was trained"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # Damage shows as any of them.
            raise ValueError(
                f"{self.config_file} is damaged or of an older version ({error!r}); restore it or give another --workdir"
            ) from error
        return config, TextInfo(**facts, vocabulary=self._load_vocabulary(expected))

    def _load_vocabulary(self, expected_sha256: str) -> Vocabulary:
        try:
            vocabulary = loads(self.vocabulary_file.read_text(encoding="utf-8"), KINDS)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.vocabulary_file} cannot be read ({error}); restore it: without it the run's ids mean nothing"
            ) from error
        if digest(vocabulary) != expected_sha256:
            raise ValueError(
                f"{self.vocabulary_file} holds {vocabulary.size:,} tokens that are not those of the run's checkpoints "
                f"(its sha256 is {digest(vocabulary)[:12]}..., the run's {expected_sha256[:12]}...); restore the file"
            )
        return vocabulary

    def check_same_run(self, config: ExperimentConfig, text: TextInfo) -> list[str]:
        """Compares with what the run was started with, if it was.

        Returns:
          One line for each setting that differs and may.

        Raises:
          ValueError: a setting that shapes the training, or the text, differs; names every one.
        """
        if not self.config_file.exists():
            return []
        old_config, old_text = self.load()
        allowed, refused = _changes(old_config, config)
        if old_text.digest != text.digest:
            refused.append(f"the text was {old_text.description!r} and is now {text.description!r}, with other content")
        elif old_text.vocabulary != text.vocabulary:
            refused.append(
                f"the vocabulary had {old_text.vocabulary.size:,} tokens and has {text.vocabulary.size:,}, or others"
            )
        self._refuse(refused)
        return allowed

    def check_same_settings(self, config: ExperimentConfig) -> None:
        """The part of `check_same_run` that needs no text."""
        if self.config_file.exists():
            self._refuse(_changes(self.load()[0], config)[1])

    def _refuse(self, changes: list[str]) -> None:
        if changes:
            raise ValueError(
                f"{self.path} holds a run with other settings: {'; '.join(changes)}. "
                "Start again with the old settings, or give another --workdir"
            )


def _lock(handle: Any) -> None:
    """Raises `BlockingIOError` for a lock that is held; who only looks at it, as a sweep does, holds it for a moment."""
    until = time.monotonic() + _SECONDS_OF_A_LOOK
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def _changes(old: ExperimentConfig, new: ExperimentConfig) -> tuple[list[str], list[str]]:
    """One line for each setting that differs: those that may, and those that shape the training."""
    allowed, refused = [], []
    for leaf, before, after in config_tree.differences(old, new):
        line = config_tree.describe_change(leaf, before, after)
        (allowed if leaf.setting.free_on_resume else refused).append(line)
    return allowed, refused
