"""Runs the examples in the docstrings, in a process of its own that has four logical CPU devices.

Goes in: the package.  Comes out: one JSON object on the last line, each module's name with how many
examples it has and how many failed; what failed is printed before.  Run by ``doctest_test.py``.
"""

import doctest
import importlib
import json
import pkgutil

import numpy as np
import tensorflow as tf

import towerstrategy

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules() -> list[str]:
    """The package and its public modules."""
    names = [module.name for module in pkgutil.walk_packages(towerstrategy.__path__,
                                                             "towerstrategy.")]
    return ["towerstrategy", *(name for name in sorted(names)
                               if not any(part.startswith("_") for part in name.split(".")))]


def main() -> None:
    """Runs and counts the examples."""
    public = {name: getattr(towerstrategy, name) for name in towerstrategy.__all__}
    towerstrategy.split_cpu(4)
    found = {}
    for name in modules():
        outcome = doctest.testmod(importlib.import_module(name), optionflags=FLAGS,
                                  extraglobs={"np": np, "tf": tf, **public})
        found[name] = [outcome.attempted, outcome.failed]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
