"""The vocabulary of names, docstrings, comments and pages: words that are replaced by the field's terms."""

import re

# Metaphors: lines are logged or printed, values are expected, a loop is a scan or an iteration, a network has layers.
METAPHORS = frozenset(
    {"told", "tell", "tells", "say", "says", "said", "saying", "unsaid", "dealt", "watched", "looks", "stand", "stands"}
    | {"walk", "walks", "walked", "house", "houses", "floor", "floors", "room", "rooms"}
)
# A docstring begins with a verb or with its subject, not with a question.
QUESTIONS = frozenset(["What", "Where", "How", "Whose", "That", "Which", "Who", "Why", "When", "Whether"])

# Names of other libraries and of earlier versions, and words of texts that are only data.
_FOREIGN = ("lr_floor", "ast.walk", "os.walk", "He said", "N said it 's a", "U.S. said")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def metaphors(text: str) -> list[str]:
    """Returns the metaphors in prose or code; the parts of `snake_case` and `CamelCase` names are words too."""
    for foreign in _FOREIGN:
        text = text.replace(foreign, "")
    return [word for word in _WORD.findall(text) if word.lower() in METAPHORS]
