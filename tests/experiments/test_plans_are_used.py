"""Tests that each setting of each program's plan is used: a second value changes the right calls.

`support.plan_starts` replaces what a program calls. The server's plan is tested in
`tests/serving/test_program.py`, and how flags become plans in `tests/cli/test_flags_arrive.py`.
"""

import dataclasses
from collections.abc import Callable

import pytest

from experiments import (
    compress,
    convert,
    ensemble,
    export,
    lm_eval,
    quickstart,
    report,
    tune_dynamic,
)
from experiments.__main__ import HEADINGS
from experiments.__main__ import programs as programs_in
from experiments.bench import device, estimate, serving, session, speed
from experiments.paper import ablation, attention, context_length, continuation, recl, table9
from support import plan_starts, tiny_run
from support.plan_starts import Seen
from txl_jax import cli
from txl_jax.cli.train_command import TrainPlan
from txl_jax.compression.file_format import Coding
from txl_jax.config import config_tree
from txl_jax.runs.score_input import InputFormat

GONE = "gone"  # Stands for an argument of a call that is not made any more.


@dataclasses.dataclass(frozen=True)
class Scene:
    """A plan that a program starts with, and second values of its settings with their effects."""

    program: str
    # Starts the program as far as its first calls, and returns their arguments by name.
    start: Callable[..., dict]
    plan: cli.Plan
    # By setting: its second value, and the arguments that then differ with their new values.
    rows: dict[str, tuple]


def options_of_text(**recorded):
    """The rows of a plan's directories of text.

    `recorded` has other arguments of `read_corpus` that change with `data_dir`. The cache of a
    recorded run is read, but not written, and not used if --data_dir names another place.
    """
    effect = {"read_corpus.data_dir": "/c"}
    for name, value in recorded.items():
        effect[f"read_corpus.{name}"] = value
    return {"data_dir": ("/c", effect), "cache_dir": ("/c", {"read_corpus.cache_dir": "/c"})}


OF_TRAINED_RUN = {
    "workdir": ("/c", {"read.path": "/c"}),
    "ensemble_member": ("seed=2", {"read.member": "seed=2"}),
    **options_of_text(read_only_cache=None),
}
OF_WATCHING = {
    "profile_steps": ((2, 3), {"train_run.profile_steps": (2, 3)}),
    "wandb_project": (
        "mine",
        {
            "WeightsAndBiases.project": "mine",
            "WeightsAndBiases.workdir": "/runs/mine",
            "train_run.sinks": ["W&B"],
        },
    ),
    "verbose": (True, {"train_run.verbose": True}),
}
# A step takes a second in `plan_starts`.
MINUTES = {"minutes": (0.5, {"train_run.config.train.steps": 30})}
TRAIN_PLAN = TrainPlan(workdir="/w")
DEVICE_PLAN = device.Plan(configs=("one",), tiles=(), paths=("reference",), out="/o")
# Configuration, task, rows, segment length and dtype, by default.
CASE = ("one", "training", 4, 7, "float32")
VANILLA = "none-vaswani-half"

# How `compress.Plan` codes by default. The memory is the model's.
CODING = Coding(
    streams=8,
    segment_len=32,
    mem_len=tiny_run.CONFIG.eval.mem_len,
    learning_rate=7e-4,
    decay=2e-3,
    epsilon=1e-8,
    threads=2,
)


def coded_with(**values):
    """Returns the effect of settings of the coding."""
    return {"Predictor.coding": dataclasses.replace(CODING, **values)}


COMPRESS = Scene(
    program="compress",
    start=plan_starts.start_compress,
    plan=compress.Plan(model="/a", out="/b"),
    rows={
        "decompress": (
            True,
            {
                "load.content": b"content",
                "load.name": "/text",
                "use_cpu.threads": plan_starts.CODING.threads,
                "Predictor.coding": plan_starts.CODING,
            },
        ),
        "model": ("/c", {"open_weights.path": "/c"}),
        "ensemble_member": ("seed=2", {"open_weights.member": "seed=2"}),
        "out": ("/c", {"check_new_file.path": "/c"}),
        "streams": (3, coded_with(streams=3)),
        "segment_len": (3, coded_with(segment_len=3)),
        "learning_rate": (0.5, coded_with(learning_rate=0.5)),
        "decay": (0.5, coded_with(decay=0.5)),
        "epsilon": (0.5, coded_with(epsilon=0.5)),
        "threads": (3, {"use_cpu.threads": 3} | coded_with(threads=3)),
    },
)
CONVERT = Scene(
    program="convert",
    start=plan_starts.start_convert,
    plan=convert.Plan(from_="/a", to="/b"),
    rows={
        "from_": ("/c", {"convert.source": "/c"}),
        "to": ("/c", {"convert.target": "/c"}),
        "to_format": ("huggingface", {"convert.to_format": "huggingface"}),
        "ensemble_member": ("seed=2", {"convert.member": "seed=2"}),
    },
)
EXPORT = Scene(
    program="export",
    start=plan_starts.start_export,
    plan=export.Plan(from_="/a", to="/b"),
    rows={
        "from_": ("/c", {"open_weights.path": "/c"}),
        "to": ("/c", {"check_new_folder.folder": "/c"}),
        "rows": (3, {"build_for.config.eval.batch_size": 3}),
        "weight_dtype": ("int8", {"open_weights.weight_dtype": "int8"}),
        "cache_dtype": ("bfloat16", {"open_weights.cache_dtype": "bfloat16"}),
        "ensemble_member": ("seed=2", {"open_weights.member": "seed=2"}),
    },
)
REPORT = Scene(
    program="report",
    start=plan_starts.start_report,
    plan=report.Plan(),
    rows={"out": ("/c", {"make_folder.folder": "/c"})},
)
PREPARE = Scene(
    program="prepare",
    start=plan_starts.start_prepare,
    plan=cli.TextPlan(),
    rows=options_of_text(),
)
ENSEMBLE = Scene(
    program="ensemble",
    start=plan_starts.start_ensemble,
    plan=ensemble.Plan(workdir="/w"),
    rows={
        "workdir": ("/c", {"open.path": "/c"}),
        "ensemble_member": (
            ("seed=3", "seed=4"),
            {"train_run.members": [{"seed": 3}, {"seed": 4}]},
        ),
        **options_of_text(),
        **OF_WATCHING,
    },
)
SPLIT_ENSEMBLE = Scene(
    program="ensemble",
    start=plan_starts.start_split,
    plan=ensemble.Plan(workdir="/w", mode="split", ensemble_member=("seed=3",), to="/t"),
    rows={
        "mode": (
            "train",
            {
                "open.path": "/w",
                "split_off.workdir": GONE,
                "split_off.member": GONE,
                "split_off.target": GONE,
            },
        ),
        "workdir": ("/c", {"split_off.workdir": "/c"}),
        "ensemble_member": (("seed=4",), {"split_off.member": "seed=4"}),
        "to": ("/c", {"split_off.target": "/c"}),
    },
)
QUICKSTART = Scene(
    program="quickstart",
    start=plan_starts.start_quickstart,
    plan=quickstart.Plan(),
    rows={
        "workdir": (
            "/c",
            {
                "open.path": "/c",
                "read_corpus.cache_dir": "/c/prepared",
            },
        ),
        **MINUTES,
    },
)
TRAIN = Scene(
    program="text",
    start=plan_starts.start_training,
    plan=TRAIN_PLAN,
    rows={"workdir": ("/c", {"open.path": "/c"}), **options_of_text(), **OF_WATCHING, **MINUTES},
)
USE = Scene(
    program="text",
    start=plan_starts.start_use,
    plan=dataclasses.replace(TRAIN_PLAN, mode="eval"),
    rows={
        "mode": ("score", {"function": "score_tokens"}),
        "workdir": ("/c", {"open_weights.path": "/c"}),
        "ensemble_member": ("seed=2", {"open_weights.member": "seed=2"}),
        "out": ("/c", {"out": "/c"}),
        **options_of_text(),
    },
)
DOCUMENTS = Scene(
    program="text",
    start=plan_starts.start_documents,
    plan=dataclasses.replace(TRAIN_PLAN, mode="score", input="in"),
    rows={
        "workdir": ("/c", {"open_weights.path": "/c"}),
        "ensemble_member": ("seed=2", {"open_weights.member": "seed=2"}),
        "input": ("other", {"open_input.path": "other", "score_documents.name": "other"}),
        "input_format": ("documents", {"documents.form": InputFormat.DOCUMENTS}),
        "per_token": (True, {"score_documents.per_token": True}),
    },
)
LM_EVAL = Scene(
    program="lm_eval",
    start=plan_starts.start_lm_eval,
    plan=lm_eval.Plan(model_path="/w", tasks=("one",)),
    rows={
        "model_path": ("/c", {"model.path": "/c"}),
        "ensemble_member": ("seed=2", {"model.member": "seed=2"}),
        "batch_size": (2, {"model.batch_size": 2}),
        "first": ("x", {"model.first": "x"}),
        "tasks": (("two",), {"simple_evaluate.tasks": ["two"]}),
        "include_path": ("/c", {"include_path": "/c"}),
        "num_fewshot": (3, {"simple_evaluate.num_fewshot": 3}),
        "limit": (0.5, {"simple_evaluate.limit": 0.5}),
        "output": ("/c", {"write.path": "/c"}),
    },
)
TUNE_DYNAMIC = Scene(
    program="tune_dynamic",
    start=plan_starts.start_tune_dynamic,
    plan=tune_dynamic.Plan(workdir="/w", learning_rates=(1e-3, 2e-3, 4e-3), decays=(0.0,)),
    rows={
        **OF_TRAINED_RUN,
        # The last score is the test split's.
        "learning_rates": ((3e-3,), {"tried": [(3e-3, 0.0)] * 2}),
        "decays": (
            (0.5,),
            {"tried": [(1e-3, 0.5), (2e-3, 0.5), (4e-3, 0.5), (2e-3, 0.5)]},
        ),
        "valid_tokens": (20, {"valid": 20}),
        "test_tokens": (30, {"test": 30}),
        "out": ("/c", {"write_json.path": "/c/tune_dynamic.json"}),
    },
)
# In `plan_starts.CORPUS` the validation split has the tokens from 100 to 159, and the test split
# those from 160 to 249. The first ones of what a program reads are kept.
CONTEXT_LENGTH = Scene(
    program="paper.context_length",
    start=plan_starts.start_context_length,
    plan=context_length.Plan(workdir="/w", lengths=(8,), stride=1),
    rows={
        **OF_TRAINED_RUN,
        "lengths": (
            (6,),
            {
                "build_for.config.eval.segment_len": 6,
                "score_with_line.name": "valid at attention length 6",
            },
        ),
        "split": (
            "test",
            {
                "score_with_line.tokens": [160, 161],
                "score_with_line.name": "test at attention length 8",
            },
        ),
        "stride": (2, {"build_for.config.eval.stride": 2}),
    },
)
CONTINUATION = Scene(
    program="paper.continuation",
    start=plan_starts.start_continuation,
    plan=continuation.Plan(workdir="/w", context=3),
    rows={
        **OF_TRAINED_RUN,
        "split": ("valid", {"contexts": [[100, 101, 102]]}),
        "starts": ((4, 9), {"contexts": [[164, 165, 166], [169, 170, 171]]}),
        "context": (2, {"contexts": [[160, 161]]}),
        "out": ("/c", {"write.path": "/c"}),
    },
)
ATTENTION = Scene(
    program="paper.attention",
    start=plan_starts.start_attention,
    plan=attention.Plan(workdir="/w"),
    rows={
        **OF_TRAINED_RUN,
        "split": (
            "test",
            {
                "first": 160,
                "count": 90,
                "_read.positions": (89,),
                "_write.facts": {"step": 7, "split": "test"},
            },
        ),
        "tokens": (30, {"count": 30, "_read.positions": (29,)}),
        "heads": (("0.1", "1.0"), {"_write.heads": [(0, 1), (1, 0)]}),
        "positions": ((20, 25), {"_read.positions": (20, 25)}),
        "out": ("/c", {"make_folder.folder": "/c", "_write.folder": "/c"}),
    },
)
# Contexts of 4, 6 and 8 tokens. Losses are scored from position 8 on, which has all of them.
RECL = Scene(
    program="paper.recl",
    start=plan_starts.start_recl,
    plan=recl.Plan(workdirs=("/w", "/v"), lengths=(4, 8, 2), out="/o"),
    rows={
        **options_of_text(read_only_cache=None),
        "workdirs": (("/w", "/c"), {"read": ["/w", "/c"]}),
        "names": (("x", "y"), {"make_folder.folder": "/o/losses/x"}),
        "lengths": ((6, 9, 3), {"context_losses.scored": [9, 10], "context_losses.context": 6}),
        "stride": (3, {"context_losses.scored": [8, 11]}),
        "batch_size": (5, {"context_losses.batch_size": 5}),
        "split": ("valid", {"context_losses.tokens": [100, 101]}),
        "out": ("/c", {"make_folder.folder": "/c/losses/w"}),
    },
)
# "lengths" has the encoding, the attention length and the stride of each use: the row is checked at
# the plan's length and at the trained one, and then scored at the plan's.
ABLATION = Scene(
    program="paper.ablation",
    start=plan_starts.start_ablation,
    plan=ablation.Plan(lengths=(4,), rows=(VANILLA,), out="/o"),
    rows={
        **options_of_text(),
        "rows": (
            ("none-al_rfou-half",),
            {
                "path": "/o/none-al_rfou-half-seed1111",
                "lengths": [("al_rfou", 4, 1), ("al_rfou", 7, 1), ("al_rfou", 4, 1)],
            },
        ),
        "seeds": ((5,), {"path": f"/o/{VANILLA}-seed5", "seed": 5}),
        "lengths": (
            (6,),
            {"lengths": [("vaswani", 6, 1), ("vaswani", 7, 1), ("vaswani", 6, 1)]},
        ),
        "stride": (2, {"lengths": [("vaswani", 4, 2), ("vaswani", 7, 2), ("vaswani", 4, 2)]}),
        "out": ("/c", {"path": f"/c/{VANILLA}-seed1111"}),
    },
)
ABLATION_OF_A_TABLE = Scene(
    program="paper.ablation",
    start=plan_starts.start_ablation,
    plan=ablation.Plan(lengths=(4,), out="/o"),
    rows={
        # Three rows instead of nine are checked, and then the first is scored. The trained lengths
        # are 7 and, with a memory of 8, 15. Only the row without memory has a stride.
        "table": (
            "7",
            {
                "lengths": [
                    ("relative", 4, None),
                    ("relative", 15, None),
                    ("shaw", 4, None),
                    ("shaw", 15, None),
                    ("relative", 4, 1),
                    ("relative", 7, 1),
                    ("relative", 4, None),
                ]
            },
        ),
    },
)
TABLE9 = Scene(
    program="paper.table9",
    start=plan_starts.start_table9,
    plan=table9.Plan(lengths=(30,)),
    rows={"lengths": ((40,), {"measure.attention_len": 40}), "calls": (3, {"measure.calls": 3})},
)
DEVICE = Scene(
    program="bench.device",
    start=plan_starts.start_device,
    plan=DEVICE_PLAN,
    rows={
        "configs": (("two",), {"case": ("two", *CASE[1:])}),
        "tasks": (("evaluation",), {"case": ("one", "evaluation", 1, 5, "float32")}),
        "batch_size": (5, {"case": (*CASE[:2], 5, *CASE[3:])}),
        "shrink": (2, {"case": (*CASE[:3], 4, CASE[4])}),  # Half of 7, rounded up.
        "dtype": ("bfloat16", {"case": (*CASE[:4], "bfloat16")}),
        "paths": (("tiled",), {"implementations": ["tiled 64x1024"]}),
        "out": ("/c", {"make_folder.folder": "/c"}),
    },
)
DEVICE_TILES = Scene(
    program="bench.device",
    start=plan_starts.start_device,
    plan=dataclasses.replace(DEVICE_PLAN, paths=("tiled",)),
    rows={"tiles": (("2x4",), {"implementations": ["tiled 64x1024", "tiled 2x4"]})},
)
DEVICE_TIMING = Scene(
    program="bench.device",
    start=plan_starts.start_device_timing,
    plan=device.Plan(),
    rows={"calls": (3, {"time_in_turns.calls": 3})},
)
ESTIMATE = Scene(
    program="bench.estimate",
    start=plan_starts.start_estimate,
    plan=estimate.Plan(topology=("v5e:2x2",), configs=("small",)),
    rows={
        "topology": (("v4:2x2x1",), {"estimated": [("small", "v4:2x2x1", estimate.TASKS)]}),
        "tasks": (("evaluation",), {"estimated": [("small", "v5e:2x2", ("evaluation",))]}),
        "configs": (("ptb",), {"estimated": [("ptb", "v5e:2x2", estimate.TASKS)]}),
    },
)
ESTIMATE_OF_FLAGS = Scene(
    program="bench.estimate",
    start=plan_starts.start_estimate,
    plan=estimate.Plan(topology=("v5e:2x2",)),
    rows={
        "topology": (("v4:2x2x1",), {"estimated": [("the flags", "v4:2x2x1", estimate.TASKS)]}),
        "tasks": (("evaluation",), {"estimated": [("the flags", "v5e:2x2", ("evaluation",))]}),
        "programs": ("texts", {"programs": ["texts"]}),
    },
)
SERVING = Scene(
    program="bench.serving",
    start=plan_starts.start_serving,
    plan=serving.Plan(),
    # A single row is timed too, whatever the plan says.
    rows={"rows": (5, {"rows": [5, 1]}), "calls": (3, {"time_in_turns.calls": 3})},
)
SESSION = Scene(
    program="bench.session",
    start=plan_starts.start_session,
    # An earlier command measured peaks, and 80 s are less than the limit of step.
    plan=session.Plan(parts=("peaks", "step_12l", "step"), minutes=80 / 60),
    rows={
        "minutes": (10.0, {"started": ["step", "step_12l"]}),
        "parts": (("step_wt103", "attention"), {"started": [], "folders": set()}),
        "miniature": (True, {"miniature": True, "folders": {"session/miniature"}}),
        "again": (True, {"started": ["peaks", "step_12l"]}),
        "out": ("other", {"folders": {"other"}}),
        "inside": ("step", {"started": ["step itself"], "folders": set()}),
    },
)
SPEED = Scene(
    program="bench.speed",
    start=plan_starts.start_speed,
    plan=speed.Plan(),
    rows={
        "tasks": (("evaluation",), {"first": "evaluation"}),
        "calls": (3, {"time_in_turns.calls": 3}),
        "warmup": (4, {"time_in_turns.warmup": 4}),
        "peer": ("hf", {"checked_peers.path": None, "compat": "hf"}),
    },
)
SPEED_OF_THE_ORIGINAL = Scene(
    program="bench.speed",
    start=plan_starts.start_speed,
    plan=speed.Plan(peer="original", peer_path="/a"),
    rows={"peer_path": ("/c", {"checked_peers.path": "/c"})},
)

SCENES = [
    COMPRESS,
    CONVERT,
    EXPORT,
    REPORT,
    PREPARE,
    ENSEMBLE,
    SPLIT_ENSEMBLE,
    QUICKSTART,
    TRAIN,
    USE,
    DOCUMENTS,
    LM_EVAL,
    TUNE_DYNAMIC,
    CONTEXT_LENGTH,
    CONTINUATION,
    ATTENTION,
    RECL,
    ABLATION,
    ABLATION_OF_A_TABLE,
    TABLE9,
    DEVICE,
    DEVICE_TILES,
    DEVICE_TIMING,
    ESTIMATE,
    ESTIMATE_OF_FLAGS,
    SERVING,
    SESSION,
    SPEED,
    SPEED_OF_THE_ORIGINAL,
]
ROWS = []
for scene in SCENES:
    for name in scene.rows:
        row_id = f"{scene.program}-{scene.start.__name__}-{name}"
        ROWS.append(pytest.param(scene, name, id=row_id))


@pytest.mark.parametrize(("scene", "name"), ROWS)
def test_a_second_value_changes_what_it_should_and_nothing_else(monkeypatch, scene, name):
    """The calls of a program with its plan, and with one setting changed, differ as declared."""
    value, effect = scene.rows[name]
    second_plan = dataclasses.replace(scene.plan, **{name: value})

    with monkeypatch.context() as patch:
        before = scene.start(Seen(patch), scene.plan, ())
    with monkeypatch.context() as patch:
        after = scene.start(Seen(patch), second_plan, (name,))

    changed = {}
    for argument in before.keys() | after.keys():
        if before.get(argument, GONE) != after.get(argument, GONE):
            changed[argument] = after.get(argument, GONE)
    assert changed == effect


# The commands of the published corpora share a plan, for which experiments.text stands. The
# server's plan has a test of its own.
OTHER_PROGRAMS = {"enwik8", "lm1b", "ptb", "text8", "wikitext103", "serve"}


def programs_with_a_plan():
    """Returns the names of the programs whose plans are tested here, without their package."""
    names = set()
    for folder in HEADINGS:
        for module in programs_in(folder):
            package, _, name = module.partition(".")
            if package == "experiments":
                names.add(name)
    return names - OTHER_PROGRAMS


def test_each_setting_of_each_plan_has_a_row():
    """Except `compilation_cache`, which goes to `keep_compiled` in every program before its
    `run`.
    """
    tested = {}
    for scene in SCENES:
        tested.setdefault(scene.program, {"compilation_cache"}).update(scene.rows)
    assert tested.keys() == programs_with_a_plan()

    for scene in SCENES:
        settings = {leaf.name for leaf in config_tree.leaves(type(scene.plan))}
        assert tested[scene.program] == settings, scene.program
