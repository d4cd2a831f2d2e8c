"""Tests of the settings of an estimate, and of the meshes that the table chooses."""

import pytest

from txl_jax.bench import estimate_table
from txl_jax.bench.estimate import Plan
from txl_jax.config import ExperimentConfig, ModelConfig, Remat, TrainConfig
from txl_jax.errors import UserError


def test_a_table_takes_no_tasks():
    with pytest.raises(UserError, match=r"evaluation.*--configs"):
        Plan(topology=("v5e",), configs=("small",), tasks=("evaluation",)).validate()


@pytest.mark.parametrize(
    ("rows", "num_devices", "expected"),
    [
        (8, 4, (1, 4, 1)),  # All on fsdp.
        (32, 32, (2, 16, 1)),  # d_model has 16 columns.
        (2, 4, (1, 2, 2)),  # Fewer rows than devices: the rest shares heads.
    ],
)
def test_meshes_use_all_devices_with_as_many_as_possible_on_fsdp(rows, num_devices, expected):
    config = ExperimentConfig(
        model=ModelConfig(d_model=16, n_head=4, d_head=4, d_inner=32), train=TrainConfig(batch_size=rows)
    )
    found = list(estimate_table.candidate_meshes(config, num_devices))
    assert [(mesh.data, mesh.fsdp, mesh.tensor) for mesh, _ in found] == [expected] * 2
    assert [remat for _, remat in found] == [config.model.remat, Remat.FULL]
    assert not list(estimate_table.candidate_meshes(config, 3))
