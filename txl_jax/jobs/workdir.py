"""The workdir of a run: its config and text, and the lock that keeps other runs out.

config.json       settings; of an ensemble those of the base, and what each member differs in
vocabulary.txt    the tokens by id
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import Corpus
from txl_jax.data.tokens.build_vocabulary import KINDS
from txl_jax.data.tokens.vocabulary import Vocabulary, digest, dumps, loads
from txl_jax.errors import UserError
from txl_jax.runtime import distributed
from txl_jax.runtime.files import write_json, write_text
from txl_jax.runtime.metrics_log import METRICS
from txl_jax.training.members import Members
from txl_jax.training.results import RESULTS
from txl_jax.training.run_checkpoints import best_folder, latest_folder

_SECONDS_TO_APPEAR = 30  # Network file systems show a new file to other hosts once their caches expire.
_SECONDS_OF_A_TEST = 1.0
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
            raise UserError(
                f"cannot write to the workdir {self.path} ({error.strerror}); "
                "give --workdir=... a folder that you may write to, on a disk with space"
            ) from error
        return self

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

    def lock(self) -> Any:
        """Returns an open file that keeps other runs out until it is closed or the process ends.

        Raises:
          UserError: another run holds the lock.
        """
        handle = open(self.path / ".lock", "a+")  # noqa: SIM115 (the caller closes it)
        try:
            _lock(handle)
        except BlockingIOError as error:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            handle.close()
            raise UserError(
                f"another run (process {holder}) is training in {self.path}; stop it, or give another --workdir"
            ) from error
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        self._sweep()
        return handle

    def _sweep(self) -> None:
        """Removes half-written files of killed runs; those of other programs may belong to one that is running."""
        names = (self.config_file.name, self.vocabulary_file.name, METRICS, RESULTS)
        for pattern in (".probe-*", *(f".{name}.*.tmp" for name in names)):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)
        for path in self.path.glob(".seen-by-all-*"):  # A scoring that is beginning may have one too.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _SECONDS_OF_A_START:
                    path.unlink()

    def record(self, config: ExperimentConfig, text: TextInfo, members: Sequence[Mapping[str, float]] = ()) -> None:
        """Writes config.json and vocabulary.txt; `members` are the settings that those of an ensemble differ in."""
        write_text(self.vocabulary_file, dumps(text.vocabulary))
        facts = {name: getattr(text, name) for name in _TEXT_FACTS} | {"vocabulary_sha256": digest(text.vocabulary)}
        saved = {"config": config_tree.to_dict(config), "text": facts}
        write_json(self.config_file, saved | ({"members": [dict(each) for each in members]} if members else {}))

    def load(self) -> tuple[ExperimentConfig, TextInfo]:
        """Reads config and text of the run, or of the chosen member of an ensemble.

        Raises:
          UserError: there is no run here, config.json cannot be read, or the choice of a member does not fit.
        """
        config, text, members = self._load()
        if members and self.member is None:
            raise UserError(
                f"{self.path} holds an ensemble; choose a member with --ensemble_member: {', '.join(_by_name(members))}"
            )
        if self.member is None:
            return config, text
        return config_tree.replace(config, self._chosen(members)), text

    def members(self) -> Members:
        """Returns the members of the ensemble that is recorded here; without names if it is a run by itself."""
        return Members(tuple(_by_name(self._load()[2])))

    def member_index(self) -> int:
        """Returns the place of the chosen member on the member axis; raises `UserError` if there is none such."""
        members = self._load()[2]
        self._chosen(members)
        return list(_by_name(members)).index(self.member or "")

    def _chosen(self, members: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        by_name = _by_name(members)
        if self.member not in by_name:
            there = f"its members are {', '.join(by_name)}" if by_name else "it holds one run, so leave the flag out"
            raise UserError(f"--ensemble_member is {self.member!r} and {self.path} has none such; {there}")
        return by_name[self.member]

    def _load(self) -> tuple[ExperimentConfig, TextInfo, list[dict[str, float]]]:
        try:
            saved = json.loads(self.config_file.read_bytes())
            config, text = config_tree.from_dict(saved["config"]), saved["text"]
            facts = {name: text[name] for name in _TEXT_FACTS}
            expected, members = text["vocabulary_sha256"], saved.get("members", [])
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(
                f"{self.path} holds no run (no {self.config_file.name}); give the --workdir of a run that was trained"
            ) from error
        except UserError as error:
            raise UserError(
                f"{self.config_file} is of another version ({error}); give another --workdir, and train anew in it"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # Damage shows as any of them.
            raise UserError(
                f"{self.config_file} is damaged or of another version ({error!r}); restore it or give another --workdir"
            ) from error
        return config, TextInfo(**facts, vocabulary=self._load_vocabulary(expected)), members

    def _load_vocabulary(self, expected_sha256: str) -> Vocabulary:
        try:
            vocabulary = loads(self.vocabulary_file.read_text(encoding="utf-8"), KINDS)
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
        self, config: ExperimentConfig, text: TextInfo, members: Sequence[Mapping[str, float]] = ()
    ) -> list[str]:
        """Compares with an earlier start, if there was one.

        Returns:
          One line for each setting that differs and may.

        Raises:
          UserError: a setting that shapes the training, the members or the text differ; names every one.
        """
        if not self.config_file.exists():
            return []
        _, old_text, _ = self._load()
        allowed, refused = self._changes(config, members)
        if old_text.digest != text.digest:
            refused.append(f"the text was {old_text.description!r} and is now {text.description!r}, with other content")
        elif old_text.vocabulary != text.vocabulary:
            refused.append(
                f"the vocabulary had {old_text.vocabulary.size:,} tokens and has {text.vocabulary.size:,}, or others"
            )
        self._refuse(refused)
        return allowed

    def check_same_settings(self, config: ExperimentConfig, members: Sequence[Mapping[str, float]] = ()) -> None:
        """Does the part of `check_same_run` that needs no text."""
        if self.config_file.exists():
            self._refuse(self._changes(config, members)[1])

    def _changes(self, config: ExperimentConfig, members: Sequence[Mapping[str, float]]) -> tuple[list[str], list[str]]:
        """Returns one line for each setting that differs: those that may, and those that shape the training."""
        old_config, _, old_members = self._load()
        allowed: list[str] = []
        refused: list[str] = []
        for leaf, before, after in config_tree.differences(old_config, config):
            line = config_tree.describe_change(leaf, before, after)
            (allowed if leaf.setting.free_on_resume else refused).append(line)
        before, after = ("; ".join(_by_name(each)) or "none" for each in (old_members, members))
        if before != after:
            refused.append(f"the members of the ensemble were {before} and are now {after}")
        return allowed, refused

    def _refuse(self, changes: list[str]) -> None:
        if changes:
            raise UserError(
                f"{self.path} holds a run with other settings: {'; '.join(changes)}. "
                "Start again with the old settings, or give another --workdir"
            )


def member_name(differences: Mapping[str, float]) -> str:
    """Returns the name of a member, also of its folders: "seed=2+learning_rate=0.001"; "base" if nothing differs."""
    return "+".join(f"{_short(name)}={value}" for name, value in differences.items()) or "base"


def _short(name: str) -> str:
    """Shortens a dotted name: "learning_rate", "seed", "dropout.rate"."""
    return name.removeprefix("model.").removeprefix("optimizer.")


def _by_name(members: Sequence[Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    return {member_name(each): each for each in members}


def _lock(handle: Any) -> None:
    """Raises `BlockingIOError` for a lock that another process holds; one that only tests it holds it for a moment."""
    until = time.monotonic() + _SECONDS_OF_A_TEST
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)
