"""Starts the programs with a plan, for tests of where its settings go.

The functions that a program calls are replaced by functions that keep their arguments.
`start_NAME(seen, plan, changed)` returns the arguments by function and parameter. `changed` are the
settings that count as typed.
"""

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import types

import numpy as np

from experiments import (
    compress,
    convert,
    ensemble,
    export,
    lm_eval,
    prepare,
    quickstart,
    report,
    tune_dynamic,
)
from experiments.bench import device, estimate, serving, session, speed
from experiments.bench.timing import Task
from experiments.paper import ablation, attention, context_length, continuation, recl, table9
from support import calls, tiny_run
from support.calls import EnoughError
from txl_jax import cli
from txl_jax.cli import job as job_lib
from txl_jax.cli import plans, train_command
from txl_jax.compression.file_format import Coding, Environment, Header
from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.metrics import Totals
from txl_jax.runs import run_tables
from txl_jax.runs.run import Run
from txl_jax.runs.time_budget import FittingSteps
from txl_jax.runs.trainer import Outcome
from txl_jax.runtime import storage

CORPUS = types.SimpleNamespace(
    train=np.arange(90),
    valid=np.arange(100, 160),
    test=np.arange(160, 250),
    vocabulary=ByteVocabulary.all_bytes(),
    description="a text",
    name="text",
    digest="d" * 64,
)
STOPPED = Outcome(finished=False, step=1, results=None)
FINISHED = Outcome(finished=True, step=1, results={})
MODEL = types.SimpleNamespace(
    path="/runs/mine",
    config=tiny_run.CONFIG,
    vocabulary=CORPUS.vocabulary,
    description="a model",
    source="run",
)
RECORDED = types.SimpleNamespace(
    path="/runs/mine",
    outputs="/runs/mine",
    config=tiny_run.CONFIG,
    text=types.SimpleNamespace(
        vocabulary=CORPUS.vocabulary,
        data_dir="/recorded",
        cache_dir="/recorded/cache",
    ),
    is_open=False,
    is_new=False,
    member=None,
    members=(),
)

NEW_RUN = types.SimpleNamespace(
    path="/runs/mine",
    is_new=True,
    is_open=True,
    members=({"seed": 1}, {"seed": 2}),
    notes=[],
    compare=lambda config, members=(): None,
)


class Job(cli.Job):
    """A command line whose config is known. The flags that a plan changes count as typed."""

    def config(self, run=None):
        return self.defaults

    def config_of(self, trained):
        return self.defaults


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """Replaces `runs.trained.TrainedModel`."""

    path: str = "/runs/mine"
    config: ExperimentConfig = tiny_run.CONFIG
    vocabulary: object = CORPUS.vocabulary
    source: object = "run"
    out: str | None = None


class Seen:
    """The arguments that a program passes on, by function and parameter."""

    def __init__(self, patch):
        self.patch = patch
        self.found = {}

    def keep(self, module, name, result=None):
        calls.keep(self.patch, self.found, module, name, result)

    def replace(self, module, name, value):
        self.patch.setattr(module, name, value)

    def run(self, module, plan, changed=(), config=tiny_run.CONFIG, words=()):
        job = Job(plan, config, list(words), dict.fromkeys(changed, ""), None)
        with contextlib.suppress(EnoughError):
            module.run(plan, job)

    def without(self, *names):
        """Returns the arguments without parameters that differ at each start."""
        return {name: value for name, value in self.found.items() if name not in names}


def start_convert(seen, plan, changed):
    seen.keep(convert, "convert")
    seen.run(convert, plan, changed)
    return seen.found


def start_export(seen, plan, changed):
    seen.replace(export.importlib.util, "find_spec", lambda name: name)
    seen.keep(export, "check_new_folder")
    seen.keep(export, "open_weights", MODEL)
    seen.replace(export, "make_mesh", lambda config, devices: "mesh")
    seen.keep(export, "build_for", EnoughError())
    seen.run(export, plan, changed)
    return seen.found


# How a file was coded that a plan decompresses.
CODING = Coding(
    streams=5,
    segment_len=6,
    mem_len=9,
    learning_rate=0.5,
    decay=0.25,
    epsilon=0.125,
    threads=3,
)


def start_compress(seen, plan, changed):
    header = Header(7, "text", CODING, Environment("device", "processor", "versions"))
    seen.keep(storage, "check_new_file")
    seen.replace(storage, "read", lambda path: b"content")
    seen.keep(compress.file_format, "load", (header, b"payload"))
    seen.replace(compress.cpu_threads, "available", lambda: 2)
    seen.keep(compress.cpu_threads, "use_cpu")
    seen.keep(compress, "open_weights", MODEL)
    seen.keep(compress, "Predictor", EnoughError())
    seen.run(compress, plan, changed, words=["/text"])
    return seen.found


def start_report(seen, plan, changed):
    seen.replace(run_tables, "read_runs", lambda paths: [])
    seen.replace(run_tables, "swept_settings", lambda runs: [])
    seen.keep(storage, "make_folder", EnoughError())
    seen.run(report, plan, changed, words=["/runs/mine"])
    return seen.found


def start_prepare(seen, plan, changed):
    seen.keep(job_lib, "read_corpus", EnoughError())
    seen.run(prepare, plan, {*changed, "corpus"})
    return seen.found


def start_ensemble(seen, plan, changed):
    """A resumed ensemble, whose recorded members are used if none is passed."""
    seen.keep(job_lib, "read_corpus", CORPUS)
    seen.keep(plans, "WeightsAndBiases", "W&B")
    seen.keep(Run, "open", contextlib.nullcontext(NEW_RUN))
    seen.keep(ensemble, "train_run", STOPPED)
    seen.run(ensemble, plan, changed)
    return seen.without("train_run.stop_requested")


def start_split(seen, plan, changed):
    seen.keep(ensemble.ensemble, "split_off")
    seen.keep(Run, "open", EnoughError())
    seen.run(ensemble, plan, changed)
    return seen.found


def fitting_at_one_second(seconds, config, corpus):
    return FittingSteps(
        steps=round(seconds),
        update_seconds=1.0,
        advised_steps=1,
        advised_minutes=1,
        compilation=None,
    )


def start_quickstart(seen, plan, changed):
    seen.keep(Run, "open", contextlib.nullcontext(NEW_RUN))
    seen.keep(quickstart, "read_corpus", CORPUS)
    seen.replace(plans, "steps_in", fitting_at_one_second)
    seen.keep(quickstart, "train_run", STOPPED)
    seen.run(quickstart, plan, changed)
    return seen.without("train_run.stop_requested")


def start_training(seen, plan, changed):
    seen.keep(job_lib, "read_corpus", CORPUS)
    seen.keep(plans, "WeightsAndBiases", "W&B")
    seen.keep(Run, "open", contextlib.nullcontext(NEW_RUN))
    seen.replace(plans, "steps_in", fitting_at_one_second)
    seen.replace(train_command, "refuse_packed", lambda corpus: None)
    seen.replace(train_command, "_note_unread", lambda *given: None)
    seen.replace(train_command, "check_program", lambda *given: None)
    seen.keep(train_command, "train_run", STOPPED)
    seen.run(types.SimpleNamespace(run=train_command._train), plan, changed)
    return seen.without("train_run.stop_requested")


def start_use(seen, plan, changed):
    """A trained model, which is evaluated."""
    seen.keep(train_command, "open_weights", TrainedModel())
    seen.replace(train_command, "_with_text", lambda model, data: model)
    seen.replace(train_command, "_note_unread", lambda *given: None)
    seen.keep(job_lib, "read_corpus", CORPUS)
    used = {}

    def note(name):
        def call(config, corpus, model, *, stop_requested):
            used.update(function=name, out=model.out)

        return call

    for name in ("evaluate_splits", "score_tokens"):
        seen.replace(train_command.score_splits, name, note(name))
    seen.run(types.SimpleNamespace(run=train_command._train), plan, changed)
    return seen.found | used


def start_documents(seen, plan, changed):
    seen.keep(train_command, "open_weights", TrainedModel())
    seen.replace(train_command, "_note_unread", lambda *given: None)
    seen.keep(train_command.score_input, "open_input", contextlib.nullcontext("file"))
    seen.keep(train_command.score_input, "documents")
    seen.keep(train_command.score_input, "score_documents")
    seen.run(types.SimpleNamespace(run=train_command._train), plan, changed)
    return seen.without("score_documents.write")


def trained_run(seen):
    """Replaces how a `TrainedRun` is read."""
    seen.keep(Run, "read", RECORDED)
    seen.keep(job_lib, "read_corpus", CORPUS)


class TunedModel(TrainedModel):
    """Replaces `runs.trained.TrainedModel`, with a directory for results."""

    def outputs(self, *, needed):
        return self.out or self.path


def start_tune_dynamic(seen, plan, changed):
    """The settings that are tried, and how many tokens of each split are scored. 2e-3 is best."""
    tried = []
    n_token = {}

    def learn(model, params, **options):
        settings = model.config.eval.dynamic

        def score(tokens, *, name, **options):
            tried.append((settings.learning_rate, settings.decay))
            n_token[name.partition(" ")[0]] = len(tokens)
            return Totals(nats=1 + abs(settings.learning_rate - 2e-3), tokens=1)

        return types.SimpleNamespace(score=score)

    trained_run(seen)
    models = types.SimpleNamespace(of=lambda run, config: TunedModel(config=config))
    seen.replace(tune_dynamic, "TrainedModel", models)
    weights = {"weight": np.zeros(1, np.float32)}
    seen.replace(tune_dynamic, "load_to_score", lambda *given, log: ("parts", 7, weights))
    seen.replace(tune_dynamic, "score", lambda *given, **options: Totals(nats=9, tokens=1))
    seen.replace(tune_dynamic, "learning_model", learn)
    seen.replace(tune_dynamic, "command", lambda *given: "command")
    seen.replace(storage, "exists", lambda path: False)
    seen.keep(storage, "write_json")
    seen.run(tune_dynamic, plan, changed)
    return seen.without("write_json.value") | {"tried": tried, **n_token}


def start_context_length(seen, plan, changed):
    """A model without recurrence, which has strides."""
    trained_run(seen)
    seen.replace(context_length, "load_to_score", lambda *given, log: ("parts", 7, "params"))
    seen.keep(context_length, "build_for")
    seen.keep(context_length, "score_with_line", EnoughError())
    config = config_tree.replace(tiny_run.CONFIG, {"train.mem_len": 0})
    seen.run(context_length, plan, changed, config)
    found = seen.without("score_with_line.options")
    return found | {"score_with_line.tokens": found["score_with_line.tokens"][:2].tolist()}


def start_continuation(seen, plan, changed):
    contexts = []

    def tokens(known, config, stop_requested):
        contexts.append(known.tolist())
        return [np.zeros((1, config.length), int)]

    generator = types.SimpleNamespace(tokens=tokens)
    parts = types.SimpleNamespace(
        generator=lambda params: generator,
        prepare_params=lambda params: params,
    )
    trained_run(seen)
    seen.replace(continuation, "load_to_score", lambda *given, log: (parts, 7, "params"))
    seen.keep(storage, "write")
    config = config_tree.replace(tiny_run.CONFIG, {"generate.length": 5})
    seen.run(continuation, plan, changed, config)
    return seen.without("write.data") | {"contexts": contexts}


def start_attention(seen, plan, changed):
    trained_run(seen)
    seen.replace(attention, "load_to_score", lambda *given, log: ("parts", 7, "params"))
    seen.keep(attention, "_read", ("average", "queries"))
    seen.replace(attention, "widest", lambda average, count: [(0, 0)] * count)
    seen.keep(attention, "make_folder")
    seen.keep(attention, "_write")
    config = config_tree.replace(tiny_run.CONFIG, {"eval.same_length": True})
    seen.run(attention, plan, changed, config)
    read = seen.found["_read.tokens"]
    found = seen.without("_read.show", "_read.tokens", "_write.tokens")
    return found | {"first": read[0], "count": len(read)}


def start_recl(seen, plan, changed):
    read = []
    scored = {}
    parts = types.SimpleNamespace(window_step="step")

    def read_run(path):
        read.append(path)
        return RECORDED

    seen.replace(Run, "read", read_run)
    seen.keep(job_lib, "read_corpus", CORPUS)
    seen.replace(recl, "load_to_score", lambda *given, log: (parts, 7, "params"))
    seen.replace(recl, "exists", lambda path: False)
    seen.keep(recl, "make_folder")
    seen.replace(recl, "write_json", lambda path, value: scored.update(value))
    seen.replace(recl, "read_json", lambda path: scored)
    seen.keep(recl, "context_losses", EnoughError())
    seen.run(recl, plan, changed)
    found = seen.without("context_losses.after_call")
    for name in ("context_losses.tokens", "context_losses.scored"):
        found[name] = found[name][:2].tolist()
    return found | {"read": read}


def start_ablation(seen, plan, changed):
    """All rows are checked at all lengths. The first is trained and scored at its first length."""
    lengths = []
    at_lengths = context_length.at_lengths

    def note(config, context_lengths, *, stride):
        lengths.append((config.model.encoding.value, *context_lengths, stride))
        return at_lengths(config, context_lengths, stride=stride)

    seen.replace(context_length, "at_lengths", note)
    seen.keep(job_lib, "read_corpus", CORPUS)
    seen.keep(Run, "open", contextlib.nullcontext(NEW_RUN))
    seen.replace(Run, "read", lambda path: RECORDED)
    seen.keep(ablation, "train_run", FINISHED)
    seen.replace(ablation, "exists", lambda path: False)
    seen.keep(ablation, "load_to_score", EnoughError())
    seen.run(ablation, plan, changed)
    return {
        "read_corpus.data_dir": seen.found["read_corpus.data_dir"],
        "read_corpus.cache_dir": seen.found["read_corpus.cache_dir"],
        "path": seen.found["open.path"],
        "seed": seen.found["train_run.config.seed"],
        "lengths": lengths,
    }


def start_table9(seen, plan, changed):
    seen.keep(table9, "measure", ([1.0], [1.0]))
    seen.run(table9, plan, changed)
    return seen.found


def start_device(seen, plan, changed):
    """The first case, and the names of what would be timed for it."""

    def measure(case, plan, notes):
        seen.found["case"] = (case.config, case.task, case.batch, case.segment_len, case.dtype)
        found = device.implementations(case, plan, notes)
        seen.found["implementations"] = [name for name, *_ in found]
        raise EnoughError

    seen.replace(Job, "config_of_flagfile", lambda job, name: tiny_run.CONFIG)
    seen.keep(storage, "make_folder")
    seen.replace(storage, "write", lambda path, data: None)
    seen.replace(device, "measure", measure)
    seen.replace(device.choose, "tiles_are_faster", lambda problem: True)
    seen.run(device, plan, changed)
    return seen.found


def start_session(seen, plan, changed):
    """The parts that processes are started for, where they write, and whether in miniature."""
    started = []
    folders = set()
    seen.found["miniature"] = False

    def run_alone(command, log, limit):
        folder, file = os.path.split(log.name)
        folders.add(folder)
        started.append(file.removesuffix(".log"))
        if "--miniature" in command:
            seen.found["miniature"] = True
        return "failed"

    seen.replace(session, "_run_alone", run_alone)
    seen.replace(session, "_measure_here", lambda plan, name: started.append(f"{name} itself"))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.makedirs(plan.folder)
        # An earlier command measured the first part.
        with open(os.path.join(plan.folder, "peaks.json"), "w", encoding="utf-8") as file:
            json.dump({"failure": "failed", "output": [], "seconds": 1.0}, file)
        seen.run(session, plan, changed)
    return seen.found | {"started": started, "folders": folders}


def start_device_timing(seen, plan, changed):
    """The timing of one path."""
    seen.keep(device.timing, "time_in_turns", EnoughError())
    seen.replace(device, "implementations", lambda case, plan, notes: ())
    with contextlib.suppress(EnoughError):
        device.measure(None, plan, device.Notes())
    return seen.found


def start_estimate(seen, plan, changed):
    estimated = []
    programs = []

    def note(plan, name, config, topology):
        estimated.append((name, topology, plan.tasks))
        programs.append(plan.programs)
        return [True]

    seen.replace(Job, "config_of_flagfile", lambda job, name: tiny_run.CONFIG)
    seen.replace(estimate, "compiler_of", lambda topology: ("libtpu", "1.0"))
    seen.replace(estimate, "slices", lambda topology: [topology])
    seen.replace(estimate, "meshes", lambda config, count: [{}])
    seen.replace(estimate, "estimate", note)
    seen.run(estimate, plan, changed)
    return {"estimated": estimated, "programs": programs}


BUILT = types.SimpleNamespace(init_params=dict, mesh=types.SimpleNamespace(size=1))


def start_serving(seen, plan, changed):
    rows = []

    def step(components, *, batch_size):
        rows.append(batch_size)
        return types.SimpleNamespace(prepare_params=lambda params: params)

    seen.replace(serving, "build", lambda config, vocab_size: BUILT)
    seen.replace(serving.timing, "print_head", lambda components: None)
    seen.replace(serving, "Step", step)
    seen.replace(serving, "_task", lambda components, step, weights: "task")
    seen.keep(serving.timing, "time_in_turns", EnoughError())
    seen.run(serving, plan, changed)
    return seen.without("time_in_turns.tasks") | {"rows": rows}


def start_speed(seen, plan, changed):
    names = []

    def with_peer_compat(config):
        seen.found["compat"] = "hf"
        return config

    def tasks(name, components):
        names.append(name)
        return [Task("a", 1, list)]

    seen.replace(speed, "build", lambda config, vocab_size: BUILT)
    seen.replace(speed.timing, "print_head", lambda components: None)
    seen.replace(speed.peers, "with_peer_compat", with_peer_compat)
    seen.keep(speed.peers, "checked_peers", [])
    seen.replace(speed, "tasks", tasks)
    seen.keep(speed.timing, "time_in_turns", EnoughError())
    seen.run(speed, plan, changed)
    return seen.without("time_in_turns.tasks", "checked_peers.built") | {"first": names[0]}


def harness(seen):
    """Replaces lm-evaluation-harness, which may not be installed, and its adapter."""

    class TaskManager:
        def __init__(self, *, include_path):
            seen.found["include_path"] = include_path
            self.all_tasks = ["one", "two"]

    def simple_evaluate(model, **options):
        seen.found.update({f"simple_evaluate.{name}": value for name, value in options.items()})
        return {"results": {}}

    def model(path, **options):
        seen.found["model.path"] = path
        seen.found.update({f"model.{name}": value for name, value in options.items()})
        return "model"

    for name, members in (
        ("lm_eval", {"simple_evaluate": simple_evaluate}),
        ("lm_eval.tasks", {"TaskManager": TaskManager}),
        ("lm_eval.utils", {"make_table": lambda *given: ""}),
        ("txl_jax.lm_eval_model", {"HarnessModel": model}),
    ):
        module = types.ModuleType(name)
        vars(module).update(members)
        seen.patch.setitem(sys.modules, name, module)


def start_lm_eval(seen, plan, changed):
    harness(seen)
    seen.keep(storage, "write")
    seen.run(lm_eval, plan, changed)
    return seen.without("simple_evaluate.task_manager", "write.data")
