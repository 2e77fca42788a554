"""What ``make test`` leaves to ``make test-all``: tests that are marked ``wide``.

What both leave to ``make test-slow`` is marked ``rest``, too: cases of several parameters of which
each pair of values is tried elsewhere, and what differs from another case in its Keras alone.

A whole test, class or file is marked by ``@pytest.mark.wide`` (below ``@parameterized``) or by
``pytestmark``; here are decorators for some of a test's cases.

Goes in: cases, and which of them are wide; for :func:`product`, of how many parameters each
combination of values is to be in the default run, and of how many in the wide one: of 1, so that
each value is in some case and the other parameters take turns, or of 2, so that each pair of values
of two parameters is.  Comes out: the tests, in the same order and of the same names whatever is
chosen of them.
"""

import collections
import functools
import itertools

import pytest
from absl.testing import parameterized

DEFAULT, WIDE, REST = (), (pytest.mark.wide,), (pytest.mark.wide, pytest.mark.rest)


def parameters(*cases, wide, rest=()):
    """As ``parameterized.parameters`` of all, with the marks of ``wide`` and ``rest``."""
    return _marked(parameterized.parameters(*cases, *wide, *rest),
                   [DEFAULT] * len(cases) + [WIDE] * len(wide) + [REST] * len(rest))


def named_parameters(*cases, marks):
    """As ``parameterized.named_parameters``; ``marks`` gives those of a case's parameters."""
    return _marked(parameterized.named_parameters(*cases), [marks(*case[1:]) for case in cases])


def turns(*cases):
    """As ``parameterized.named_parameters``; one of the cases, from test to test of a file another
    one, is not wide."""
    def decorate(test):
        turn = next(_turns[test.__module__]) % len(cases)
        return _marked(parameterized.named_parameters(*cases),
                       [DEFAULT if number == turn else WIDE for number in range(len(cases))]
                       )(test)

    return decorate


_turns = collections.defaultdict(itertools.count)


def product(together=1, in_wide=2, /, **parameters):
    """As ``parameterized.product``, all but some cases being wide, or neither."""
    places = [range(len(values)) for values in parameters.values()]
    chosen, wide = few(together, places), few(in_wide, places)
    every = list(itertools.product(*places))
    return _marked(parameterized.parameters(*(
        {name: parameters[name][place] for name, place in zip(parameters, case)}
        for case in every)), [DEFAULT if case in chosen else WIDE if case in wide else REST
                              for case in every])


def _marked(decorator, marks):
    return lambda test: [functools.reduce(lambda case, mark: mark(case), each, case)
                         for each, case in zip(marks, decorator(test), strict=True)]


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
