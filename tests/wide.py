"""Products of parameters, of which the default run takes a few cases and ``--wide`` takes all.

Goes in: what ``parameterized.product`` takes, and of how many parameters each combination of values
is to be in the default run: of 1, so that each value is in some case and the other parameters take
turns, or of 2, so that each pair of values of two parameters is.  Comes out: the decorator.
``make test-parity`` runs all cases.
"""

import itertools

from absl.testing import parameterized

ALL = False  # tests/conftest.py says before the tests are read


def product(together=1, /, **parameters):
    """As ``parameterized.product``, of which the default run takes some cases."""
    places = [range(len(values)) for values in parameters.values()]
    chosen = itertools.product(*places) if ALL else few(together, places)
    return parameterized.parameters(*(
        {name: parameters[name][place] for name, place in zip(parameters, case)}
        for case in chosen))


def few(together, places):
    """Cases of the product of ``places`` that have every combination of ``together`` of them."""
    every = list(itertools.product(*places))
    left = set().union(*(_combinations(case, together) for case in every))
    uses = {use: 0 for case in every for use in enumerate(case)}
    taken = []
    while left:
        case = max(every, key=lambda case: (len(left & _combinations(case, together)),
                                            -sum(uses[use] for use in enumerate(case))))
        taken.append(case)
        left -= _combinations(case, together)
        for use in enumerate(case):
            uses[use] += 1
    return sorted(taken)


def _combinations(case, together):
    return set(itertools.combinations(enumerate(case), together))
