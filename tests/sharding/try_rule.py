"""Proves the rules of some types of operations: ``python tests/sharding/try_rule.py Cross``.

Goes in: types of operations.  Comes out: for each of their samples, the number of combinations of
specs for which the rule gives a plan, then a line for each that is wrong.  It takes seconds;
``rules_proof_test.py`` does the same for all types.
"""

import importlib
import sys

import towerstrategy


def main(types: list[str]) -> int:
    towerstrategy.split_cpu(8)  # before importing samples, which run operations
    from proof import prove
    from proof_samples import samples
    for cases in ("proof_cases", "proof_cases_algebra", "proof_cases_moves",
                  "proof_cases_rows"):
        importlib.import_module(cases)
    importlib.import_module("towerstrategy.sharding.rules")
    chosen = [sample for sample in samples() if sample.type in types]
    for sample in chosen:
        outcome = prove(sample)
        fails = ", its kernel fails on no rows" if outcome.needs_rows else ""
        print(f"{sample.type}({sample.title}): {outcome.claims} claims{fails}", *outcome.wrong,
              sep="\n  ")
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
