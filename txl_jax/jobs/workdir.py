"""The workdir of a run: its config and text, and the lock that keeps other runs out.

config.json       settings, implementations of attention, version of the format; what members of an ensemble differ in
vocabulary.txt    the tokens by id
checkpoints/      latest/ (everything), best/ (parameters of the lowest validation loss)
metrics.jsonl, log.txt, tensorboard/
results.json      written when training has ended
"""

import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from txl_jax.attention_choice import AttentionChoice
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.data.tokens.build_vocabulary import KINDS
from txl_jax.data.tokens.vocabulary import Vocabulary, digest, dumps, loads
from txl_jax.errors import MissingPackageError, UserError
from txl_jax.jobs import attention_record, changes
from txl_jax.runtime import distributed
from txl_jax.runtime.files import write_json, write_text
from txl_jax.runtime.metrics_log import METRICS
from txl_jax.runtime.paths import is_remote, modified, remote_error
from txl_jax.runtime.run_lock import RunLock, run_lock
from txl_jax.training.members import Members
from txl_jax.training.results import RESULTS
from txl_jax.training.run_checkpoints import best_folder, latest_folder

FORMAT = 3  # Of config.json; raised when settings, parameters or draws change meaning.
_SECONDS_TO_APPEAR = 30  # Network file systems show a new file to other hosts once their caches expire.
_SECONDS_OF_A_START = 3600  # No start waits for the others as long.
_TEXT_FACTS = ("name", "description", "digest", "data_dir", "cache_dir")


@dataclasses.dataclass(frozen=True)
class TextInfo:
    """The text of a run."""

    name: str
    description: str
    digest: str
    vocabulary: Vocabulary
    data_dir: str = ""  # The folders that it and its ids were read from; on another machine they may differ.
    cache_dir: str = ""

    @classmethod
    def of(cls, corpus: Corpus) -> "TextInfo":
        """Describes a corpus."""
        return cls(corpus.name, corpus.description, corpus.digest, corpus.vocabulary, corpus.data_dir, corpus.cache_dir)


class Record(NamedTuple):
    """The contents of config.json and vocabulary.txt."""

    config: ExperimentConfig
    text: TextInfo
    members: list[dict[str, float]]
    attention: attention_record.Record
    warm_start: dict[str, Any] | None  # As `txl_jax.jobs.warm_start` writes it; None: it began with random weights.


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of a run, and its config and text.

    Attributes:
      member: the member of an ensemble that is loaded; None: all, or a run by itself.
    """

    path: Path
    member: str | None = None

    @property
    def latest(self) -> Path:
        """Checkpoints that training resumes from; of an ensemble with all members."""
        return latest_folder(self.path)

    @property
    def best(self) -> Path:
        """Parameters of the lowest validation loss, of the member if there is one."""
        return best_folder(self.path, self.member)

    @property
    def outputs(self) -> Path:
        """Folder for scores and samples: the workdir, or a folder of the member in it; made if missing."""
        folder = self.path / "members" / self.member if self.member else self.path
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def config_file(self) -> Path:
        """Path of config.json."""
        return self.path / "config.json"

    @property
    def vocabulary_file(self) -> Path:
        """Path of vocabulary.txt."""
        return self.path / "vocabulary.txt"

    def create(self) -> "Workdir":
        """Makes the folder, and checks that it can be written to.

        Raises:
          UserError: it cannot; the message names the folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.write_bytes(b"\0" * 4096)
            probe.unlink(missing_ok=True)  # Another run that holds the lock may have swept it.
        except OSError as error:
            raise self._not_writable(error) from error
        return self

    def _not_writable(self, error: OSError) -> UserError:
        if is_remote(self.path):
            return remote_error("write to", self.path, error)
        advice = "give --workdir=... a folder that you may write to, on a disk with space"
        return UserError(f"cannot write to the workdir {self.path} ({error.strerror}); {advice}")

    def holds_run(self) -> bool:
        """Returns whether a run was recorded here; raises `UserError` if object storage cannot be reached."""
        try:
            return self.config_file.exists()
        except OSError as error:
            raise remote_error("read", self.path, error) from error

    def check_shared(self) -> None:
        """Checks that all processes see the same folder; all call it, once the folder exists.

        Raises:
          UserError: one sees another; in all of them (or `RemoteProcessError`).
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
                raise UserError(
                    f"the workdir {self.path} is not the folder that process 0 writes to; give all hosts a --workdir "
                    "on a file system that they share"
                )
            time.sleep(0.1)

    def lock(self, lock: RunLock | None = None) -> RunLock:
        """Takes a lock, a new one or that of the caller, which keeps other runs out until it is closed.

        Raises:
          UserError: another run holds the lock.
        """
        lock = lock or run_lock(self.path)
        lock.acquire()
        self._sweep()
        return lock

    def _sweep(self) -> None:
        """Removes half-written files of killed runs; those of other programs may belong to one that is running."""
        names = (self.config_file.name, self.vocabulary_file.name, METRICS, RESULTS)
        for pattern in (".probe-*", *(f".{name}.*.tmp" for name in names)):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        for path in self.path.glob(".seen-by-all-*"):  # A scoring that is beginning may have one too.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - modified(path) > _SECONDS_OF_A_START:
                    path.unlink()

    def record(
        self,
        config: ExperimentConfig,
        text: TextInfo,
        members: changes.Members = (),
        *,
        attention: attention_record.Record | None = None,
        warm_start: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes config.json and vocabulary.txt.

        Args:
          members: the settings that those of an ensemble differ in.
          attention: the implementations of attention; None: not recorded.
          warm_start: the weights that the run began with; None: random ones.
        """
        write_text(self.vocabulary_file, dumps(text.vocabulary))
        facts = {name: getattr(text, name) for name in _TEXT_FACTS} | {"vocabulary_sha256": digest(text.vocabulary)}
        saved = {"format": FORMAT, "config": config_tree.to_dict(config), "text": facts}
        if attention:
            saved["attention"] = dict(attention)
        if warm_start:
            saved["warm_start"] = dict(warm_start)
        if members:
            saved["members"] = [dict(each) for each in members]
        write_json(self.config_file, saved)

    def load(self) -> tuple[ExperimentConfig, TextInfo]:
        """Reads config and text of the run, or of the chosen member of an ensemble.

        Raises:
          UserError: there is no run here, config.json cannot be read, or the choice of a member does not fit.
        """
        record = self.read()
        config, text, members = record.config, record.text, record.members
        if members and self.member is None:
            names = ", ".join(changes.by_name(members))
            raise UserError(f"{self.path} holds an ensemble; choose a member with --ensemble_member: {names}")
        if self.member is None:
            return config, text
        return config_tree.replace(config, self._chosen(members)), text

    def members(self) -> Members:
        """Returns the members of the ensemble that is recorded here; without names if it is a run by itself."""
        return Members(tuple(changes.by_name(self.read().members)))

    def member_index(self) -> int:
        """Returns the place of the chosen member on the member axis; raises `UserError` if there is none such."""
        members = self.read().members
        self._chosen(members)
        return list(changes.by_name(members)).index(self.member or "")

    def _chosen(self, members: changes.Members) -> Mapping[str, float]:
        by_name = changes.by_name(members)
        if self.member not in by_name:
            there = f"its members are {', '.join(by_name)}" if by_name else "it holds one run, so leave the flag out"
            raise UserError(f"--ensemble_member is {self.member!r} and {self.path} has none such; {there}")
        return by_name[self.member]

    def attention(self, config: ExperimentConfig) -> dict[str, str]:
        """Returns the recorded implementations of attention that a start with `config` keeps; empty without a run."""
        if not self.holds_run():
            return {}
        record = self.read()
        return attention_record.kept(record.attention, record.config, config)

    def read(self) -> Record:
        """Reads the whole record of the run; raises `UserError` as `load`."""
        try:
            saved = json.loads(self.config_file.read_bytes())
            number = saved.get("format", 1)  # Format 1 has no number.
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(
                f"{self.path} holds no run (no {self.config_file.name}); give the workdir of a run that was trained"
            ) from error
        except (ValueError, AttributeError) as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise remote_error("read", self.config_file, error) from error
        if number != FORMAT:  # Before anything else, which may mean something else there.
            raise UserError(
                f"{self.config_file} has format {number!r} and this version of txl_jax reads format {FORMAT}; commit "
                "624573f reads formats 1 and 2, a newer txl_jax later ones"
            )
        try:
            config, text = config_tree.from_dict(saved["config"]), saved["text"]
            facts = {name: text[name] for name in _TEXT_FACTS}
            expected, members = text["vocabulary_sha256"], saved.get("members", [])
            attention = attention_record.check(saved.get("attention", attention_record.UNRECORDED))
        except UserError as error:
            raise UserError(
                f"{self.config_file} is of another version ({error}); give another --workdir, and train anew in it"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # Damage shows as any of them.
            raise self._damaged(error) from error
        text_info = TextInfo(**facts, vocabulary=self._load_vocabulary(expected))
        return Record(config, text_info, members, attention, saved.get("warm_start"))

    def _damaged(self, error: Exception) -> UserError:
        return UserError(
            f"{self.config_file} is damaged or of another version ({error!r}); restore it or give another --workdir"
        )

    def _load_vocabulary(self, expected_sha256: str) -> Vocabulary:
        try:
            vocabulary = loads(self.vocabulary_file.read_text(encoding="utf-8"), KINDS)
        except MissingPackageError:
            raise
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.vocabulary_file} cannot be read ({error}); restore it: without it the run's ids mean nothing"
            ) from error
        if digest(vocabulary) != expected_sha256:
            raise UserError(
                f"{self.vocabulary_file} holds {vocabulary.size:,} tokens that are not those of the run's checkpoints "
                f"(its sha256 is {digest(vocabulary)[:12]}..., the run's {expected_sha256[:12]}...); restore the file"
            )
        return vocabulary

    def check_same_run(
        self,
        config: ExperimentConfig,
        text: TextInfo,
        members: changes.Members = (),
        attention: AttentionChoice | None = None,
    ) -> list[str]:
        """Compares with an earlier start, if there was one.

        Returns:
          One line for each setting that differs and may, and for other implementations of attention.

        Raises:
          UserError: a setting that shapes the training, the members or the text differ; names every one.
        """
        if not self.holds_run():
            return []
        old = self.read()
        allowed, refused = self._changes(old, config, members)
        if old.text.digest != text.digest:
            refused.append(f"the text was {old.text.description!r} and is now {text.description!r}, with other content")
        elif old.text.vocabulary != text.vocabulary:
            refused.append(
                f"the vocabulary had {old.text.vocabulary.size:,} tokens and has {text.vocabulary.size:,}, or others"
            )
        self._refuse(refused)
        return [*allowed, *attention_record.changes(old.attention, attention)]

    def check_same_settings(self, config: ExperimentConfig, members: changes.Members = ()) -> None:
        """Does the part of `check_same_run` that needs no text."""
        if self.holds_run():
            self._refuse(self._changes(self.read(), config, members)[1])

    def _changes(self, old: Record, config: ExperimentConfig, members: changes.Members) -> tuple[list[str], list[str]]:
        return changes.of_settings(old.config, config, old_members=old.members, new_members=members)

    def _refuse(self, refused: list[str]) -> None:
        if refused:
            raise UserError(
                f"{self.path} holds a run with other settings: {'; '.join(refused)}. "
                "Start again with the old settings, or give another --workdir"
            )
