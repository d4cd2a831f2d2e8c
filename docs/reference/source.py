"""Reads modules: signatures, types, and fields with the comments that describe them."""

import ast
import functools
import importlib
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from txl_jax.config.config_tree import setting_of

ROOT = Path(__file__).parents[2]  # Of the repository.

Function = ast.FunctionDef | ast.AsyncFunctionDef
# For `isinstance`.
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (ast.ClassDef, *FUNCTIONS)


class Module(NamedTuple):
    """The source of a module."""

    name: str  # With dots.
    path: str  # From the root of the repository.
    lines: list[str]
    tree: ast.Module


class Field(NamedTuple):
    """A field of a class, or a member of an enum."""

    name: str
    type: str | None  # None without an annotation.
    default: str | None  # None without a default.
    description: str


@functools.cache
def read(module_name: str) -> Module:
    """Reads a module of this repository.

    Raises:
      ValueError: If the module does not exist.
    """
    base = ROOT / module_name.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.exists():
        raise ValueError(f"a part must be named after a module, got {module_name}.")
    text = path.read_text()
    path_in_repository = path.relative_to(ROOT).as_posix()
    return Module(module_name, path_in_repository, text.splitlines(), ast.parse(text))


def names_defined(statement: ast.stmt) -> list[str]:
    """Returns the names that a class, a function or an assignment defines."""
    if isinstance(statement, DEFINITIONS):
        return [statement.name]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def names_in_all(tree: ast.Module) -> list[str]:
    """Returns the names that a module lists in `__all__`."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and "__all__" in names_defined(statement):
            return ast.literal_eval(statement.value)
    return []


def lines_of(module: Module, statement: ast.stmt) -> str:
    """Returns the lines of a statement."""
    return "\n".join(module.lines[statement.lineno - 1 : statement.end_lineno])


def signature(module: Module, node: ast.ClassDef | Function) -> str:
    """Returns the lines of a class or function from its first decorator to its body."""
    first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    body = node.body[0]
    lines = module.lines[first_line - 1 : body.lineno]
    # A method of a protocol may have its body, "...", on the line where its signature ends.
    lines[-1] = lines[-1][: body.col_offset]

    # A body without a docstring may begin with comments.
    while lines[-1].strip() == "" or lines[-1].lstrip().startswith("#"):
        lines.pop()
    # The colon is not shown, nor is a comment for a linter after it.
    lines[-1] = re.sub(r":\s*(#.*)?$", "", lines[-1])
    return _with_values(module, textwrap.dedent("\n".join(lines)))


def _with_values(module: Module, signature: str) -> str:
    """Replaces defaults that are private numbers of the module, such as _BATCH_SIZE."""
    for statement in module.tree.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
            continue
        value = statement.value.value
        for name in names_defined(statement):
            if name.startswith("_") and isinstance(value, int | float):
                signature = re.sub(rf"(?<== ){name}\b", str(value), signature)
    return signature


def types(node: Function) -> dict[str, str]:
    """Returns the types of a function's arguments by name, and of its result as "return"."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    for variadic in (node.args.vararg, node.args.kwarg):
        if variadic is not None:
            arguments.append(variadic)

    by_name = {}
    for argument in arguments:
        if argument.annotation is not None:
            by_name[argument.arg] = _type(argument.annotation)
    if node.returns is not None:
        by_name["return"] = _type(node.returns)
    return by_name


def _type(annotation: ast.expr) -> str:
    """Returns a type as in the source, without quotes around a name that is defined later."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def fields(module: Module, node: ast.ClassDef) -> list[Field]:
    """Returns the fields of a class, or the members of an enum, without private ones."""
    result = []
    for statement in node.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        for name in names_defined(statement):
            if not name.startswith("_"):
                result.append(_field(module, node, name, statement))
    return result


def _field(
    module: Module, node: ast.ClassDef, name: str, statement: ast.Assign | ast.AnnAssign
) -> Field:
    """Returns the field that a statement in a class declares."""
    type_name = _type(statement.annotation) if isinstance(statement, ast.AnnAssign) else None
    default = statement.value
    description = comment(module, statement)
    if isinstance(default, ast.Call):
        function = ast.unparse(default.func)
        # A field of a config is declared by `setting(DEFAULT, HELP)` or one of its variants. The
        # help text may be computed, and nothing in txl_jax.config imports jax.
        if function.endswith("setting"):
            config_class = getattr(importlib.import_module(module.name), node.name)
            description = setting_of(config_class.__dataclass_fields__[name]).help
            default = default.args[0]
        elif function in ("dataclasses.field", "flax.struct.field"):
            default = _default_of_field(default)
    default_text = None if default is None else ast.unparse(default)
    return Field(name, type_name, default_text, description)


def _default_of_field(call: ast.Call) -> ast.expr | None:
    """Returns the default that is passed to `dataclasses.field` or flax's, or None."""
    for keyword in call.keywords:
        if keyword.arg == "default":
            return keyword.value
        if keyword.arg == "default_factory":
            return ast.Call(keyword.value, args=[], keywords=[])
    return None


def comment(module: Module, statement: ast.stmt) -> str:
    """Returns the comment behind an assignment or, without one, the comment above it."""
    assert statement.end_lineno is not None
    last_line = module.lines[statement.end_lineno - 1]
    # Offsets count bytes.
    behind = last_line.encode()[statement.end_col_offset :].decode().strip()
    if behind.startswith("#") and not behind.startswith(("# noqa", "# type:")):
        return behind.removeprefix("#").strip()

    above: list[str] = []
    number = statement.lineno - 2
    while module.lines[number].lstrip().startswith("#"):
        above.insert(0, module.lines[number].strip().removeprefix("#").strip())
        number -= 1
    return " ".join(above)
