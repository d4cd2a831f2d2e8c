"""The reference of modules as Markdown.

Private names are omitted. The public names of a module, which `import txl_jax` gives, come first,
with "txl_jax." in front.
"""

import ast
import textwrap
from collections.abc import Sequence

from docs.reference import docstrings, source
from docs.reference.docstrings import Part, escape
from docs.reference.public_names import Place, public_names
from docs.reference.source import DEFINITIONS, FUNCTIONS, Field, Function, Module


def list_of_names(module_names: Sequence[str], page: str) -> str:
    """Returns a list of the public names in a page's modules, with links and summaries."""
    items = []
    for module_name in module_names:
        module = source.read(module_name)
        for name, statement in _documented(module_name).items():
            public_name = public_names().get(Place(module_name, name))
            if public_name is None:
                continue
            if isinstance(statement, DEFINITIONS):
                summary = docstrings.summary(_docstring(statement))
            else:
                summary = escape(source.comment(module, statement))
            # The anchor that code hosts and MkDocs make from the heading "txl_jax.NAME".
            anchor = f"txl_jax{public_name.lower()}"
            items.append(f"- [`{public_name}`]({page}#{anchor}): {summary}")
    return "\n".join(items)


def reference(module_name: str) -> str:
    """Returns the reference of a module: its summary, then its classes and functions.

    Raises:
      ValueError: If the module does not exist.
    """
    module = source.read(module_name)
    blocks = [
        f"## `{module_name}`",
        docstrings.summary(_docstring(module.tree)),
        f"Source: [`{module.path}`](../../{module.path})",  # From docs/api.
    ]
    for name, statement in _documented(module_name).items():
        public_name = public_names().get(Place(module_name, name))
        blocks.append(f"### `{name}`" if public_name is None else f"### `txl_jax.{public_name}`")
        if isinstance(statement, ast.ClassDef):
            blocks += _class(module, statement)
        elif isinstance(statement, FUNCTIONS):
            blocks += _function(module, statement)
        else:
            blocks.append(_python(source.lines_of(module, statement)))
            blocks.append(escape(source.comment(module, statement)))
    return "\n\n".join(block for block in blocks if block)


def _documented(module_name: str) -> dict[str, ast.stmt]:
    """Returns the classes, functions and constants in `__all__` of a module, public names first."""
    tree = source.read(module_name).tree
    in_all = source.names_in_all(tree)
    by_name: dict[str, ast.stmt] = {}
    for statement in tree.body:
        for name in source.names_defined(statement):
            is_constant = not isinstance(statement, DEFINITIONS)
            if name.startswith("_") or (is_constant and name not in in_all):
                continue
            by_name[name] = statement

    ordered = {}
    for place in public_names():
        if place.module_name == module_name:
            ordered[place.name] = by_name.pop(place.name)
    return ordered | by_name


def _class(module: Module, node: ast.ClassDef) -> list[str]:
    """Returns the blocks of a class: its signature, docstring, fields and methods."""
    signature = source.signature(module, node)
    fields = source.fields(module, node)
    types = {}
    for field in fields:
        if field.type is not None:
            types[field.name] = field.type

    methods: dict[str, Function] = {}
    init_doc = ""
    for statement in node.body:
        if not isinstance(statement, FUNCTIONS):
            continue
        name = statement.name
        if name == "__init__":
            signature += "\n\n" + textwrap.indent(source.signature(module, statement), "    ")
            types |= source.types(statement)
            init_doc = docstrings.markdown(_docstring(statement), types)
        elif name == "__call__" or not name.startswith("_"):
            # The last of several functions with a name is the one that is not an overload.
            methods[name] = statement

    blocks = [_python(signature), docstrings.markdown(_docstring(node), types), init_doc]
    if fields:
        is_enum = any("Enum" in ast.unparse(base) for base in node.bases)
        blocks.append("Members:" if is_enum else "Fields:")
        blocks.append("\n".join(_item(field) for field in fields))
    for name, method in methods.items():
        blocks.append(f"#### `{node.name}.{name}`")
        blocks += _function(module, method)
    return blocks


def _function(module: Module, node: Function) -> list[str]:
    """Returns the blocks of a function or method: its signature and docstring."""
    signature = source.signature(module, node)
    return [_python(signature), docstrings.markdown(_docstring(node), source.types(node))]


def _item(field: Field) -> str:
    """Returns a field as an item of a list."""
    if field.type is None:
        declaration = f"`{field.name} = {field.default}`"
    elif field.default is None:
        declaration = f"`{field.name}` (`{field.type}`)"
    else:
        declaration = f"`{field.name}` (`{field.type}`, default `{field.default}`)"
    if not field.description:
        return f"- {declaration}"
    return f"- {declaration}: {escape(field.description)}"


def _docstring(node: ast.Module | ast.ClassDef | Function) -> list[Part]:
    """Returns the parts of a docstring, or an empty list without one."""
    return docstrings.parse(ast.get_docstring(node) or "")


def _python(code: str) -> str:
    """Returns Python code in a fence."""
    return f"```python\n{code}\n```"
