"""Lists the programs: `python -m txl_jax`."""

import os
import sys

from txl_jax.data.published import CORPORA, PublishedCorpus, program_of


def _corpora() -> dict[str, str]:
    """Returns the programs that train on published corpora, with their descriptions, from the table of corpora."""
    rows: dict[str, list[PublishedCorpus]] = {}
    for name, row in CORPORA.items():
        rows.setdefault(f"experiments.{program_of(name)}", []).append(row)
    return {
        program: f"{' and '.join(row.title for row in found)}, {found[0].contents}" for program, found in rows.items()
    }


# The one list of programs and their descriptions. A test compares it with the files.
PROGRAMS = {
    "Train, evaluate, score and generate (--mode)": {
        "experiments.quickstart": "a small model on Python's own source text, in minutes",
        "experiments.text": "your own text: bytes, characters, words, pieces, or ready-made ids",
        **_corpora(),
    },
    "Helpers": {
        "experiments.prepare": "read, check and encode a corpus ahead of a run",
        "experiments.convert": "weights from and to other formats (Hugging Face, the original)",
        "experiments.export": "a trained model for other programs (jax.export, StableHLO)",
        "experiments.ensemble": "several runs of one model at once (seeds, learning rates, dropout)",
        "experiments.lm_eval": "a trained model on tasks of lm-evaluation-harness",
        "experiments.report": "runs side by side: a table of settings, scores and speed, learning curves",
        "experiments.serve": "an HTTP server of a trained model: OpenAI's completions, sessions",
    },
    "Tables and figures of the paper": {
        "experiments.paper.ablation": "tables 6, 7 and 10: recurrence, encoding and loss",
        "experiments.paper.recl": "table 8: relative effective context length of several runs",
        "experiments.paper.table9": "table 9: speed beside a sliding window",
        "experiments.paper.context_length": "figure 4: scores by attention length",
        "experiments.paper.attention": "figures 5 to 7: attention weights of a trained run",
        "experiments.paper.continuation": "appendix E: generated continuations beside the text's own",
    },
    "Benchmarks": {
        "experiments.bench.speed": "tokens per second of training, evaluation and generation",
        "experiments.bench.serving": "tokens per second of a server's rows beside one request at a time",
        "experiments.bench.softmax_speed": "time and memory of the adaptive softmax beside a full one",
        "experiments.bench.attention": "attention of a layer: reference, tiles, fused kernels, plain",
        "experiments.bench.estimate": "memory, FLOPs and least time of a configuration on TPUs or GPUs",
    },
    "Other fields": {
        "experiments.examples.document_embeddings": "long documents: embeddings of passages, in constant memory",
        "experiments.examples.memory_policy": "reinforcement learning: a policy that must remember",
        "experiments.examples.speech_encoder": "speech-like input: a Conformer block that attends both ways",
    },
    "Launchers": {
        "launch.local": "several processes of one run on this machine",
        "launch.sweep": "sweeps: grids, random search, tables",
    },
}


def main() -> None:
    """Prints the programs."""
    lines = ["Programs: python -m NAME; python -m NAME --help lists the flags."]
    width = max(len(name) for programs in PROGRAMS.values() for name in programs)
    for heading, programs in PROGRAMS.items():
        lines += ["", f"{heading}:", *(f"  {name:<{width}}  {text}" for name, text in programs.items())]
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # `python -m experiments | head` has read enough.
        # Else Python writes what is left when it ends, and reports the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
