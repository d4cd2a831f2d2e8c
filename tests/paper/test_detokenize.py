"""Tests that words come back as people write them."""

import pytest

from txl_jax.paper.detokenize import detokenize


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("well @-@ known , 1 @,@ 000 miles , 3 @.@ 5 km .", "well-known, 1,000 miles, 3.5 km."),
        ('He said : " It is so ! " and left .', 'He said: "It is so!" and left.'),
        ('" One " and " two "', '"One" and "two"'),
        ("the album 's cover does n't ( in 1999 ) show $ 5", "the album's cover doesn't (in 1999) show $5"),
        ("the fans ' view", "the fans' view"),
        ("1990 \u2013 1995", "1990\u20131995"),
        (" = Robert Boulter = ", "Robert Boulter"),
        (" = = Early life = = ", "Early life"),
        ("x = y + z", "x = y + z"),
        ("Nothing to do here", "Nothing to do here"),
        ("one , two .\n = Three = \nfour ; five", "one, two.\nThree\nfour; five"),
    ],
)
def test_words(words, text):
    assert detokenize(words) == text
