"""``python tests/sharding/try_rule.py Cross``: the proof of one rule, or of some, in seconds.

Goes in: types of operations.  Comes out: a line for each of their samples: how many combinations of
specs the rule claims, then what is wrong.  ``rules_proof_test.py`` does the same for all types.
"""

import importlib
import sys

import towerstrategy


def main(types: list[str]) -> int:
    towerstrategy.split_cpu(8)  # before anything runs, as what writes samples does
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
