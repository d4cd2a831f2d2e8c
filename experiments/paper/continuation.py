"""The model's continuations of a text beside the text's own: appendix E of the paper.

    python -m experiments.paper.continuation --workdir=runs/wt103 --generate.length=1000
    python -m experiments.paper.continuation --workdir=runs/wt103 --starts=1000,52000 --context=500

It writes a markdown file, --out: for each start the context, the model's continuation, sampled as
--generate.* sets (top-k with k = 40, 500 tokens), and the text's own. Words are detokenized
(WikiText's @-@, @,@ and spaces before commas are removed).
"""

from txl_jax.cli.studies import run_study
from txl_jax.paper.continuation import Plan, run

if __name__ == "__main__":
    run_study(Plan, run, groups=("data", "mesh", "eval", "generate"))
