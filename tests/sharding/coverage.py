"""``python -m tests.sharding.coverage``: which operations of Keras have no rule.

Goes in: names of cases of :mod:`coverage_cases` (all but the backbones if none are named), a Keras.
Comes out: a table of the operation types that are done once with all rows for want of a rule: how
often, how many bytes an example has that are gathered for them, and in which cases.

Each case is traced with an open number of rows and propagated; nothing runs.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import sys
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.propagate import Layout, Nested, propagate
from towerstrategy.sharding.rules.registry import plan_of  # noqa: F401, fills the table
from towerstrategy.sharding.spec import REPLICATED, Sharded

from . import coverage_cases


@dataclasses.dataclass
class Missing:
    """What is known of an operation type without a rule.

    Attributes:
      count: how many operations.
      bytes: of an example, so far as static shapes tell, gathered for all of them.
      cases: in which cases.
      example: specs and shapes of one.
    """

    count: int = 0
    bytes: int = 0
    cases: list[str] = dataclasses.field(default_factory=list)
    example: str = ""


def missing_of(case: coverage_cases.Case) -> dict[str, Missing]:
    """The types without a rule in a case."""
    graph = _tf.trace(case.step, list(case.batch), "step")
    inputs = [Sharded(0)] * len(case.batch)
    layout = propagate(graph, [*inputs, *[REPLICATED] * (len(graph.inputs) - len(inputs))])
    found: dict[str, Missing] = collections.defaultdict(Missing)
    _collect(layout, found)
    return found


def _collect(layout: Layout, found: dict[str, Missing]) -> None:
    for operation in layout.fallbacks:
        entry = found[operation.type]
        specs = layout.inputs_of(operation)
        entry.count += 1
        entry.bytes += sum(_bytes(tensor, spec) for tensor, spec in zip(operation.inputs, specs)
                           if isinstance(spec, Sharded))
        entry.example = f"{operation.name}: " + ", ".join(
            f"{spec} {tensor.shape}" for tensor, spec in zip(operation.inputs, specs))
    for plan in layout.plans.values():
        if isinstance(plan, Nested):
            for inner in plan.layouts:
                _collect(inner, found)


def _bytes(tensor: tf.Tensor, spec: Sharded) -> int:
    """Bytes of an example; a size that is not known counts as 1."""
    if tensor.shape.rank is None:
        return tensor.dtype.size
    others = [size or 1 for dim, size in enumerate(tensor.shape) if dim != spec.dim]
    return int(np.prod(others, dtype=np.int64)) * (spec.times or 1) * tensor.dtype.size


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--legacy", action="store_true", help="tf_keras in place of Keras 3")
    parser.add_argument("--names", nargs="*", default=[], help="cases, or how their names begin")
    parser.add_argument("--examples", action="store_true", help="shows an operation of each type")
    given = parser.parse_args(arguments)
    keras = importlib.import_module("tf_keras" if given.legacy else "keras")
    total: dict[str, Missing] = collections.defaultdict(Missing)
    failed = []
    for name, make in coverage_cases.cases(keras).items():
        if not (name.startswith(tuple(given.names)) if given.names
                else not name.startswith("backbone")):
            continue
        try:
            found = missing_of(make())
        except AttributeError as error:
            if "has no attribute" in str(error) and name.split(":")[-1] in str(error) or \
                    name.split(":")[0] in str(error):
                continue  # the other Keras has it
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        except Exception as error:  # shown; the others are of interest
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        for kind, entry in found.items():
            total[kind].count += entry.count
            total[kind].bytes += entry.bytes
            total[kind].cases.append(name)
            total[kind].example = entry.example
    _show(total, failed, given.examples)
    return 0


def _show(total: dict[str, Missing], failed: Sequence[str], examples: bool) -> None:
    print(f"{'operation type':38}{'count':>6}{'bytes a row':>12}  in")
    for kind, entry in sorted(total.items(), key=lambda item: (-item[1].bytes, item[0])):
        print(f"{kind:38}{entry.count:6}{entry.bytes:12}  {' '.join(entry.cases)}")
        if examples:
            print(f"    {entry.example}")
    for line in failed:
        print(f"not traced: {line}")


if __name__ == "__main__":
    sys.exit(main())
