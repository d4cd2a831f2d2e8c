"""Tests that the generated pages of the reference are up to date, and of the generator."""

import doctest
import re

import pytest

import txl_jax
from docs.reference import docstrings, modules, pages, source
from docs.reference.public_names import Place, place_of, public_names
from support import ROOT
from txl_jax.config import ExperimentConfig
from txl_jax.config.config_tree import leaves

API = ROOT / "docs" / "api"
# Packages whose modules all have a part on a page.
WHOLE_PACKAGES = ["config", "evaluation", "inference", "interop", "modules/positions", "sharding"]

SAMPLE = '''
"""Sums of numbers.

What follows is not shown.
"""

_LIMIT = 8


@dataclasses.dataclass(frozen=True)
class Total(Generic[T]):
    """A sum.

    Raises:
      ValueError: If the numbers are missing, or one is
        *NaN*.
    """

    value: float  # The sum.
    # Their number,
    # at least 1.
    count: int = 1
    parts: dict[str, "Total"] = dataclasses.field(default_factory=dict, repr=False)
    weight: float = dataclasses.field(repr=False)
    _hidden: int = 0

    @property
    def mean(self) -> float:
        """The mean."""
        return self.value / self.count

    def _private(self):
        pass


class Kind(enum.Enum):
    """A kind."""

    INT = "int"  # Whole numbers.


@typing.overload
def total(*numbers: float) -> Total: ...


def total(*numbers: Any, limit: int = _LIMIT) -> "Total":  # noqa: X
    """Adds <numbers> up.

    >>> total(1, 2).value
    3

        drawn
          so

    Args:
      *numbers: Numbers, or
        strings of them.

    Returns:
      The sum.
    """
'''

REFERENCE = """
## `sample`

Sums of numbers.

Source: [`sample.py`](../../sample.py)

### `Total`

```python
@dataclasses.dataclass(frozen=True)
class Total(Generic[T])
```

A sum.

Raises:

- `ValueError`: If the numbers are missing, or one is \\*NaN\\*.

Fields:

- `value` (`float`): The sum.
- `count` (`int`, default `1`): Their number, at least 1.
- `parts` (`dict[str, 'Total']`, default `dict()`)
- `weight` (`float`)

#### `Total.mean`

```python
@property
def mean(self) -> float
```

The mean.

### `Kind`

```python
class Kind(enum.Enum)
```

A kind.

Members:

- `INT = 'int'`: Whole numbers.

### `total`

```python
def total(*numbers: Any, limit: int = 8) -> "Total"
```

Adds &lt;numbers> up.

```pycon
>>> total(1, 2).value
3
```

```text
drawn
  so
```

Args:

- `*numbers` (`Any`): Numbers, or strings of them.

Returns (`Total`): The sum.
"""


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.name)
def test_a_page_is_up_to_date(path):
    text = path.read_text()
    is_current = pages.filled(text) == text
    assert is_current, f"{path.name} is out of date. Write it with: python -m docs.reference"


def test_the_page_of_settings_has_all_of_them():
    text = (ROOT / "docs" / "settings.md").read_text()
    rows = {}
    pattern = r"^\| `(?:--)?([\w.]+)`.* \| (.*) \| .* \| (.*) \|$"
    for name, default, values in re.findall(pattern, text, re.MULTILINE):
        assert name not in rows, f"{name} has two rows"
        rows[name] = (default, values)

    assert rows.keys() == {leaf.name for leaf in leaves(ExperimentConfig)}
    assert rows["model.n_layer"] == ("12", "int at least 1")
    assert rows["train.same_length"] == ("false", "bool")
    assert rows["model.tie_projs"] == ("empty", "list of bool")
    assert rows["average.ema_decay"] == ("none", "float above 0 and below 1 or none")
    newlines = ("keep", "keep, drop; only if `data.tokenizer.kind` is byte")
    assert rows["data.tokenizer.newlines"] == newlines


def test_every_public_name_has_a_link_to_its_heading():
    """Two equal headings on a page would have other anchors."""
    index = (API / "index.md").read_text()
    links = re.findall(r"^- \[`(\w+)`\]\((\w+\.md)#txl_jax(\w+)\): \S", index, re.MULTILINE)
    linked_names = [name for name, _, _ in links]
    assert sorted(linked_names) == sorted(set(txl_jax.__all__) - {"__version__"})
    for name, page, anchor in links:
        headings = re.findall(r"^#+ (.*)$", (API / page).read_text(), re.MULTILINE)
        assert headings.count(f"`txl_jax.{name}`") == 1, name
        assert anchor == name.lower()


def test_every_module_of_a_package_has_a_part():
    parts = set()
    for path in API.glob("*.md"):
        parts.update(match["name"] for match in pages.PART.finditer(path.read_text()))
    for package in WHOLE_PACKAGES:
        for path in (ROOT / "txl_jax" / package).glob("*.py"):
            module_name = f"txl_jax/{package}/{path.stem}".replace("/", ".")
            assert path.stem == "__init__" or module_name in parts, module_name


def test_a_public_name_is_found_where_it_is_defined():
    assert public_names()[Place("txl_jax.memory", "reset")] == "reset_memory"
    assert public_names()[Place("txl_jax.memory", "init")] == "init_memory"
    assert place_of("txl_jax", "ModelConfig") == Place("txl_jax.config.model", "ModelConfig")
    assert place_of("txl_jax", "sinusoids").module_name == "txl_jax.ops.attention.distances"
    assert place_of("txl_jax", "importlib") is None


def test_a_module_becomes_markdown(monkeypatch, tmp_path):
    public_names()  # Is kept, so that these modules are not looked for in tmp_path.
    monkeypatch.setattr(source, "ROOT", tmp_path)
    (tmp_path / "sample.py").write_text(SAMPLE.lstrip())
    assert modules.reference("sample") == REFERENCE.strip()


def markdown(text, **types):
    return docstrings.markdown(docstrings.parse(text), types)


def test_text_after_a_section_stays_after_it():
    text = "Doubles.\n\nArgs:\n  x: A number.\n\n>>> double(1)\n2\n\nReturns:\n  Twice x.\n\nLast."
    blocks = markdown(text).split("\n\n")
    assert blocks == [
        *("Doubles.", "Args:", "- `x`: A number.", "```pycon\n>>> double(1)\n2\n```"),
        *("Returns: Twice x.", "Last."),
    ]


def test_a_line_of_a_paragraph_is_not_an_item_or_a_quotation():
    assert markdown("p\n- q\n> 3") == "p\n\\- q\n\\> 3"
    assert markdown("- an item\n- another") == "- an item\n- another"


def test_arguments_with_one_entry_have_one_type():
    text = "Adds.\n\nArgs:\n  x, *y: Numbers."
    assert "- `x`, `*y` (`int`): Numbers." in markdown(text, x="int", y="int")
    with pytest.raises(ValueError, match="x, "):
        markdown(text, x="int", y="float")


def test_a_drawing_with_blank_lines_has_one_fence():
    text = "Draws.\n\n    a\n      b\n\n    c\n\nThe end."
    assert markdown(text) == "Draws.\n\n```text\na\n  b\n\nc\n```\n\nThe end."


def test_code_has_at_most_100_columns():
    for path in API.glob("*.md"):
        for block in re.findall(r"^```\w+\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
            assert max(map(len, block.splitlines())) <= 100, block


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("<!-- begin txl_jax.errors -->\n", id="no end"),
        pytest.param("<!-- begin settings -->\n<!-- end setting -->", id="another end"),
        pytest.param("<!-- begin txl_jax.none -->\n<!-- end txl_jax.none -->", id="no module"),
    ],
)
def test_a_part_that_cannot_be_made_is_an_error(page):
    with pytest.raises(ValueError, match="part"):
        pages.filled(page)


def test_examples_in_docstrings():
    assert doctest.testmod(docstrings).attempted == 3
    assert doctest.testmod(docstrings).failed == 0
