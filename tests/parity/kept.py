"""What earlier runs of the product found, so that hours of it can be run in pieces.

Goes in: the file of ``--keep``.  Comes out: what it holds of this very code, and what is found next
at its end, a line of JSON each, as soon as it is found.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Generic, TypeVar

import keras
import tensorflow as tf
import tf_keras

import towerstrategy

Result = TypeVar("Result", bound=tuple)


class Kept(Generic[Result]):
    """Results by what was asked for, in a file; of another state of the code they do not count."""

    def __init__(self, path: pathlib.Path, make: Callable[..., Result]):
        self._path = path
        self._make = make
        self._state = _state()
        self._found: dict[str, Result] = {}
        if path.exists():
            self._read()

    def get(self, item: tuple) -> Result | None:
        """What was found for ``item``; None if that is still to be run."""
        return self._found.get(_key(item))

    def add(self, item: tuple, result: Result) -> None:
        self._found[_key(item)] = result
        with self._path.open("a") as file:
            file.write(json.dumps([self._state, _key(item), list(result)]) + "\n")

    def _read(self) -> None:
        for line in self._path.read_text().splitlines():
            try:
                state, key, result = json.loads(line)
            except ValueError:  # the line that was being written when a run was killed
                continue
            if state == self._state:
                self._found[key] = self._make(*result)


def _key(item: tuple) -> str:
    return repr(item)


def _state() -> str:
    """A digest of the package, of the cases and of the versions they ran with."""
    digest = hashlib.sha256("".join([tf.__version__, keras.__version__,
                                     tf_keras.__version__]).encode())
    folders = [pathlib.Path(towerstrategy.__file__).parent, pathlib.Path(__file__).parent]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
