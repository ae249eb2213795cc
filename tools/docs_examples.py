"""Examples in docstrings stand in the reference as code: an extension of griffe, which reads the docstrings."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring whose examples, each up to the next empty line, are blocks of code.

    >>> fenced("Add.\\n\\n>>> 1 + 1\\n2\\n\\nThat is all.").count("```")
    2
    """
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0].replace('<BLANKLINE>', '')}\n```", text)


class Examples(griffe.Extension):
    """Fences examples as docstrings are read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that was read."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
