"""The directory of one run and its record (`Run`), and the lock that keeps other runs out.

The record is read once.

config.json       settings, text, implementations of attention, version, and the differences of
                  ensemble members
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
from collections.abc import Mapping, Sequence
from typing import Any

from txl_jax.config import DataConfig, ExperimentConfig, config_tree
from txl_jax.config.config_tree import from_dict, require
from txl_jax.data.corpus import KINDS, Corpus
from txl_jax.data.vocabulary import Vocabulary, digest, dumps, loads
from txl_jax.errors import UserError, rephrased
from txl_jax.ops.attention import AttentionPaths, Implementation
from txl_jax.runs import attention_choice
from txl_jax.runs.attention_choice import ChosenPath
from txl_jax.runtime import distributed, storage
from txl_jax.runtime.checkpoint import find_steps
from txl_jax.runtime.lock import RunLock
from txl_jax.runtime.log import METRICS
from txl_jax.runtime.storage import access_error

RESULTS = "results.json"
# Of config.json; raised when settings, parameters or draws change meaning.
FORMAT = 3
# What the members of an ensemble differ in; empty: a run by itself.
MemberSettings = Sequence[Mapping[str, float]]

_CONFIG, _VOCABULARY = "config.json", "vocabulary.txt"
# Runs that an error names: they fit on a few lines, and show what to pass.
_MOST_NAMED = 5
# Network file systems show a new file to other hosts once their caches expire.
_SECONDS_TO_APPEAR = 30
_TEXT_FACTS = ("name", "description", "digest", "data_dir", "cache_dir")
# Settings that the choice of attention for evaluation depends on.
_EVALUATION = ("batch_size", "segment_len", "mem_len", "clamp_len", "same_length", "cache_dtype")
# Hosts may keep their files in different places; the contents are compared.
_PLACES = {f"data.{leaf.name}" for leaf in config_tree.leaves(DataConfig) if leaf.setting.path}


@dataclasses.dataclass(frozen=True)
class TextInfo:
    """The text of a run."""

    name: str
    description: str
    digest: str
    vocabulary: Vocabulary
    # The folders that it and its ids were read from; on another machine they may differ.
    data_dir: str = ""
    cache_dir: str = ""


@dataclasses.dataclass(eq=False, repr=False)
class Run(contextlib.AbstractContextManager["Run"]):
    """The directory of one run, and its record.

    All processes make the same calls. Process 0 reads and writes files.
    """

    # Absolute.
    path: str
    # Chosen member of an ensemble, or None for all members and for a single run.
    member: str | None = None
    # Whether nothing is recorded yet. `config` and `text` are not set then.
    is_new: bool = True
    # As recorded, with the member's settings.
    config: ExperimentConfig = dataclasses.field(init=False)
    # As recorded.
    text: TextInfo = dataclasses.field(init=False)
    # Settings that the members of an ensemble differ in. Empty for a single run.
    members: MemberSettings = ()
    # Implementations by use, as first chosen: {"training": "tiled 128x256", "evaluation": ...}.
    attention: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Path, step, sha256 and tokens of a warm start, or None if the run began with random weights.
    weights: Mapping[str, Any] | None = None
    # Lines for the log: settings that changed, a lock that was taken over.
    notes: list[str] = dataclasses.field(default_factory=list)
    # Whether the run is to be trained.
    is_open: bool = False
    _saved: list[str] | None = None
    _lock: RunLock | None = None

    def __post_init__(self) -> None:
        self.path = storage.as_path(self.path)
        storage.refuse_wildcards(self.path)

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, member: str | None = None) -> "Run":
        """Reads a trained run, or one member of an ensemble. Takes no lock and writes nothing."""
        run = cls.read_all(path)
        names = by_name(run.members)
        choose = f"Choose a member with --ensemble_member: {', '.join(names)}"
        require(not names or member is not None, f"{run.path} contains an ensemble. {choose}")
        if member is not None:
            there = (
                f"Its members are {', '.join(names)}"
                if names
                else "It contains one run, so omit the flag"
            )
            require(
                member in names,
                f"{run.path} has no member for --ensemble_member={member!r}. {there}",
            )
            run.member, run.config = member, config_tree.replace(run.config, dict(names[member]))
        return run

    @classmethod
    def read_all(cls, path: str | os.PathLike[str]) -> "Run":
        """Reads a run, or an ensemble with all of its members, like `read`."""
        run = cls(os.fspath(path))
        run._read()
        if run.is_new:
            advice = "Pass the workdir of a trained run"
            below = _runs_below(run.path)
            if below:
                advice += f", such as one of those in it: {', '.join(below)}"
            raise UserError(f"{run.path} contains no run (no {_CONFIG}). {advice}.")
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Run":
        """Opens a run to train, new or recorded, as a context manager.

        A recorded one is locked before it is read, so that its record cannot change. For a new one
        nothing is made before `record_start`, so that mistakes in settings leave no directory.
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
        return os.path.join(self.path, "checkpoints", "best", *filter(None, [self.member]))

    @property
    def outputs(self) -> str:
        """Directory for scores and samples: the run's, or the member's in it. Made if missing."""
        folder = os.path.join(self.path, "members", self.member) if self.member else self.path
        storage.make_folder(folder)
        return folder

    @property
    def member_names(self) -> tuple[str, ...]:
        """Names of an ensemble's members, in the order of the member axis.

        The tuple is empty for a single run.
        """
        return tuple(by_name(self.members))

    def attention_for(self, config: ExperimentConfig) -> AttentionPaths[Implementation | str]:
        """Returns the implementations of attention for a start with `config`.

        These are the recorded implementations, or the config's own choice.

        Another device or version may choose others, whose numbers agree up to rounding only, and a
        resumed run must stay equal bit for bit. If `model.attention`, or for evaluation a length,
        was changed, the config chooses again.
        """
        asked, uses = str(config.model.attention), dict[str, Implementation | None]()
        if not self.is_new and self.config.model.attention is config.model.attention:
            uses = {use: Implementation.parse(text) for use, text in self.attention.items()}
            if any(
                getattr(self.config.eval, name) != getattr(config.eval, name)
                for name in _EVALUATION
            ):
                uses["evaluation"] = None
        return AttentionPaths(uses.get("training") or asked, uses.get("evaluation") or asked)

    def compare(self, config: ExperimentConfig, members: MemberSettings = ()) -> None:
        """Compares settings between processes and with the record.

        Raises `UserError` if one changed that must not.
        """
        check_same_settings(config)
        if self.is_new:
            return
        refused = self._changes(config, allowed=False)
        if (steps := config.train.steps) < (before := self.config.train.steps):
            found = distributed.broadcast_from_primary(
                lambda: [step for step, _ in find_steps(self.latest)]
            )
            if steps < (done := max(found, default=0)):
                refused.append(
                    f"--train.steps was {before} and is now {steps}, fewer than the {done} "
                    "already done"
                )
        old, new = ("; ".join(by_name(each)) or "none" for each in (self.members, members))
        if old != new:
            refused.append(f"the members of the ensemble were {old} and are now {new}")
        self._refuse(refused)

    def record_start(
        self,
        config: ExperimentConfig,
        text: TextInfo | Corpus,
        *,
        attention: AttentionPaths[ChosenPath] | None = None,
        weights: Mapping[str, Any] | None = None,
        members: MemberSettings = (),
    ) -> None:
        """Claims the directory and records the run in it.

        This is the first write of a start, and the only write of the record.

        Raises `UserError` if text, vocabulary or `weights` (the record of a warm start) are not the
        recorded ones, the directory cannot be written to, not all processes see it, or another run
        is in it.
        """
        if not self.is_new:
            old, now = self.text.vocabulary, text.vocabulary
            if self.text.digest != text.digest:
                before = self.text.description
                self._refuse(
                    [f"the text was {before!r} and is now {text.description!r}, with other content"]
                )
            if old != now:
                self._refuse(
                    [f"the vocabulary had {old.size:,} tokens and has {now.size:,}, or others"]
                )
        if weights and self.weights and weights["sha256"] != self.weights["sha256"]:
            was, is_now = (
                f"sha256 {each['sha256'][:12]}... of step {each['step']}"
                for each in (self.weights, weights)
            )
            changed = f"the weights in {weights['path']} changed since the run in {self.path} began"
            raise UserError(f"{changed} ({was}, now {is_now}). Pass another --workdir.")
        self.weights = weights or self.weights
        self.notes += self._changes(config, allowed=True)
        implementations: dict[str, str] = {}
        if attention is not None:
            implementations = attention_choice.record_of(attention)
            changed = attention_choice.describe(attention, before=self.attention)
            if changed:
                self.notes.append(f"attention: {changed}")

        def write() -> list[str]:
            if self._lock is None:
                self.claim()
                if holds_run(self.path):
                    raise UserError(
                        f"another process has recorded a run in {self.path}. "
                        "Rerun the same command."
                    )
            self.record(config, text, attention=implementations, members=members)
            return self._lock.notes if self._lock else []

        self.notes[:0] = distributed.broadcast_from_primary(write)
        distributed.check_seen_by_all(
            self.path,
            f"the workdir {self.path} is not the directory that process 0 writes to. "
            "Pass all hosts a --workdir on a shared file system.",
            seconds=_SECONDS_TO_APPEAR,
        )

    def _changes(self, config: ExperimentConfig, *, allowed: bool) -> list[str]:
        """Returns a line for each setting that differs from the record.

        If `allowed`, these are the settings that may differ. Otherwise, they are the others.
        """
        return [
            config_tree.describe_change(leaf, before, after)
            for leaf, before, after in config_tree.differences(
                config if self.is_new else self.config, config
            )
            if (leaf.setting.free_on_resume or leaf.setting.may_grow) is allowed
        ]

    def _refuse(self, refused: list[str]) -> None:
        advice = "To resume, omit these flags. To train a new run, pass another --workdir."
        require(
            not refused,
            f"{self.path} contains a run with other settings: {'; '.join(refused)}. {advice}",
        )

    def record(
        self,
        config: ExperimentConfig,
        text: TextInfo | Corpus,
        *,
        attention: Mapping[str, str],
        members: MemberSettings = (),
    ) -> None:
        """Writes vocabulary.txt and then config.json, unless nothing changed.

        The file config.json makes the directory a run.
        """
        facts = {name: getattr(text, name) for name in _TEXT_FACTS} | {
            "vocabulary_sha256": digest(text.vocabulary)
        }
        saved = {"format": FORMAT, "config": config_tree.to_dict(config), "text": facts}
        optional = {"attention": attention, "warm_start": self.weights, "members": members}
        saved |= {name: value for name, value in optional.items() if value}
        texts = [
            json.dumps(saved, indent=2, allow_nan=False, default=dict) + "\n",
            dumps(text.vocabulary),
        ]
        if texts != self._saved:
            storage.write(os.path.join(self.path, _VOCABULARY), texts[1].encode())
            storage.write(os.path.join(self.path, _CONFIG), texts[0].encode())

    def check(self) -> None:
        """Raises `UserError` if this process knows that another run has taken the lock over."""
        if self._lock is not None:
            self._lock.check()

    def confirm(self) -> None:
        """Confirms the lock before a checkpoint. Raises `UserError` if another run has it."""
        if self._lock is not None:
            self._lock.confirm()

    def _read(self) -> None:
        """Reads the record in process 0, and parses the same bytes in every process."""
        self._saved = texts = distributed.broadcast_from_primary(self._texts)
        distributed.run_on_all(lambda: None if texts is None else self._parse(*texts))

    def _texts(self) -> list[str] | None:
        """Reads config.json and vocabulary.txt, each once.

        Returns None if the directory contains no run.
        """
        if self.is_open and holds_run(self.path):
            self.claim()
        texts = []
        for name in (_CONFIG, _VOCABULARY):
            path = os.path.join(self.path, name)
            try:
                texts.append(storage.read(path).decode())
            except (FileNotFoundError, NotADirectoryError, ValueError) as error:
                if name == _CONFIG and isinstance(error, OSError):
                    return None
                raise UserError(self._damaged(name).replace("%s", str(error))) from error
            except OSError as error:
                raise access_error("read", path, error) from error
        return texts

    def _parse(self, record: str, vocabulary: str) -> None:
        with rephrased(self._damaged(_CONFIG), ValueError, LookupError, TypeError, AttributeError):
            saved = json.loads(record)
            require(
                "txl_jax_model" not in saved,
                "it belongs to a portable checkpoint: pass that to --init_from",
            )
            number = saved.get("format", 1)  # Format 1 has no number.
            # Before anything else, which may mean something else there.
            other = "use commit 624573f for formats 1 and 2, and a newer txl_jax for later formats"
            require(number == FORMAT, f"its format must be {FORMAT}, got {number!r}: {other}")
            self.config, text = from_dict(ExperimentConfig, saved["config"]), saved["text"]
            facts = {name: str(text[name]) for name in _TEXT_FACTS}
            expected, self.members = str(text["vocabulary_sha256"]), saved.get("members", [])
            for changes in by_name(self.members).values():
                # And no "../..".
                numbers = all(isinstance(value, int | float) for value in changes.values())
                require(
                    numbers,
                    "the settings of ensemble members must be numbers, as they name directories",
                )
                from_dict(ExperimentConfig, saved["config"] | changes)
            self.attention, self.weights = saved.get("attention", {}), saved.get("warm_start")
            for implementation in self.attention.values():
                Implementation.parse(implementation)
        with rephrased(self._damaged(_VOCABULARY), ValueError):
            self.text = TextInfo(**facts, vocabulary=loads(vocabulary, KINDS))
            if (found := digest(self.text.vocabulary)) != expected:
                size = f"{self.text.vocabulary.size:,} tokens"
                raise ValueError(f"sha256 {found[:12]}... for {size} instead of {expected[:12]}...")
        self.is_new = False

    def _damaged(self, name: str) -> str:
        file = os.path.join(self.path, name)
        return (
            f"{file} is corrupted, or this version cannot read it (%s). "
            "Restore it, or pass another --workdir."
        )

    def claim(self) -> None:
        """Makes the directory, locks it, and removes what killed runs left. Process 0 calls it."""
        require(
            self.is_new,
            f"{self.path} already contains a run. Pass another directory with --to=PATH.",
        )
        try:
            storage.probe(self.path)
        except OSError as error:
            raise access_error("write to", self.path, error) from error
        lock = RunLock(self.path)
        lock.acquire()
        self._lock = lock
        # Other half-written files may belong to a running program.
        ours = (_CONFIG, _VOCABULARY, METRICS, RESULTS)
        for name in storage.names(self.path):
            partial = name.endswith(".tmp") and any(name.startswith(f".{own}.") for own in ours)
            if name.startswith(".probe-") or partial:
                storage.remove(os.path.join(self.path, name))


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
        paths = [os.path.join(folder, name) for name in storage.names(folder)]
        return [path for path in paths if os.path.isfile(os.path.join(path, _CONFIG))][:_MOST_NAMED]
    return []


def recorded_folders(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns data_dir and cache_dir of the run in a directory, if on this machine.

    `Run` raises a record's errors.

    They are of use where the run is trained on: the record of a stranger's run may name any
    directory.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        text = storage.read_json(os.path.join(storage.as_path(path), _CONFIG))["text"]
        folders = {name: text[name] for name in ("data_dir", "cache_dir")}
        is_here = {
            name: _is_absolute(folder) and storage.is_dir(folder)
            for name, folder in folders.items()
        }
        # Own text may have been read without a data_dir.
        return {
            name: folder
            for name, folder in folders.items()
            if is_here["cache_dir"] or is_here[name]
        }
    return {}


def _is_absolute(folder: str) -> bool:
    """Returns whether a recorded directory is the same wherever the command is run.

    This is true of all directories that are written.
    """
    return storage.is_remote(folder) or os.path.isabs(folder)


def read_results(workdir: str, member: str | None = None) -> dict[str, Any]:
    """Returns the content of results.json, or {} if it is missing or corrupted.

    If a member is named, the result includes the member's own scores.
    """
    try:
        results = dict(storage.read_json(os.path.join(workdir, RESULTS)))
        results |= {} if member is None else results.pop("members")[member]
        for scores in filter(None, (results.get("best_valid"), results.get("test"))):
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
    return {member_name(each): each for each in members}


def short_name(setting: str) -> str:
    """Shortens a setting's dotted name.

    The short name is "learning_rate" for optimizer.learning_rate, and "seed" for seed.
    """
    return setting.removeprefix("model.").removeprefix("optimizer.")


def check_same_settings(config: ExperimentConfig) -> None:
    """Raises `UserError` in all processes if one has other settings than process 0.

    The places of files may differ.
    """
    settings = {
        name: value for name, value in config_tree.to_dict(config).items() if name not in _PLACES
    }
    distributed.assert_same_on_all(settings, "Start all hosts with the same command.")


def check_same_text(text: Corpus) -> None:
    """Raises `UserError` in all processes if one of them has another text.

    Each process reads its own rows of the text.
    """
    found = f"{text.description} (sha256 {text.digest[:12]}...)"
    facts = {"the text": found, "the vocabulary": f"sha256 {digest(text.vocabulary)[:12]}..."}
    distributed.assert_same_on_all(facts, "Use the same files and library versions on all hosts.")


def check_same_attention(choice: AttentionPaths[ChosenPath] | None) -> None:
    """Raises `UserError` in all processes if one has chosen other implementations of attention."""
    facts = {}
    if choice is not None:
        for use, name in attention_choice.record_of(choice).items():
            facts[f"attention in {use}"] = name
    advice = "Use the same devices and library versions on all hosts, or set --model.attention."
    distributed.assert_same_on_all(facts, advice)
