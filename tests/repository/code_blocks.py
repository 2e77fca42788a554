"""Runs the Python code blocks of documents, in a process of its own.

Goes in: paths of Markdown files.  Comes out: exit status 0, or the traceback of the first block
that failed, with the document's own line numbers.  The blocks of one document share their names, as
someone reading from the top has typed them in.  Indented lines behind a block, at once or after a
paragraph that ends with a colon ("It prints:"), have to be the end of what it printed; "..." in
them stands for anything.  Run by ``readme_test.py``, and by the wheel's test against the installed
package.

    python tests/repository/code_blocks.py README.md docs/*.md
"""

import contextlib
import doctest
import io
import pathlib
import re
import sys
import textwrap

PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What follows a block: a paragraph that ends with a colon, or none, then its lines.
SAID_TO_PRINT = re.compile(r"\n+(?:(?=\S)(?:.+\n)*?.*:\n\n)?((?: {4}.*\n|\n(?= {4}))+)")


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a document: the number of the line before each, and its code."""
    return [(text.count("\n", 0, found.start(1)), found[1])
            for found in PYTHON_BLOCK.finditer(text)]


def outputs(text: str) -> list[str | None]:
    """What each block is said to print, None where nothing is said."""
    said = [SAID_TO_PRINT.match(text, found.end()) for found in PYTHON_BLOCK.finditer(text)]
    return [textwrap.dedent(found[1]) if found else None for found in said]


def is_end_of(said: str, printed: str) -> bool:
    """Whether ``printed`` ends as the document says; "..." stands for anything."""
    return doctest.OutputChecker().check_output(
        f"...\n{said.rstrip()}\n", f"\n{printed.rstrip()}\n", doctest.ELLIPSIS)


def run(path: pathlib.Path) -> int:
    """Runs all blocks of one document; how many there were."""
    names = {"__name__": "__main__"}
    text = path.read_text()
    found = blocks(text)
    for (line, code), said in zip(found, outputs(text)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, str(path), "exec"), names)
        if said is not None and not is_end_of(said, printed.getvalue()):
            raise AssertionError(f"{path}:{line}: the block is said to print\n{said}\nbut prints\n"
                                 f"{printed.getvalue()}")
    return len(found)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"{argument}: ran {run(pathlib.Path(argument))} blocks", flush=True)
