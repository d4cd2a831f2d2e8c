"""The ambient mesh: the one that code finds while it is traced (`jax.set_mesh`).

A new thread has none. `bind_mesh` makes a compiled function enter its mesh itself, whoever calls it. Everywhere else
`with use_mesh(mesh):` does. With one device there is nothing to enter, and nothing changes.
"""

import contextlib
import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from txl_jax.errors import UserError


def use_mesh(mesh: Mesh | AbstractMesh | None) -> contextlib.AbstractContextManager[Any]:
    """Enters a mesh of several devices; does nothing with one device or None. Not to be used while tracing."""
    if mesh is None or mesh.size == 1:
        return contextlib.nullcontext()
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def ambient_mesh() -> AbstractMesh | None:
    """Returns the ambient mesh if it has several devices, else None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh is not None and not mesh.empty and mesh.size > 1 else None


def check_ambient_mesh(num_devices: int) -> None:
    """Raises `UserError` if the ambient mesh has another number of devices than a model was built for.

    Without this check a model for several devices would run unconstrained, and silently so, wherever the mesh was
    forgotten.
    """
    mesh = ambient_mesh()
    size = 1 if mesh is None else mesh.size
    if size != num_devices:
        raise UserError(
            f"the model is built for {num_devices} devices (num_devices) and the ambient mesh has {size}; call it "
            "within `with jax.set_mesh(mesh):`, on every thread"
        )


def bind_mesh(mesh: Mesh | AbstractMesh | None, jitted: Any) -> Any:
    """Returns a jitted function that enters `mesh` whenever it is called or lowered; itself with one device or None."""
    return jitted if mesh is None or mesh.size == 1 else _BoundToMesh(mesh, jitted)


@dataclasses.dataclass(frozen=True)
class _BoundToMesh:
    mesh: Mesh | AbstractMesh
    jitted: Any

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with use_mesh(self.mesh):
            return self.jitted(*arguments, **named)

    def lower(self, *arguments: Any, **named: Any) -> Any:
        with use_mesh(self.mesh):
            return self.jitted.lower(*arguments, **named)

    def eval_shape(self, *arguments: Any, **named: Any) -> Any:
        with use_mesh(self.mesh):
            return self.jitted.eval_shape(*arguments, **named)
