"""Detokenization: from words with spaces between them to text as people write it."""

import re

# In this order. WikiText writes hyphens, commas and points inside words and numbers as @-@, @,@ and @.@.
_RULES = [
    (re.compile(r" ?@([-,.])@ ?"), r"\1"),
    (re.compile(r" ([.,:;?!%)\]}])(?=\s|$)"), r"\1"),
    (re.compile(r"([(\[{$£€#]) (?=\S)"), r"\1"),
    (re.compile(r" ('(?:s|re|ve|ll|d|m|t)\b)", re.IGNORECASE), r"\1"),
    (re.compile(r" (n't\b)", re.IGNORECASE), r"\1"),
    (re.compile(r"(s) (')(?= )"), r"\1\2"),
    (re.compile(r" ?([\u2013\u2014/]) ?"), r"\1"),  # En dash, em dash, slash.
]
_QUOTED = re.compile(r'" ([^"\n]*?) "')
_HEADING = re.compile(r"^ *((?:= )+)(.+?)((?: =)+) *$", re.MULTILINE)


def detokenize(text: str) -> str:
    r"""Removes the spaces that a tokenizer put in; other text comes back unchanged.

    >>> detokenize('He said : " It is 3 @.@ 5 miles , isn \'t it ? "')
    'He said: "It is 3.5 miles, isn\'t it?"'
    """
    text = _HEADING.sub(_as_heading, text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return _QUOTED.sub(r'"\1"', text)


def _as_heading(match: re.Match[str]) -> str:
    """Returns the title of ` = = Reception = = `: a heading has equally many signs on both sides."""
    before, title, after = match.group(1).count("="), match.group(2), match.group(3).count("=")
    return title if before == after else match.group(0)
