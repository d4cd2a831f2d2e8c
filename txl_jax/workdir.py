"""The folder of a run: which config and which text it belongs to, and that only one run writes to it.

config.json       what the run was started with
checkpoints/      latest/ (everything), best/ (parameters of the lowest validation loss)
metrics.jsonl, log.txt, tensorboard/
results.json      written when training has ended
"""

import dataclasses
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from txl_jax import config as config_lib
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.data.vocabulary import ByteVocabulary
from txl_jax.run_log import write_json


@dataclasses.dataclass(frozen=True)
class TextInfo:
    """What a run remembers of its text."""

    name: str
    description: str
    digest: str
    vocabulary: ByteVocabulary

    @classmethod
    def of(cls, corpus: Corpus) -> "TextInfo":
        return cls(corpus.name, corpus.description, corpus.digest, corpus.vocabulary)


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

    def create(self) -> "Workdir":
        """Makes the folder, and shows that it can be written to.

        Raises:
          OSError: it cannot; the message names the folder.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.write_bytes(b"\0" * 4096)
            probe.unlink()
        except OSError as error:
            raise OSError(
                f"cannot write to the workdir {self.path} ({error.strerror}); "
                "give --workdir=... a folder that you may write to, on a disk with space"
            ) from error
        return self

    def lock(self) -> Any:
        """An open file that keeps other runs out until it is closed or the process ends.

        Raises:
          OSError: another run has it.
        """
        handle = open(self.path / ".lock", "a+")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        return handle

    def record(self, config: ExperimentConfig, text: TextInfo) -> None:
        """Writes config.json."""
        write_json(
            self.config_file,
            {
                "config": config_lib.to_dict(config),
                "text": {**dataclasses.asdict(text), "vocabulary": text.vocabulary.to_json()},
            },
        )

    def load(self) -> tuple[ExperimentConfig, TextInfo]:
        """What the run was started with.

        Raises:
          FileNotFoundError: nothing was started here.
          ValueError: config.json cannot be read.
        """
        try:
            saved = json.loads(self.config_file.read_text())
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.path} holds no run (no {self.config_file.name}); give the --workdir of a run that was trained"
            ) from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.config_file} is damaged: {error}; restore it or give another --workdir") from error
        text = saved["text"] | {"vocabulary": ByteVocabulary.from_json(saved["text"]["vocabulary"])}
        return config_lib.from_dict(saved["config"]), TextInfo(**text)

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
        allowed, refused = [], []
        for leaf, old, new in config_lib.differences(old_config, config):
            line = config_lib.describe_change(leaf, old, new)
            (allowed if leaf.field.metadata == config_lib.FREE_ON_RESUME else refused).append(line)
        if old_text.digest != text.digest:
            refused.append(f"the text was {old_text.description!r} and is now {text.description!r}, with other content")
        if refused:
            raise ValueError(
                f"{self.path} holds a run with other settings: {'; '.join(refused)}. "
                "Start again with the old settings, or give another --workdir"
            )
        return allowed
