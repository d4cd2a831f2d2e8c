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
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from txl_jax.config import EvalConfig, ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import KINDS, Corpus
from txl_jax.data.vocabulary import Vocabulary, digest, dumps, loads
from txl_jax.errors import MissingPackageError, UserError
from txl_jax.ops.attention import Implementation, Implementations
from txl_jax.runs.build import AttentionChoice, Chosen
from txl_jax.runs.checkpoints import best_folder, latest_folder
from txl_jax.runs.validation import RESULTS
from txl_jax.runtime import distributed
from txl_jax.runtime.lock import RunLock
from txl_jax.runtime.log import METRICS
from txl_jax.runtime.storage import (
    exists,
    is_remote,
    make_folder,
    modified,
    names,
    probe,
    read,
    remote_error,
    remove,
    write,
    write_json,
)
from txl_jax.training.members import Members

# -- Comparison of a start with the one before it in the same workdir: settings and members.

MemberSettings = Sequence[Mapping[str, float]]  # What the members of an ensemble differ in; empty: a run by itself.


def changed_settings(
    old: ExperimentConfig, new: ExperimentConfig, *, old_members: MemberSettings, new_members: MemberSettings
) -> tuple[list[str], list[str]]:
    """Returns one line for each setting that differs: those that may, and those that shape the training."""
    allowed: list[str] = []
    refused: list[str] = []
    for leaf, before, after in config_tree.differences(old, new):
        line = config_tree.describe_change(leaf, before, after)
        (allowed if leaf.setting.free_on_resume else refused).append(line)
    before, after = ("; ".join(by_name(each)) or "none" for each in (old_members, new_members))
    if before != after:
        refused.append(f"the members of the ensemble were {before} and are now {after}")
    return allowed, refused


def member_name(differences: Mapping[str, float]) -> str:
    """Returns the name of a member, also of its folders: "seed=2+learning_rate=0.001"; "base" if nothing differs."""
    return "+".join(f"{short_name(name)}={value}" for name, value in differences.items()) or "base"


def by_name(members: MemberSettings) -> dict[str, Mapping[str, float]]:
    """Returns what each member differs in, by its name."""
    return {member_name(each): each for each in members}


def short_name(setting: str) -> str:
    """Shortens a setting's dotted name.

    >>> short_name("optimizer.learning_rate"), short_name("model.dropout.rate"), short_name("train.mem_len")
    ('learning_rate', 'dropout.rate', 'train.mem_len')
    """
    return setting.removeprefix("model.").removeprefix("optimizer.")


# -- Checks that all processes of a run have the same settings and text; each reads its own rows of the text.

# Hosts may keep their files in different places; the contents are compared.
_PLACES = {leaf.name for leaf in config_tree.leaves() if leaf.setting.path and leaf.name.startswith("data.")}


def check_agreement(config: ExperimentConfig, corpus: Corpus) -> None:
    """Raises `UserError`, in all processes, if one has other settings or another text than process 0."""
    check_settings(config)
    distributed.assert_same_on_all(
        f"{corpus.description} (sha256 {corpus.digest[:12]}...)",
        lambda first, other: f"its text is {other} and that of process 0 is {first}; give all hosts the same files",
    )
    distributed.assert_same_on_all(
        digest(corpus.vocabulary),
        lambda first, other: (
            f"its vocabulary has the sha256 {other[:12]}... and that of process 0 {first[:12]}...; give all hosts the "
            "same files and the same versions of the libraries"
        ),
    )


def check_settings(config: ExperimentConfig) -> None:
    """Does the part of `check` that needs no text."""
    settings = {name: value for name, value in config_tree.to_dict(config).items() if name not in _PLACES}
    distributed.assert_same_on_all(json.dumps(settings), _difference)


def _difference(first: str, other: str) -> str:
    ours, theirs = json.loads(first), json.loads(other)
    names = [name for name in ours if theirs.get(name) != ours[name]]
    differences = ", ".join(f"{name} is {theirs.get(name)} there and {ours[name]} in process 0" for name in names[:3])
    return f"{differences}; start all hosts with the same command"


# -- The record in config.json of the implementations of attention that a run uses.
#
# `auto` may choose another one later: on another device, or with another version of this code. Numbers of two
# implementations agree up to rounding only, so a resumed run keeps the recorded one and stays equal bit for bit.
#
#     "attention": {"training": "tiled 128x256", "evaluation": "tiled 80x512"}

AttentionRecord = Mapping[str, str]  # "training" and "evaluation" to their implementations; one may be missing.

# Runs without a record were trained with the reference, when there was nothing else.
UNRECORDED: AttentionRecord = {"training": "reference"}
# Settings that the choice for evaluation depends on.
_EVALUATION = ("batch_size", "segment_len", "mem_len", "clamp_len", "same_length", "cache_dtype")


def attention_to_json(choice: AttentionChoice | None) -> dict[str, str]:
    """Returns the record of a choice; empty if the network has no attention."""
    return {name: str(chosen.implementation) for name, chosen in _by_name(choice).items()}


def check_attention(record: AttentionRecord) -> AttentionRecord:
    """Returns a record as it was read; raises `ValueError` if it is damaged."""
    for name in record:
        Implementation.parse(record[name])
    return record


def kept_attention(record: AttentionRecord, old: ExperimentConfig, new: ExperimentConfig) -> dict[str, str]:
    """Returns the part of a record that a start with these settings keeps.

    Nothing if `model.attention` was changed; that of evaluation only for the lengths that it was chosen for.
    """
    if old.model.attention is not new.model.attention:
        return {}
    same = _lengths(old.eval) == _lengths(new.eval)
    return {name: text for name, text in record.items() if same or name != "evaluation"}


def parse_attention(record: AttentionRecord, config: ExperimentConfig) -> Implementations:
    """Returns the implementations of a record; what it lacks is chosen as the config asks for."""
    path = str(config.model.attention)
    training, evaluation = (
        Implementation.parse(record[name]) if name in record else path for name in ("training", "evaluation")
    )
    return Implementations(training, evaluation)


def check_same_attention(choice: AttentionChoice | None) -> None:
    """Raises `UserError`, in all processes, if one has chosen another implementation than process 0."""
    distributed.assert_same_on_all(
        json.dumps(attention_to_json(choice)),
        lambda first, other: (
            f"it would compute attention by {_text(other)} and process 0 by {_text(first)}; start all hosts with the "
            "same devices and versions of the libraries, or choose with --model.attention"
        ),
    )


def opening_line(choice: AttentionChoice) -> str:
    """Describes what was chosen, and why."""
    return "attention " + _with_reasons(
        {f"{name} {each.implementation}": each for name, each in _by_name(choice).items()}
    )


def attention_changes(before: AttentionRecord, choice: AttentionChoice | None) -> list[str]:
    """Returns a line that names the implementations that differ from those before; none if all are the same."""
    changed = {
        f"{name} was {before[name]} and is now {chosen.implementation}": chosen
        for name, chosen in _by_name(choice).items()
        if name in before and before[name] != str(chosen.implementation)
    }
    return [f"attention: {_with_reasons(changed)}"] if changed else []


def evaluation_lines(recorded: Implementations, choice: AttentionChoice | None) -> list[str]:
    """Returns a line about the implementation that a trained run is scored with; none if it is the recorded one."""
    if choice is None or recorded.cached == choice.evaluation.implementation:
        return []
    was = f"was {recorded.cached} and is now " if isinstance(recorded.cached, Implementation) else ""
    return [f"attention: evaluation {was}{choice.evaluation.implementation} ({choice.evaluation.reason})"]


def _by_name(choice: AttentionChoice | None) -> dict[str, Chosen]:
    return {} if choice is None else choice._asdict()


def _with_reasons(clauses: Mapping[str, Chosen]) -> str:
    """Joins clauses, each with its reason in brackets, or all with one if it is the same."""
    reasons = {chosen.reason for chosen in clauses.values()}
    if len(reasons) == 1:
        return f"{', '.join(clauses)} ({reasons.pop()})"
    return "; ".join(f"{clause} ({chosen.reason})" for clause, chosen in clauses.items())


def _lengths(config: EvalConfig) -> list[object]:
    return [getattr(config, name) for name in _EVALUATION]


def _text(record: str) -> str:
    return ", ".join(f"{text} in {name}" for name, text in json.loads(record).items()) or "none"


FORMAT = 3  # Of config.json; raised when settings, parameters or draws change meaning.
_SECONDS_TO_APPEAR = 30  # Network file systems show a new file to other hosts once their caches expire.
_SECONDS_OF_A_START = 3600  # No start waits for the others as long.
_HALF_WRITTEN = re.compile(rf"\.probe-.*|\.(config\.json|vocabulary\.txt|{METRICS}|{RESULTS})\..*\.tmp")
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
    attention: AttentionRecord
    warm_start: dict[str, Any] | None  # As `txl_jax.runs.warm_start` writes it; None: it began with random weights.


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of a run, and its config and text.

    Attributes:
      member: the member of an ensemble that is loaded; None: all, or a run by itself.
    """

    path: str
    member: str | None = None

    @property
    def latest(self) -> str:
        """Checkpoints that training resumes from; of an ensemble with all members."""
        return latest_folder(self.path)

    @property
    def best(self) -> str:
        """Parameters of the lowest validation loss, of the member if there is one."""
        return best_folder(self.path, self.member)

    @property
    def outputs(self) -> str:
        """Folder for scores and samples: the workdir, or a folder of the member in it; made if missing."""
        folder = os.path.join(self.path, "members", self.member) if self.member else self.path
        make_folder(folder)
        return folder

    @property
    def config_file(self) -> str:
        """Path of config.json."""
        return os.path.join(self.path, "config.json")

    @property
    def vocabulary_file(self) -> str:
        """Path of vocabulary.txt."""
        return os.path.join(self.path, "vocabulary.txt")

    def create(self) -> "Workdir":
        """Makes the folder, and checks that it can be written to.

        Raises:
          UserError: it cannot; the message names the folder.
        """
        try:
            probe(self.path)
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
            return exists(self.config_file)
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
        distributed.broadcast_from_primary(lambda: write(os.path.join(self.path, name), b""))
        try:
            distributed.run_on_all(lambda: self._wait_for(name))
        finally:
            if distributed.is_primary():
                remove(os.path.join(self.path, name))

    def _wait_for(self, name: str) -> None:
        until = time.monotonic() + _SECONDS_TO_APPEAR
        while not exists(os.path.join(self.path, name)):
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
        lock = lock or RunLock(self.path)
        lock.acquire()
        self._sweep()
        return lock

    def _sweep(self) -> None:
        """Removes half-written files of killed runs; those of other programs may belong to one that is running."""
        for name in names(self.path):
            path = os.path.join(self.path, name)
            if _HALF_WRITTEN.fullmatch(name):
                remove(path)
            elif name.startswith(".seen-by-all-"):  # A scoring that is beginning may have one too.
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - modified(path) > _SECONDS_OF_A_START:
                        remove(path)

    def record(
        self,
        config: ExperimentConfig,
        text: TextInfo,
        members: MemberSettings = (),
        *,
        attention: AttentionRecord | None = None,
        warm_start: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes config.json and vocabulary.txt.

        Args:
          members: the settings that those of an ensemble differ in.
          attention: the implementations of attention; None: not recorded.
          warm_start: the weights that the run began with; None: random ones.
        """
        write(self.vocabulary_file, dumps(text.vocabulary).encode())
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
            names = ", ".join(by_name(members))
            raise UserError(f"{self.path} holds an ensemble; choose a member with --ensemble_member: {names}")
        if self.member is None:
            return config, text
        return config_tree.replace(config, self._chosen(members)), text

    def members(self) -> Members:
        """Returns the members of the ensemble that is recorded here; without names if it is a run by itself."""
        return Members(tuple(by_name(self.read().members)))

    def member_index(self) -> int:
        """Returns the place of the chosen member on the member axis; raises `UserError` if there is none such."""
        members = self.read().members
        self._chosen(members)
        return list(by_name(members)).index(self.member or "")

    def _chosen(self, members: MemberSettings) -> Mapping[str, float]:
        named = by_name(members)
        if self.member not in named:
            there = f"its members are {', '.join(named)}" if named else "it holds one run, so leave the flag out"
            raise UserError(f"--ensemble_member is {self.member!r} and {self.path} has none such; {there}")
        return named[self.member]

    def attention(self, config: ExperimentConfig) -> dict[str, str]:
        """Returns the recorded implementations of attention that a start with `config` keeps; empty without a run."""
        if not self.holds_run():
            return {}
        record = self.read()
        return kept_attention(record.attention, record.config, config)

    def read(self) -> Record:
        """Reads the whole record of the run; raises `UserError` as `load`."""
        try:
            saved = json.loads(read(self.config_file))
            number = saved.get("format", 1)  # Format 1 has no number.
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(
                f"{self.path} holds no run (no config.json); give the workdir of a run that was trained"
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
            attention = check_attention(saved.get("attention", UNRECORDED))
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
            vocabulary = loads(read(self.vocabulary_file).decode(), KINDS)
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
        members: MemberSettings = (),
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
        return [*allowed, *attention_changes(old.attention, attention)]

    def check_same_settings(self, config: ExperimentConfig, members: MemberSettings = ()) -> None:
        """Does the part of `check_same_run` that needs no text."""
        if self.holds_run():
            self._refuse(self._changes(self.read(), config, members)[1])

    def _changes(self, old: Record, config: ExperimentConfig, members: MemberSettings) -> tuple[list[str], list[str]]:
        return changed_settings(old.config, config, old_members=old.members, new_members=members)

    def _refuse(self, refused: list[str]) -> None:
        if refused:
            raise UserError(
                f"{self.path} holds a run with other settings: {'; '.join(refused)}. "
                "Start again with the old settings, or give another --workdir"
            )
