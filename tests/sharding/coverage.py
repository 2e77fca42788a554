"""``python -m tests.sharding.coverage``: which operations of Keras have no rule.

Goes in: names of cases of :mod:`tests.parity` or of its sweep, or how they begin (the whole sweep
if none is named; ``backbones/`` for ``keras.applications``), a Keras.  Comes out: a table of the
operation types that are done once with all rows for want of a rule: how many bytes an example has
that are gathered for the first of them, its name, and in which cases.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import towerstrategy

from ..parity import cases, runner, sweep_cases

BACKBONES = ("MobileNetV3Small", "EfficientNetB0", "ResNet50", "DenseNet121", "ConvNeXtTiny",
             "MobileNetV2", "EfficientNetV2B0", "InceptionV3", "Xception", "NASNetMobile", "VGG16")


def every_case(keras: Any) -> Iterator[tuple[str, cases.Case]]:
    """Cases of parity, items of its sweep (of a loss the reduced ones) and backbones, by name."""
    yield from cases.CASES.items()
    for item in sweep_cases.items(keras):
        if not item.weighted and item.reductions != ("none",):
            case = sweep_cases.case_of(item)
            yield case.name, case
    for name in BACKBONES:
        yield f"backbones/{name}", cases.Case(name, functools.partial(_backbone, name))


def _backbone(name: str, keras: Any) -> cases.Run:
    size = 224 if name == "NASNetMobile" else 96
    model = getattr(keras.applications, name)(
        weights=None, classes=3, input_shape=(size, size, 3))
    return cases.Run(model, cases.numbers(3, size, size, 3), cases.labelled(3)["y"],
                     compile=cases.LABELS, fit={"epochs": 1})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--legacy", action="store_true", help="tf_keras in place of Keras 3")
    parser.add_argument("names", nargs="*", default=["sweep/"],
                        help="cases, or how their names begin")
    given = parser.parse_args(arguments)
    towerstrategy.split_cpu(8)
    keras = runner.keras_module("tf_keras" if given.legacy else "keras")
    found: dict[str, tuple[int, str, list[str]]] = {}
    for name, case in every_case(keras):
        if not name.startswith(tuple(given.names)) or keras.__name__ not in case.keras:
            continue
        strategy = runner.Towers(3).strategy(**case.strategy)
        try:
            runner.train(case, keras, strategy)
        except Exception as error:  # shown; the others are of interest
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        for kind, (operation, size, _) in strategy.extended.done_with_all_rows.items():
            found.setdefault(kind, (size, operation, []))[2].append(name)
    print(f"{'operation type':30}{'bytes an example':>18}  first one, in")
    for kind, (size, operation, names) in sorted(found.items(), key=lambda one: -one[1][0]):
        print(f"{kind:30}{size:18,}  {operation}, {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
