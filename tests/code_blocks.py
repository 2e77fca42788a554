"""Runs the Python code blocks of documents, in a process of its own.

Goes in: paths of Markdown files.  Comes out: exit status 0, or the traceback of the first block
that failed, with the document's own line numbers.  The blocks of one document share their names, as
someone reading from the top has typed them in.  Run by ``readme_test.py``, and by the wheel's test
against the installed package.

    python tests/code_blocks.py README.md docs/*.md
"""

import pathlib
import re
import sys

PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a document: the number of the line before each, and its code."""
    return [(text.count("\n", 0, found.start(1)), found[1])
            for found in PYTHON_BLOCK.finditer(text)]


def run(path: pathlib.Path) -> int:
    """Runs all blocks of one document; how many there were."""
    names = {"__name__": "__main__"}
    found = blocks(path.read_text())
    for line, code in found:
        exec(compile("\n" * line + code, str(path), "exec"), names)
    return len(found)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"{argument}: ran {run(pathlib.Path(argument))} blocks", flush=True)
