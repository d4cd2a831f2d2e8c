"""The directory of one run and its record (`Run`), and the lock that keeps other runs out.

The record is read once.

config.json       settings, text, implementations of attention, what the backward pass recomputes,
                  versions of format and dropout masks, and the differences of ensemble members
vocabulary.txt    the tokens by id
checkpoints/      latest/ (everything), best/ or best/MEMBER/ (parameters of the lowest validation
                  loss)
metrics.jsonl, log.txt, tensorboard/
results.json      written when training has ended
"""

import contextlib
import dataclasses
import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from txl_jax.config import DataConfig, ExperimentConfig, Remat, config_tree
from txl_jax.config.config_tree import from_dict, require
from txl_jax.config.evaluation import is_same_in_training
from txl_jax.data.corpus import KINDS, Corpus
from txl_jax.data.vocabulary import Vocabulary, digest, dumps, loads
from txl_jax.errors import UserError, rephrased
from txl_jax.ops.attention import AttentionPaths, Implementation
from txl_jax.ops.random_masks import MASKS_VERSION
from txl_jax.runs import attention_choice
from txl_jax.runs.attention_choice import ChosenPath
from txl_jax.runs.remat_choice import ChosenRemat
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.checkpoint import find_steps
from txl_jax.runtime.lock import RunLock
from txl_jax.runtime.log import METRICS
from txl_jax.runtime.storage import access_error

RESULTS = "results.json"
# Version of config.json's format. It is raised if settings, parameters or random numbers other than
# dropout masks change meaning.
FORMAT = 3
# The settings in which each member of an ensemble differs. Empty for a single run.
MemberSettings = Sequence[Mapping[str, float]]

_CONFIG = "config.json"
_VOCABULARY = "vocabulary.txt"
# Maximum number of runs that an error names, as examples of valid paths.
_MOST_NAMED = 5
# Network file systems show a new file to other hosts once their caches expire.
_SECONDS_TO_APPEAR = 30
# Fields of `TextInfo`, and of `Corpus`, that the record contains under the same names.
_TEXT_FACTS = ("name", "description", "digest", "data_dir", "cache_dir")
# Settings that the choice of attention for evaluation depends on.
_EVALUATION = ("batch_size", "segment_len", "mem_len", "clamp_len", "same_length", "cache_dtype")
# Hosts may keep their files in different places, so only the contents are compared.
_PLACES = {f"data.{leaf.name}" for leaf in config_tree.leaves(DataConfig) if leaf.setting.path}


@dataclasses.dataclass(frozen=True)
class TextInfo:
    """The text of a run."""

    name: str
    description: str
    digest: str
    vocabulary: Vocabulary
    # The directories that the text and its ids were read from. They may differ on another machine.
    data_dir: str = ""
    cache_dir: str = ""


@dataclasses.dataclass(eq=False, repr=False)
class Run(contextlib.AbstractContextManager["Run"]):
    """The directory of one run, and its record (config.json and vocabulary.txt).

    All processes make the same calls. Process 0 reads and writes files.

    A command that uses a trained run calls `read` (or `read_all` for a whole ensemble), which
    changes nothing in the directory. A command that trains makes these calls, in this order:

    1. `open` reads the record, if any, and locks the directory of a recorded run. If the run has
       dropout masks of another version, `compare` locks it after checking that it may be trained.
    2. `compare` checks the settings against the record, before a text is read.
    3. `record_start` locks the directory of a new run, and writes the record.
    4. `check` between updates, and `confirm` before a checkpoint, stop a run that has lost its
       lock.
    5. `close` releases the lock.

    `claim` (lock a new directory) and `record` (write the files) are the two parts of
    `record_start` for process 0. They are public because `ensemble.split_off` copies a run.
    """

    # Absolute.
    path: str
    # Chosen member of an ensemble, or None for all members and for a single run.
    member: str | None = None
    # Whether nothing is recorded yet. `config` and `text` are not set then.
    is_new: bool = True
    # Recorded settings, including the chosen member's.
    config: ExperimentConfig = dataclasses.field(init=False)
    # Recorded text.
    text: TextInfo = dataclasses.field(init=False)
    # Settings that the members of an ensemble differ in. Empty for a single run.
    members: MemberSettings = ()
    # Implementations by use, as first chosen: {"training": "tiled 128x256", "evaluation": ...}.
    attention: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # What the backward pass recomputed in the last start, or None if nothing was chosen.
    remat: Remat | None = None
    # Path, step, sha256 and tokens of a warm start, or None if the run began with random weights.
    warm_start: Mapping[str, Any] | None = None
    # Version of the dropout masks (see `MASKS_VERSION`) that the parameters were trained with.
    dropout_masks: int = MASKS_VERSION
    # Lines for the log: settings that changed, a lock that was taken over.
    notes: list[str] = dataclasses.field(default_factory=list)
    # Whether the run is to be trained.
    is_open: bool = False
    # Recorded contents of config.json and vocabulary.txt, or None for a new run.
    _recorded: list[str] | None = None
    # The lock, in process 0 of a run that is trained.
    _lock: RunLock | None = None

    def __post_init__(self) -> None:
        self.path = storage.as_path(self.path)
        storage.refuse_wildcards(self.path)

    # Reading a trained run

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, member: str | None = None) -> "Run":
        """Reads a trained run, or one member of an ensemble. Takes no lock and writes nothing.

        Raises:
          UserError: If the directory contains no run, its record cannot be read, `member` is not
            in it, or it contains an ensemble and `member` is None.
        """
        run = cls.read_all(path)
        members = by_name(run.members)
        names = ", ".join(members)
        if member is None:
            require(
                not members,
                f"{run.path} contains an ensemble. Choose a member with --ensemble_member: {names}",
            )
            return run

        require(
            members,
            f"{run.path} has no member for --ensemble_member={member!r}. "
            "It contains one run, so omit the flag",
        )
        require(
            member in members,
            f"{run.path} has no member for --ensemble_member={member!r}. Its members are {names}",
        )
        run.member = member
        run.config = config_tree.replace(run.config, members[member])
        return run

    @classmethod
    def read_all(cls, path: str | os.PathLike[str]) -> "Run":
        """Reads a trained run, or an ensemble with all of its members. Otherwise like `read`."""
        run = cls(os.fspath(path))
        run._read()
        if run.is_new:
            advice = "Pass the workdir of a trained run"
            runs_below = _runs_below(run.path)
            if runs_below:
                advice += f", such as one of the runs in it: {', '.join(runs_below)}"
            exists = storage.is_dir(run.path)
            reason = f"no {_CONFIG}" if exists else "no such directory"
            raise UserError(f"{run.path} contains no run ({reason}). {advice}.")
        return run

    # Training

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Run":
        """Opens a run to train, new or recorded, as a context manager. The first call of training.

        The record of a locked run cannot change. A run with dropout masks of another version is not
        locked yet: `compare` may have to reject it, and then nothing in its directory has changed.
        For a new run nothing is created before `record_start`, so that mistakes in settings do not
        leave a directory behind.
        """
        run = cls(os.fspath(path), is_open=True)
        try:
            run._read()
        except BaseException:
            run.close()
            raise
        return run

    def close(self, *error: object) -> None:
        """Releases the lock. A second call does nothing."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    __exit__ = close

    @property
    def latest(self) -> str:
        """Checkpoints that training resumes from, with all members of an ensemble."""
        return os.path.join(self.path, "checkpoints", "latest")

    @property
    def best(self) -> str:
        """Parameters with the lowest validation loss, the chosen member's in an ensemble."""
        folder = os.path.join(self.path, "checkpoints", "best")
        return os.path.join(folder, self.member) if self.member else folder

    @property
    def outputs(self) -> str:
        """Directory for scores and samples: the run's, or the member's in it. Made if missing."""
        storage.make_folder(self.outputs_path)
        return self.outputs_path

    @property
    def outputs_path(self) -> str:
        """The path of `outputs`, which may be missing."""
        if self.member:
            return os.path.join(self.path, "members", self.member)
        return self.path

    @property
    def member_names(self) -> tuple[str, ...]:
        """Names of an ensemble's members, in the order of the member axis.

        The tuple is empty for a single run.
        """
        return tuple(by_name(self.members))

    def attention_for(self, config: ExperimentConfig) -> AttentionPaths[Implementation | str]:
        """Returns the implementations of attention for a start with `config`.

        These are the recorded implementations, or the config's own choice, such as "auto". `cached`
        is for attention over a KV cache, in evaluation and generation.

        Another device or version may choose other implementations, whose numbers agree only up to
        rounding, and a resumed run must stay identical bit for bit. If `model.attention` has
        changed, or a length for evaluation, the choice is made again.
        """
        choice = str(config.model.attention)
        if self.is_new or self.config.model.attention is not config.model.attention:
            return AttentionPaths(training=choice, cached=choice)

        # The record calls attention over a KV cache "evaluation".
        recorded = {use: Implementation.parse(text) for use, text in self.attention.items()}
        training = recorded.get("training", choice)
        cached = recorded.get("evaluation", choice)
        same_evaluation = all(
            getattr(self.config.eval, name) == getattr(config.eval, name) for name in _EVALUATION
        )
        if not same_evaluation:
            cached = choice
        return AttentionPaths(training=training, cached=cached)

    def remat_for(self, config: ExperimentConfig) -> Remat:
        """Returns what the backward pass recomputes in a start with `config`.

        `Remat.AUTO` of a recorded run means the choice of its last start, even on another machine:
        another choice rounds differently, and a resumed run must stay identical bit for bit. Any
        other value changes the choice. The result is `AUTO` only if nothing was chosen yet.
        """
        if self.is_new or config.model.remat is not Remat.AUTO:
            return config.model.remat
        # Runs from versions without this choice have recorded their setting.
        return self.remat or self.config.model.remat

    def compare(self, config: ExperimentConfig, members: MemberSettings = ()) -> None:
        """Compares settings between processes and with the record, before anything is written.

        Raises:
          UserError: If the processes have different settings, a setting that must not change has
            changed, or training would continue with dropout masks of another version.
        """
        check_same_settings(config)
        if self.is_new:
            return

        changes = self._changes(config, allowed=False)

        # train.steps may be lowered, but not below the steps that are done.
        steps = config.train.steps
        recorded_steps = self.config.train.steps
        if steps < recorded_steps:
            done = self._steps_done()
            if steps < done:
                changes.append(
                    f"--train.steps was {recorded_steps} and is now {steps}, "
                    f"fewer than the {done} already done"
                )

        recorded_names = "; ".join(by_name(self.members)) or "none"
        names = "; ".join(by_name(members)) or "none"
        if names != recorded_names:
            changes.append(f"the members of the ensemble were {recorded_names} and are now {names}")
        if changes:
            raise self._changed_error(changes)

        # A run that is only read, such as for the table of a sweep, does not need masks.
        if self.is_open and self.dropout_masks != MASKS_VERSION:
            self._compare_masks(config, members)
            distributed.broadcast_from_primary(self._lock_if_unlocked)

    def _compare_masks(self, config: ExperimentConfig, members: MemberSettings) -> None:
        """Rejects training that would continue with other dropout masks. All processes call it.

        A run without dropout, or without a checkpoint that depends on earlier masks, has this
        version from now on: `record` writes it.
        """
        configs = [config_tree.replace(config, dict(member)) for member in members] or [config]
        has_dropout = any(member_config.model.dropout.on for member_config in configs)
        done = self._steps_done()
        if not has_dropout or not done:
            self.dropout_masks = MASKS_VERSION
        elif self._updates_remain(config, done):
            # All processes raise together, and one of them prints the error.
            distributed.run_on_all(self.check_masks)

    def check_masks(self) -> None:
        """Raises `UserError` if the run's dropout masks are of another version.

        For a run without dropout, `compare` has set them to this one.
        """
        if self.dropout_masks == MASKS_VERSION:
            return
        advice = (
            f"To continue from its weights, begin a new run with --init_from={self.path} and "
            "another --workdir."
        )
        if self.members:
            advice = (
                "To continue from a member's weights, split it off (python -m experiments.ensemble "
                "--mode=split), and begin a new run with --init_from=PATH of its new directory."
            )
        raise UserError(
            f"the dropout masks of the run in {self.path} must be of version {MASKS_VERSION} to "
            f"resume its training, got version {self.dropout_masks} from another version of "
            f"txl_jax. {advice} To only score it, pass --mode=eval."
        )

    def _updates_remain(self, config: ExperimentConfig, done: int) -> bool:
        """Returns whether training would continue after `done` updates. All processes call it."""
        if done >= config.train.steps:
            return False
        # The run has done all of its steps, but train.steps was raised.
        if done >= self.config.train.steps:
            return True

        # With patience, training may have ended early. It ends at the same step again, unless
        # patience or the evaluations have changed. results.json contains the number of steps and
        # the evaluation settings. Members of an ensemble share all of these.
        patience = config.train.patience
        if patience is None or patience != self.config.train.patience:
            return True
        results = distributed.broadcast_from_primary(lambda: read_results(self.path))
        same_evaluation = is_same_in_training(results.get("eval"), config.eval)
        return results.get("steps") != done or not same_evaluation

    def _steps_done(self) -> int:
        """Returns the step of the latest checkpoint, or 0 without one. All processes call it."""
        saved_steps = distributed.broadcast_from_primary(
            lambda: [step for step, _ in find_steps(self.latest)]
        )
        return max(saved_steps, default=0)

    def record_start(
        self,
        config: ExperimentConfig,
        text: TextInfo | Corpus,
        *,
        attention: AttentionPaths[ChosenPath] | None = None,
        remat: ChosenRemat | None = None,
        warm_start: Mapping[str, Any] | None = None,
        members: MemberSettings = (),
    ) -> None:
        """Records the start of a run, after `compare`: claims a new directory, writes the record.

        This is the first write of a start, and the only write of the record.

        Args:
          config: Settings of this start, which `compare` has accepted.
          text: Text and vocabulary, which must be the recorded ones if the run resumes.
          attention: Implementations that were chosen, or None to record none.
          remat: What the backward pass recomputes, or None to record nothing.
          warm_start: Record of a warm start, or None to keep the recorded one, if any.
          members: Settings that the members of an ensemble differ in. Empty for a single run.

        Raises:
          UserError: If text, vocabulary or weights of a warm start are not the recorded ones, the
            directory cannot be written to, not all processes see it, or another run is in it.
        """
        if not self.is_new:
            self._compare_text(text)
        if warm_start and self.warm_start:
            self._compare_warm_start(self.warm_start, warm_start)
        self.warm_start = warm_start or self.warm_start

        self.notes += self._changes(config, allowed=True)
        attention_record: Mapping[str, str] = {}
        if attention is not None:
            attention_record = attention_choice.record_of(attention)
            change = attention_choice.describe(attention, before=self.attention)
            if change:
                self.notes.append(f"attention: {change}")
        remat_record = None if remat is None else remat.remat
        if self.remat is not None and remat_record is not None and remat_record != self.remat:
            self.notes.append(f"remat: was {self.remat} and is now {remat_record}")

        # Notes of the lock come first in the log.
        self.notes[:0] = distributed.broadcast_from_primary(
            lambda: self._claim_and_record(config, text, attention_record, remat_record, members)
        )
        distributed.check_seen_by_all(
            self.path,
            f"the workdir {self.path} is not the directory that process 0 writes to. "
            "Pass all hosts a --workdir on a shared file system.",
            seconds=_SECONDS_TO_APPEAR,
        )

    def _claim_and_record(
        self,
        config: ExperimentConfig,
        text: TextInfo | Corpus,
        attention: Mapping[str, str],
        remat: Remat | None,
        members: MemberSettings,
    ) -> list[str]:
        """Claims a new directory and writes the record, in process 0. Returns the lock's notes."""
        if self._lock is None:
            self.claim()
            # The directory was not locked since it was read.
            if holds_run(self.path):
                raise UserError(
                    f"another process has recorded a run in {self.path}. Rerun the same command."
                )
        self.record(config, text, attention=attention, remat=remat, members=members)
        return self._lock.notes if self._lock else []

    def _changes(self, config: ExperimentConfig, *, allowed: bool) -> list[str]:
        """Returns a line for each setting that differs from the record.

        If `allowed`, these are the settings that may differ. Otherwise, they are the others. A new
        run has no changes.
        """
        if self.is_new:
            return []
        lines = []
        for leaf, before, after in config_tree.differences(self.config, config):
            # `auto` keeps the choice of the last start (`remat_for`), so it is not a change.
            if leaf.name == "model.remat" and after is Remat.AUTO:
                continue
            may_differ = leaf.setting.free_on_resume or leaf.setting.may_grow
            if may_differ is allowed:
                lines.append(config_tree.describe_change(leaf, before, after))
        return lines

    def _compare_text(self, text: TextInfo | Corpus) -> None:
        """Raises `UserError` if text or vocabulary are not the recorded ones."""
        if self.text.digest != text.digest:
            before = self.text.description
            change = f"the text was {before!r} and is now {text.description!r}, with other content"
            raise self._changed_error([change])
        if self.text.vocabulary != text.vocabulary:
            size = self.text.vocabulary.size
            change = (
                f"the vocabulary had {size:,} tokens and has {text.vocabulary.size:,}, or others"
            )
            raise self._changed_error([change])

    def _compare_warm_start(self, recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        """Raises `UserError` if the weights of a warm start are not the recorded ones."""
        if current["sha256"] != recorded["sha256"]:
            raise UserError(
                f"the weights in {current['path']} changed since the run in {self.path} began "
                f"(sha256 {recorded['sha256'][:12]}... of step {recorded['step']}, "
                f"now sha256 {current['sha256'][:12]}... of step {current['step']}). "
                "Pass another --workdir."
            )

    def _changed_error(self, changes: Sequence[str]) -> UserError:
        """Returns the error for changes of a recorded run that are not allowed."""
        return UserError(
            f"{self.path} contains a run with other settings: {'; '.join(changes)}. "
            "To resume, omit these flags. To train a new run, pass another --workdir.",
        )

    def claim(self) -> None:
        """Creates and locks the directory. The first part of `record_start`, for process 0 only.

        Also removes the temporary files that killed runs have left.

        Raises:
          UserError: If the directory already contains a run, cannot be written to, or is locked by
            another run.
        """
        require(
            self.is_new,
            f"{self.path} already contains a run. Pass another directory with --to=PATH.",
        )
        self._acquire_lock()

    def _acquire_lock(self) -> None:
        """Creates and locks the directory, and removes the temporary files of killed runs."""
        try:
            storage.probe(self.path)
        except OSError as error:
            raise access_error("write to", self.path, error) from error
        lock = RunLock(self.path)
        lock.acquire()
        self._lock = lock

        # Only temporary files of training, because other commands may be writing theirs now.
        prefixes = tuple(f".{name}." for name in (_CONFIG, _VOCABULARY, METRICS, RESULTS))
        for name in storage.names(self.path):
            is_probe = name.startswith(".probe-")
            is_partial = name.endswith(".tmp") and name.startswith(prefixes)
            if is_probe or is_partial:
                storage.remove(os.path.join(self.path, name))

    def record(
        self,
        config: ExperimentConfig,
        text: TextInfo | Corpus,
        *,
        attention: Mapping[str, str],
        remat: Remat | None,
        members: MemberSettings = (),
    ) -> None:
        """Writes the record, unless it is unchanged. The second part of `record_start`.

        Process 0 calls it, with the lock. vocabulary.txt comes before config.json, which makes the
        directory a run.
        """
        text_facts = {name: getattr(text, name) for name in _TEXT_FACTS}
        text_facts["vocabulary_sha256"] = digest(text.vocabulary)
        record: dict[str, Any] = {
            "format": FORMAT,
            "config": config_tree.to_dict(config),
            "text": text_facts,
        }
        # Records of version 1 have no number, and stay as they are.
        if self.dropout_masks != 1:
            record["dropout_masks"] = self.dropout_masks
        if attention:
            record["attention"] = attention
        if remat is not None:
            record["remat"] = str(remat)
        if self.warm_start:
            record["warm_start"] = self.warm_start
        if members:
            record["members"] = members

        # Callers may pass any mappings. JSON supports only dicts, so they are converted.
        config_file = json.dumps(record, indent=2, allow_nan=False, default=dict) + "\n"
        vocabulary_file = dumps(text.vocabulary)
        if [config_file, vocabulary_file] != self._recorded:
            storage.write(os.path.join(self.path, _VOCABULARY), vocabulary_file.encode())
            storage.write(os.path.join(self.path, _CONFIG), config_file.encode())

    def check(self) -> None:
        """Raises `UserError` if this process already knows that another run has taken the lock.

        It reads nothing, so it can be called between updates.
        """
        if self._lock is not None:
            self._lock.check()

    def confirm(self) -> None:
        """Reads the lock again, and raises `UserError` if another run has taken it.

        It is called before a checkpoint is written. A lock can be taken over only in a bucket.
        """
        if self._lock is not None:
            self._lock.confirm()

    # Reading the record

    def _read(self) -> None:
        """Reads the record in process 0, and parses the same bytes in every process.

        A run that is opened for training is locked first.
        """
        self._recorded = distributed.broadcast_from_primary(self._lock_and_read_files)
        distributed.run_on_all(self._parse)

    def _lock_and_read_files(self) -> list[str] | None:
        """Locks a run that is trained, and returns the contents of its files, in process 0.

        Returns None if the directory contains no run.
        """
        contents = self._read_files()
        if contents is None or not self.is_open or _has_other_masks(contents[0]):
            return contents
        self._acquire_lock()
        # Another run may have changed the record before it was locked.
        return self._read_files()

    def _lock_if_unlocked(self) -> None:
        """Locks a recorded run that `open` has only read, in process 0."""
        if self._lock is not None:
            return
        self._acquire_lock()
        if self._read_files() != self._recorded:
            raise UserError(
                f"another process has changed the record in {self.path}. Rerun the same command."
            )

    def _read_files(self) -> list[str] | None:
        """Returns the contents of config.json and vocabulary.txt, or None without a run."""
        contents = []
        for name in (_CONFIG, _VOCABULARY):
            path = os.path.join(self.path, name)
            try:
                contents.append(storage.read(path).decode())
            except (FileNotFoundError, NotADirectoryError, ValueError) as error:
                is_missing = isinstance(error, OSError)
                if is_missing and name == _CONFIG:
                    return None
                raise UserError(self._corrupted(name).replace("%s", str(error))) from error
            except OSError as error:
                raise access_error("read", path, error) from error
        return contents

    def _parse(self) -> None:
        """Sets config, text and the other recorded fields, if the run is recorded."""
        if self._recorded is None:
            return
        config_file, vocabulary_file = self._recorded

        with rephrased(
            self._corrupted(_CONFIG), ValueError, LookupError, TypeError, AttributeError
        ):
            record = json.loads(config_file)
            # The format is checked first, because fields have other meanings in other formats.
            _check_format(record)
            self.config = from_dict(ExperimentConfig, record["config"])
            text = record["text"]
            text_facts = {name: str(text[name]) for name in _TEXT_FACTS}
            expected_digest = str(text["vocabulary_sha256"])
            self.members = record.get("members", [])
            _check_members(self.members, record["config"])
            self.attention = record.get("attention", {})
            self.warm_start = record.get("warm_start")
            _check_warm_start(self.warm_start)
            self.dropout_masks = _masks_version(record)
            for implementation in self.attention.values():
                Implementation.parse(implementation)
            if "remat" in record:
                self.remat = Remat(record["remat"])

        with rephrased(self._corrupted(_VOCABULARY), ValueError):
            vocabulary = loads(vocabulary_file, KINDS)
            self.text = TextInfo(**text_facts, vocabulary=vocabulary)
            actual_digest = digest(vocabulary)
            if actual_digest != expected_digest:
                raise ValueError(
                    f"sha256 {actual_digest[:12]}... for {vocabulary.size:,} tokens "
                    f"instead of {expected_digest[:12]}..."
                )
        self.is_new = False

    def _corrupted(self, name: str) -> str:
        """Returns the error for a file that cannot be parsed, with "%s" for the reason."""
        return (
            f"{os.path.join(self.path, name)} is corrupted, or this version cannot read it (%s). "
            "Restore it, or pass another --workdir."
        )


def _check_warm_start(record: Any) -> None:
    """Raises `UserError` unless a record describes the weights of a warm start, or is None."""
    if record is None:
        return
    # The values that a later start compares, and that its error shows.
    is_complete = (
        isinstance(record, dict) and isinstance(record.get("sha256"), str) and "step" in record
    )
    require(is_complete, f"warm_start must have sha256 and step, got {reprlib.repr(record)}")


def _check_format(record: Mapping[str, Any]) -> None:
    """Raises `UserError` if config.json does not belong to a run, or has another format."""
    require(
        "txl_jax_model" not in record,
        "it belongs to a portable checkpoint: pass the directory to --init_from",
    )
    number = record.get("format", 1)  # Format 1 has no number.
    if number in (1, 2):
        advice = "it was written before 0.1, so train the model again"
    else:
        advice = "use the txl_jax that wrote it, or a newer one"
    require(number == FORMAT, f"its format must be {FORMAT}, got {number!r}: {advice}")


def _masks_version(record: Mapping[str, Any]) -> int:
    """Returns the version of a run's dropout masks. Raises `UserError` if it is not a number."""
    version = record.get("dropout_masks", 1)  # Version 1 has no number.
    is_number = isinstance(version, int) and not isinstance(version, bool)
    require(is_number, f"dropout_masks must be a whole number, got {version!r}")
    return int(version)


def _has_other_masks(config_file: str) -> bool:
    """Returns whether config.json has dropout masks of another version.

    A file that cannot be parsed does not count. `Run` raises its errors.
    """
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        return json.loads(config_file).get("dropout_masks", 1) != MASKS_VERSION
    return False


def _check_members(members: MemberSettings, config: Mapping[str, Any]) -> None:
    """Raises `UserError` if recorded settings of members are not numbers, or are not valid."""
    for differences in by_name(members).values():
        # A text such as "../.." in a member's name would lead out of the run's directory.
        require(
            all(isinstance(value, int | float) for value in differences.values()),
            "the settings of ensemble members must be numbers, because they name directories",
        )
        from_dict(ExperimentConfig, {**config, **differences})


def holds_run(path: str | os.PathLike[str]) -> bool:
    """Returns whether a run is recorded in a directory. Raises `UserError` if it cannot be read."""
    path = storage.as_path(path)
    try:
        return storage.exists(os.path.join(path, _CONFIG))
    except OSError as error:
        raise access_error("read", path, error) from error


def _runs_below(folder: str) -> list[str]:
    """Returns paths of a few trained models in a local directory, by their names."""
    if storage.is_remote(folder) or not storage.is_dir(folder):
        return []
    with contextlib.suppress(OSError):
        runs = []
        for name in storage.names(folder):
            path = os.path.join(folder, name)
            if os.path.isfile(os.path.join(path, _CONFIG)):
                runs.append(path)
        return runs[:_MOST_NAMED]
    return []


def recorded_folders(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns data_dir and cache_dir of the run in a directory, if on this machine.

    A record that cannot be read counts as none. `Run` raises its errors.

    Use them only to continue training: the record of a stranger's run may name any directory.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        text = storage.read_json(os.path.join(storage.as_path(path), _CONFIG))["text"]
        data_dir = text["data_dir"]
        cache_dir = text["cache_dir"]
        data_is_here = _is_absolute(data_dir) and storage.is_dir(data_dir)
        cache_is_here = _is_absolute(cache_dir) and storage.is_dir(cache_dir)
        if cache_is_here:
            # Own text may have been read without a data_dir.
            return {"data_dir": data_dir, "cache_dir": cache_dir}
        if data_is_here:
            return {"data_dir": data_dir}
    return {}


def _is_absolute(folder: str) -> bool:
    """Returns whether a recorded directory does not depend on the current directory.

    This is true for all directories that this version records.
    """
    return storage.is_remote(folder) or os.path.isabs(folder)


def read_results(workdir: str, member: str | None = None) -> dict[str, Any]:
    """Returns the content of results.json, or {} if it is missing or corrupted.

    If a member is named, the result includes the member's own scores.
    """
    try:
        results = dict(storage.read_json(os.path.join(workdir, RESULTS)))
        if member is not None:
            results |= results.pop("members")[member]
        # Scores without a loss raise an error here instead of where they are used.
        for name in ("best_valid", "test"):
            scores = results.get(name)
            if scores:
                float(scores["loss"])
        return results
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return {}


def member_name(differences: Mapping[str, float]) -> str:
    """Returns the name of a member and of its directories: "seed=2+learning_rate=0.001".

    The name is "base" if nothing differs.
    """
    return "+".join(f"{short_name(name)}={value}" for name, value in differences.items()) or "base"


def by_name(members: MemberSettings) -> dict[str, Mapping[str, float]]:
    """Returns the settings in which each member differs, by its name."""
    return {member_name(differences): differences for differences in members}


def short_name(setting: str) -> str:
    """Shortens a setting's dotted name.

    The short name is "learning_rate" for optimizer.learning_rate, and "seed" for seed.
    """
    return setting.removeprefix("model.").removeprefix("optimizer.")


def check_same_settings(config: ExperimentConfig) -> None:
    """Raises `UserError` in all processes if one has other settings than process 0.

    Locations of files may differ.
    """
    values = config_tree.to_dict(config)
    settings = {name: value for name, value in values.items() if name not in _PLACES}
    distributed.assert_same_on_all(settings, "Start all hosts with the same command.")


def check_same_text(text: Corpus) -> None:
    """Raises `UserError` in all processes if one of them has another text.

    Each process reads its own rows of the text.
    """
    facts = {
        "the text": f"{text.description} (sha256 {text.digest[:12]}...)",
        "the vocabulary": f"sha256 {digest(text.vocabulary)[:12]}...",
    }
    distributed.assert_same_on_all(facts, "Use the same files and library versions on all hosts.")


def check_same_remat(choice: ChosenRemat | None) -> None:
    """Raises `UserError` in all processes if one of them has chosen another rematerialization."""
    facts: dict[str, str] = {}
    if choice is not None:
        facts = {"model.remat": str(choice.remat)}
    distributed.assert_same_on_all(
        facts, "Use the same devices on all hosts, or set --model.remat."
    )


def check_same_attention(choice: AttentionPaths[ChosenPath] | None) -> None:
    """Raises `UserError` in all processes if one has chosen other implementations of attention."""
    facts: dict[str, str] = {}
    if choice is not None:
        facts = {
            f"attention in {use}": name for use, name in attention_choice.record_of(choice).items()
        }
    advice = "Use the same devices and library versions on all hosts, or set --model.attention."
    distributed.assert_same_on_all(facts, advice)
