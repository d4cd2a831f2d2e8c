"""Writes the reference: the generated parts of docs/settings.md and docs/api/*.md.

    python -m docs.reference

The pages are plain Markdown, so that they can be read wherever the repository can. A generated part
is between two comments, and the rest of a page is written by hand:

    <!-- begin txl_jax.errors -->
    <!-- end txl_jax.errors -->

    pages.py       finds the parts of a page and replaces them
    settings.py    the part `settings`: a table for each group of settings
    modules.py     a part with a module's name: its classes and functions. A part such as
                   `names:config.md`: the public names on that page
    docstrings.py  docstrings as Markdown

Modules are read with `ast` and not imported. So types and defaults look as in the source, with
every Python and jax, and the comments that describe the fields of a class are there too. griffe,
which mkdocstrings uses, does not read comments.
"""
