"""Pins every list that decides what is accepted, run, passed on or omitted, as a whole.

Tests of a reader or server try samples of what is rejected. They stay green if a list gets one more
entry, and one entry is enough for somebody who means harm. A change of a list therefore changes its
copy here, where it is reviewed.
"""

import asyncio
import dataclasses
import encodings.aliases
import errno
import pickletools
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import sqlalchemy.dialects

from experiments.bench import topologies
from launch import study, sweep_file
from launch.local import process_environments
from support import tiny_model
from txl_jax.cli import other_hosts, plans, train_command
from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.data import own_text, published, text
from txl_jax.errors import UserError
from txl_jax.interop import (
    exported,
    foreign_vocabulary,
    formats,
    infer_config,
    own_settings,
    pickles,
    portable,
    safetensors,
    state_dict,
    tensorflow,
    torch_files,
    weight_files,
)
from txl_jax.interop import names as tensor_names
from txl_jax.runs import run as run_lib
from txl_jax.runs import trained
from txl_jax.runtime import distributed, environment, lock, remote, storage
from txl_jax.serving import app, middleware, protocol
from txl_jax.training import member_axis

# Pickles and files of PyTorch


def test_what_a_pickle_may_call():
    builders = {
        pickles._set: {
            "builtins.set",
            "builtins.frozenset",
            "__builtin__.set",
            "__builtin__.frozenset",
        },
        pickles._bytes: {
            "builtins.bytes",
            "builtins.bytearray",
            "__builtin__.bytes",
            "__builtin__.bytearray",
            "_codecs.encode",
        },
        pickles._dict: {"collections.Counter", "collections.OrderedDict"},
    }
    calls = dict(pickles._CALLS)
    assert calls.pop("collections.defaultdict")("a factory", [("a", 1)]) == {"a": 1}
    expected = {}
    for function, names in builders.items():
        expected |= dict.fromkeys(names, function)
    assert calls == expected
    assert {
        "datetime.date",
        "datetime.datetime",
        "datetime.timedelta",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy._core.numeric._frombuffer",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy.core.numeric._frombuffer",
        "numpy.dtype",
        "numpy.ndarray",
        "pathlib.Path",
        "pathlib.PosixPath",
        "re._compile",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.storage._load_from_bytes",
    } == pickles._INERT_CALLS


def test_what_a_file_of_pytorch_may_call():
    parameters = {
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch.nn.parameter.Parameter",
        "torch.nn.parameter.Buffer",
    }
    tensors = {"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"}
    calls = torch_files._CALLS
    assert set(calls) == parameters | tensors | {"torch.Size"}
    for name in parameters:
        assert calls[name]("the data", "more") == "the data", name
    for name in tensors:
        assert calls[name] is torch_files._tensor, name
    assert calls["torch.Size"]([1, 2]) == (1, 2)


def test_the_instructions_of_a_pickle_that_are_carried_out():
    """All that pickletools knows, without these.

    The machine is asked for an attribute of the instruction's name, so any method of that name
    would be one.
    """
    known = {opcode.name for opcode in pickletools.opcodes}
    refused = {name for name in known if not hasattr(pickles._Machine, name)}
    assert refused == {
        "NEXT_BUFFER",
        "READONLY_BUFFER",
        "DUP",
        "EXT1",
        "EXT2",
        "EXT4",
        "INST",
        "OBJ",
        "STOP",
    }


def test_keys_and_encodings_that_a_pickle_may_have():
    assert set(pickles._PLAIN_KEYS) == {str, bytes, int, type(None), pickles.Record}
    # Python's encodings by all their names. The last three have no aliases.
    aliases = encodings.aliases.aliases
    names = {*aliases, *aliases.values(), "latin-1", "utf-8", "undefined", "unicode_escape", "idna"}
    accepted = set()
    for name in names:
        try:
            pickles._bytes("a", name)
        except pickles.DamagedError:
            continue
        accepted.add(name)
    assert accepted == {"latin1", "latin-1", "utf-8", "ascii"}


def test_dtypes_of_other_programs_files():
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    assert {
        "F16": np.dtype("float16"),
        "F32": np.dtype("float32"),
        "F64": np.dtype("float64"),
        "BF16": bfloat16,
        "I8": np.dtype("int8"),
        "I16": np.dtype("int16"),
        "I32": np.dtype("int32"),
        "I64": np.dtype("int64"),
        "U8": np.dtype("uint8"),
        "U16": np.dtype("uint16"),
        "U32": np.dtype("uint32"),
        "U64": np.dtype("uint64"),
        "BOOL": np.dtype(bool),
    } == safetensors._DTYPES
    assert {dtype: code for code, dtype in safetensors._DTYPES.items()} == safetensors._CODES
    assert {
        "DoubleStorage": np.dtype("<f8"),
        "FloatStorage": np.dtype("<f4"),
        "HalfStorage": np.dtype("<f2"),
        "BFloat16Storage": bfloat16,
        "LongStorage": np.dtype("<i8"),
        "IntStorage": np.dtype("<i4"),
        "ShortStorage": np.dtype("<i2"),
        "CharStorage": np.dtype("i1"),
        "ByteStorage": np.dtype("u1"),
        "BoolStorage": np.dtype("?"),
    } == torch_files._STORAGES


# Models of other implementations


def test_names_of_files_that_are_opened():
    assert weight_files.NAMES == (
        "model.safetensors",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        "model.pt",
        "checkpoint_best.pt",
        "checkpoint_last.pt",
        "last.ckpt",
    )
    assert set(weight_files.SUFFIXES) == {".safetensors", ".bin", ".pt", ".pth", ".ckpt"}
    assert set(trained._REMOTE_SUFFIXES) == {*weight_files.SUFFIXES, ".index", ".meta", ".h5"}
    wrappers = {
        "_orig_mod",
        "module",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_forward_module",
    }
    assert wrappers == tensor_names.WRAPPERS
    assert own_settings.NAME == "txl_jax.json"
    assert foreign_vocabulary.NAMES == (
        "vocabulary.txt",
        "vocab.pkl",
        "vocab.bin",
        "vocab.pt",
        "cache.pkl",
        "cache.pt",
        "vocab.txt",
        "1b_word_vocab.txt",
    )
    assert (portable.CONFIG, portable.WEIGHTS) == ("config.json", "model.safetensors")
    assert (portable.VOCABULARY, portable.CARD) == ("vocabulary.txt", "README.md")
    assert (exported._MANIFEST, exported._DIGEST) == ("manifest.json", "manifest.sha256")
    assert (exported._WEIGHTS, exported._TOKENS) == ("weights.safetensors", "tokens.json")
    assert exported.PLATFORMS == ("cpu", "tpu", "cuda")


def test_keys_that_are_read_of_other_implementations_settings():
    """By their names, types and lower bounds.

    `formats` also reads Hugging Face's epsilon of layer norms.
    """
    sizes = {"n_layer", "d_model", "n_head", "d_head", "d_inner", "d_embed", "div_val", "n_token"}
    integers = dict.fromkeys(sizes | {"mem_len", "clamp_len", "tgt_len"}, int)
    flags = dict.fromkeys(
        {"untie_r", "pre_lnorm", "tie_weight", "same_length", "proj_share_all_but_first"}, bool
    )
    assert integers | flags | {"cutoffs": int, "tie_projs": bool} == infer_config._KINDS
    assert set(infer_config._LISTS) == {"cutoffs", "tie_projs"}
    assert dict.fromkeys(sizes, 1) | {"mem_len": 0} == infer_config._LEAST
    assert infer_config._OTHER_NAMES == {
        "n_token": "vocab_size",
        "tie_weight": "tie_word_embeddings",
    }
    assert infer_config._PUBLISHED_CUTOFFS == {
        267_735: (20_000, 40_000, 200_000),
        793_470: (60_000, 100_000, 640_000),
    }
    around = ("model_state", "model_state_dict", "state_dict", "model", "module", "net")
    assert around == state_dict._AROUND


def test_tensors_that_a_conversion_leaves_out_or_renames():
    """Every other unknown tensor is refused."""
    assert tensorflow._OMITTED.pattern == ".*/(Adam|Adam_1|ExponentialMovingAverage|adam_[mv])"
    for name in (
        "x/Adam",
        "x/Adam_1",
        "x/ExponentialMovingAverage",
        "x/adam_m",
        "x/adam_v",
        "a/b/Adam",
    ):
        assert tensorflow._OMITTED.fullmatch(name), name
    # Names that only resemble these.
    for name in ("Adam", "x/Adam_2", "x/Adam/y", "x/adam_", "x/ExponentialMovingAverage_1"):
        assert not tensorflow._OMITTED.fullmatch(name), name

    # The first tensor is left out, and two are renamed. Other names only resemble these.
    leaf = mock.sentinel.leaf
    tensors = {
        "crit.shared_out_projs.0": leaf,
        "crit.shared_out_projs": leaf,
        "crit.out_layers_biases.12": leaf,
        "crit.out_layers_weights.0": leaf,
        "crit.out_layers_other.0": leaf,
        "x.crit.out_layers_biases.0": leaf,
        "crit.out_layers_biases.0x": leaf,
    }
    assert set(formats._renamed(tensors)) == {
        "crit.shared_out_projs",
        "crit.out_layers.12.bias",
        "crit.out_layers.0.weight",
        "crit.out_layers_other.0",
        "x.crit.out_layers_biases.0",
        "crit.out_layers_biases.0x",
    }


def test_variables_of_the_tensorflow_release():
    """By the PyTorch release's names, which tests/interop/test_original.py has written out."""
    expected = {
        "layer_#/rel_attn/qkv/kernel": "layers.#.dec_attn.qkv_net.weight",
        "layer_#/rel_attn/r/kernel": "layers.#.dec_attn.r_net.weight",
        "layer_#/rel_attn/o/kernel": "layers.#.dec_attn.o_net.weight",
        "layer_#/rel_attn/LayerNorm/gamma": "layers.#.dec_attn.layer_norm.weight",
        "layer_#/rel_attn/LayerNorm/beta": "layers.#.dec_attn.layer_norm.bias",
        "layer_#/ff/layer_1/kernel": "layers.#.pos_ff.CoreNet.0.weight",
        "layer_#/ff/layer_1/bias": "layers.#.pos_ff.CoreNet.0.bias",
        "layer_#/ff/layer_2/kernel": "layers.#.pos_ff.CoreNet.3.weight",
        "layer_#/ff/layer_2/bias": "layers.#.pos_ff.CoreNet.3.bias",
        "layer_#/ff/LayerNorm/gamma": "layers.#.pos_ff.layer_norm.weight",
        "layer_#/ff/LayerNorm/beta": "layers.#.pos_ff.layer_norm.bias",
        "r_w_bias": "r_w_bias",
        "r_r_bias": "r_r_bias",
        "adaptive_embed/lookup_table": "word_emb.emb_layers.0.weight",
        "adaptive_embed/proj_W": "word_emb.emb_projs.0",
        "adaptive_embed/cutoff_#/lookup_table": "word_emb.emb_layers.#.weight",
        "adaptive_embed/cutoff_#/proj_W": "word_emb.emb_projs.#",
        "adaptive_softmax/bias": "crit.out_layers.0.bias",
        "adaptive_softmax/cutoff_0/cluster_W": "crit.cluster_weight",
        "adaptive_softmax/cutoff_0/cluster_b": "crit.cluster_bias",
        "adaptive_softmax/cutoff_#/proj": "crit.out_projs.#",
        "adaptive_softmax/cutoff_#/b": "crit.out_layers.#.bias",
    }
    assert expected == tensorflow._NAMES
    assert tensorflow._LENGTHS == {
        "enwik8": (128, 3800, 1000),
        "text8": (128, 3800, 1000),
        "wt103": (128, 1600, 1000),
        "lm1b": (32, 128, -1),
    }


def test_settings_that_a_portable_checkpoint_does_not_publish():
    """What belongs to one machine or person: the names of files, the corpus, the mesh."""
    config = ExperimentConfig()
    info = portable.ModelInfo(config, tiny_model.VOCABULARY, 0, "drawn")
    saved = portable._saved(info, 0, {})
    assert set(saved) == {
        "txl_jax_model",
        "description",
        "parameters",
        "vocab_size",
        "step",
        "config",
        "scores",
        "sha256",
    }
    kept_back = set(config_tree.to_dict(config)) - set(saved["config"])
    data = {
        leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.name.startswith("data.")
    }
    assert kept_back == (data - {"data.reset_at"}) | {
        "init_from",
        "init_vocabulary",
        "generate.prompt_file",
        "mesh.data",
        "mesh.fsdp",
        "mesh.tensor",
    }


# Texts


def test_archives_and_files_of_a_text():
    assert set(published.ARCHIVE_SUFFIXES) == {".zip", ".tar.gz", ".tgz", ".tar"}
    assert {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
    } == own_text.STDLIB_SKIPPED_DIRS
    assert text._PACKED == {
        b"\x1f\x8b": "gzip",
        b"PK\x03\x04": "zip",
        b"BZh": "bzip2",
        b"\xfd7zXZ": "xz",
        b"(\xb5/\xfd": "zstd",
        b"\xff\xfe": "UTF-16",
        b"\xfe\xff": "UTF-16",
        b"MThd": "MIDI (docs/music.md shows how to convert it to ids)",
    }


def test_servers_that_texts_are_downloaded_from():
    servers = set()
    without_digest = []
    for corpus in published.CORPORA.values():
        for source in corpus.sources:
            for download in source:
                servers.add("/".join(download.url.split("/")[:3]))
                if download.sha256 is None:
                    without_digest.append((corpus, download))
    assert servers == {
        "http://mattmahoney.net",
        "http://www.fit.vutbr.cz",
        "http://www.statmt.org",
        "https://data.deepai.org",
        "https://gluonnlp-numpy-data.s3-us-west-2.amazonaws.com",
        "https://raw.githubusercontent.com",
        "https://s3.amazonaws.com",
        "https://wikitext.smerity.com",
    }
    # Without a sha256 of the archive, the sha256 of each file in it decides.
    [(corpus, archive)] = without_digest
    assert archive.url == "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
    assert len(corpus.facts) == 3, "one file for each split"
    for name, facts in corpus.facts.items():
        assert facts.sha256, name


# Storage and locks


def test_schemes_of_urls():
    assert remote.SCHEMES == {"gs": "gcsfs", "s3": "s3fs"}


class _Answer(Exception):  # noqa: N818
    """An error of a storage library, with the code of an HTTP answer."""

    def __init__(self, code):
        super().__init__("an answer")
        self.code = code


def test_errors_of_storage_that_are_tried_again_and_what_they_mean():
    """Only FileNotFoundError means absence, and PermissionError means that a retry is in vain."""
    assert {code for code in range(100, 600) if remote._is_passing(_Answer(code))} == {
        408,
        429,
        500,
        502,
        503,
        504,
    }
    assert set(remote._PASSING_ERRORS.pattern.split("|")) == {
        "Connect",
        "Timeout",
        "Disconnect",
        "ProxyError",
        "ClientOSError",
        "ServerError",
        "IncompleteRead",
        "Payload",
    }
    assert {
        FileNotFoundError: errno.ENOENT,
        FileExistsError: errno.EEXIST,
        IsADirectoryError: errno.EISDIR,
        NotADirectoryError: errno.ENOTDIR,
        PermissionError: errno.EACCES,
    } == remote._FINAL_ERRORS
    assert set(remote._DENIED.pattern.split("|")) == {
        "Forbidden",
        r"\b40[13]\b",
        "Access ?Denied",
        "Unauthorized",
        "Invalid Credentials",
        "Anonymous caller",
    }


def test_errors_that_mean_a_file_system_without_locks(tmp_path, monkeypatch):
    """A run that cannot be locked continues with a note. Any other error ends it."""
    without_locks = set()
    for number in errno.errorcode:
        failure = OSError(number, "no lock")
        if isinstance(failure, BlockingIOError):
            continue  # Another process has the lock.
        monkeypatch.setattr(storage.fcntl, "flock", mock.Mock(side_effect=failure))
        with lock.RunLock(tmp_path) as run_lock:
            try:
                run_lock.acquire()
            except OSError:
                continue
            assert len(run_lock.notes) == 1
            without_locks.add(number)
    assert without_locks == {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


# Hosts and processes


@dataclasses.dataclass(frozen=True)
class _EveryPlan(train_command.TrainPlan, plans.TrainedRun, plans.StoredTypes):
    """All settings that commands share."""


def test_flags_that_may_differ_from_host_to_host(monkeypatch):
    compared = []
    monkeypatch.setattr(
        distributed, "assert_same_on_all", lambda values, advice: compared.append(set(values))
    )
    other_hosts.check_same(_EveryPlan())
    run_lib.check_same_settings(ExperimentConfig())
    flags, settings = compared
    names = {leaf.name for leaf in config_tree.leaves(_EveryPlan)}
    assert {f"--{name}" for name in names} - flags == {
        "--workdir",
        "--out",
        "--data_dir",
        "--cache_dir",
        "--compilation_cache",
    }
    assert set(config_tree.to_dict(ExperimentConfig())) - settings == {
        "data.file",
        "data.train",
        "data.valid",
        "data.test",
        "data.tokenizer.vocab_file",
        "data.tokenizer.hf_file",
    }


def test_variables_and_errors_of_several_processes():
    assert other_hosts._VARIABLES == {
        "coordinator": "JAX_COORDINATOR_ADDRESS",
        "num_processes": "JAX_NUM_PROCESSES",
        "process_id": "JAX_PROCESS_ID",
    }
    assert set(other_hosts._SIGNS_OF_LOSS) == {
        "Gloo",
        "NCCL",
        "UNAVAILABLE",
        "Connection closed",
        "Connection reset",
        "coordination service",
    }
    # These are set. What the launching process has of its own, such as a secret, is not among them.
    always = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
    secret = {"AWS_SECRET_ACCESS_KEY": "x"}
    [usual] = process_environments(1, devices=None, base=secret)
    [simulated] = process_environments(1, devices=2, base=secret)
    assert set(usual) == always
    assert set(simulated) == always | {"JAX_PLATFORMS", "XLA_FLAGS"}


def test_variables_under_which_memory_and_time_are_estimated():
    """Without them the compilers search for devices, and take the devices of other processes."""
    assert topologies._ENVIRONMENT == {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def test_flags_whose_values_are_not_logged():
    words = ("key", "token", "secret", "password", "name", "kind", "file")
    hidden = []
    for word in words:
        if environment._SECRET.sub("hidden", f"--my_{word}=value") == "hidden":
            hidden.append(word)
    assert hidden == ["key", "token", "secret", "password"]


# Records of runs


def test_facts_of_a_record():
    assert set(run_lib._TEXT_FACTS) == {"name", "description", "digest", "data_dir", "cache_dir"}
    assert set(run_lib._EVALUATION) == {
        "batch_size",
        "segment_len",
        "mem_len",
        "clamp_len",
        "same_length",
        "cache_dtype",
    }


def test_settings_in_which_members_of_an_ensemble_may_differ():
    names = ("rate", "attention", "qkv", "output", "input", "embedding")
    rates = {f"model.dropout.{name}" for name in names}
    assert set(member_axis.VARYING) == {"seed", "optimizer.learning_rate"} | rates


# Studies


def test_databases_and_keys_of_a_study():
    """Of all the databases that SQLAlchemy has."""
    accepted = set()
    for dialect in sqlalchemy.dialects.__all__:
        try:
            database = study.database(f"{dialect}://somebody@host/name")
        except UserError:
            continue
        accepted.add((dialect, database.drivername))
    assert accepted == {("sqlite", "sqlite"), ("postgresql", "postgresql+psycopg")}
    for url in (
        "sqlite+pysqlite:///x",
        "postgresql+psycopg2://a@b/c",
        "postgresql://a:word@b/c",
        "file:///x",
    ):
        with pytest.raises(UserError):
            study.database(url)
    assert set(sweep_file._KEYS) == {
        "program",
        "flagfile",
        "base",
        "sampler",
        "pruner",
        "grid",
        "random",
        "runs",
    }


# The server


async def _status_without_key(application, method, path) -> int:
    """Asks a server, as ASGI servers do, by a name of this machine and without a key.

    Returns the answer's status.
    """
    answers = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        answers.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "scheme": "http",
        "root_path": "",
    }
    await application(scope, receive, send)
    return answers[0]["status"]


def test_routes_methods_and_what_needs_no_key():
    application = app.make_app(mock.Mock(), "tiny", keys=["the key"])
    routes = set()
    for route in application.routes:
        for method in route.methods - {"HEAD"}:
            routes.add((method, route.path))
    assert routes == {
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name:path}"),
        ("POST", "/v1/sessions"),
        ("GET", "/v1/sessions"),
        ("GET", "/v1/sessions/{name}"),
        ("DELETE", "/v1/sessions/{name}"),
        ("GET", "/tokenizer_info"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/metrics"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/openapi.json"),
        ("GET", "/"),
    }

    open_to_all = set()
    for method, path in routes:
        if asyncio.run(_status_without_key(application, method, path)) != 401:
            open_to_all.add(path)
    assert open_to_all == {"/healthz", "/readyz", "/openapi.json", "/"}


def test_names_and_policy_of_the_server():
    assert set(app.LOOPBACK) == {"localhost", "127.0.0.1", "::1"}
    assert set(middleware.PROBES) == {"/healthz", "/readyz"}
    assert set(app._POLICY.split("; ")) == {
        "default-src 'none'",
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "connect-src 'self'",
        "img-src data:",
        "frame-ancestors 'none'",
    }


def test_parameters_of_requests():
    assert set(protocol.Body.model_fields) == set()
    assert set(protocol.CompletionBody.model_fields) == {
        "model",
        "prompt",
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "best_of",
        "stop",
        "seed",
        "echo",
        "logprobs",
        "stream",
        "stream_options",
        "session",
        "fork",
        "user",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "suffix",
    }
    assert set(protocol._StreamOptions.model_fields) == {"include_usage", "include_obfuscation"}
    assert set(protocol.TokenizeBody.model_fields) == {"model", "prompt", "add_special_tokens"}
    assert set(protocol.DetokenizeBody.model_fields) == {"model", "tokens"}
    assert set(protocol._UNSUPPORTED) == {
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "suffix",
    }
    for body in (
        protocol.Body,
        protocol.CompletionBody,
        protocol.TokenizeBody,
        protocol.DetokenizeBody,
    ):
        assert body.model_config == {"extra": "forbid", "strict": True, "allow_inf_nan": False}
