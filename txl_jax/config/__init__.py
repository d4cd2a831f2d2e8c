"""Settings of a run: a tree of frozen dataclasses. `ExperimentConfig` is its root.

Nothing here imports jax. Each setting is declared once, by `setting` of
`txl_jax.config.config_tree`, which also reads and changes the tree by dotted names.
"""

from txl_jax.config import data, evaluation, experiment, model, training
from txl_jax.config.data import *
from txl_jax.config.evaluation import *
from txl_jax.config.experiment import *
from txl_jax.config.model import *
from txl_jax.config.training import *

__all__ = []
__all__ += data.__all__ + evaluation.__all__ + experiment.__all__ + model.__all__ + training.__all__
