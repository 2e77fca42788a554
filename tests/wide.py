"""Decorators that mark some cases of a parameterized test ``wide``, or ``wide`` and ``rest``.

``make test`` runs the tests without these marks, ``make test-all`` those that are ``wide``, and
``make test-slow`` those that are also ``rest``: combinations of several parameters, each pair of
whose values is tested elsewhere, and cases that repeat another one in the other Keras.

A whole test, class or file is marked by ``@pytest.mark.wide`` (below ``@parameterized``) or by
``pytestmark``.

Goes in: cases, and which of them are wide.  :func:`product` chooses them: the default run has every
combination of values of 1 parameter (each value occurs, while the other parameters vary), the wide
run those of 2 parameters (each pair of values occurs), or as its arguments say.  Comes out: the
tests, whose order and names do not depend on the marks.
"""

import collections
import functools
import itertools

import pytest
from absl.testing import parameterized

DEFAULT, WIDE, REST = (), (pytest.mark.wide,), (pytest.mark.wide, pytest.mark.rest)


def parameters(*cases, wide, rest=()):
    """``parameterized.parameters`` for all cases; those in ``wide`` and ``rest`` are marked."""
    return _marked(parameterized.parameters(*cases, *wide, *rest),
                   [DEFAULT] * len(cases) + [WIDE] * len(wide) + [REST] * len(rest))


def some(every, *cases):
    """``parameterized.parameters``; of so many cases one is not wide."""
    return _marked(parameterized.parameters(*cases), [
        WIDE if number % every else DEFAULT for number in range(len(cases))])


def named_parameters(*cases, marks):
    """``parameterized.named_parameters``; ``marks`` maps a case's parameters to its marks."""
    return _marked(parameterized.named_parameters(*cases), [marks(*case[1:]) for case in cases])


def turns(*cases):
    """``parameterized.named_parameters``; one case is not wide, in each test of a file another."""
    def decorate(test):
        turn = next(_turns[test.__module__]) % len(cases)
        return _marked(parameterized.named_parameters(*cases),
                       [DEFAULT if number == turn else WIDE for number in range(len(cases))]
                       )(test)

    return decorate


_turns = collections.defaultdict(itertools.count)


def product(in_default=1, in_wide=2, /, **parameters):
    """``parameterized.product``, with marks.

    Unmarked cases have every combination of values of ``in_default`` parameters, wide ones those of
    ``in_wide`` parameters.  All others are marked ``rest``.
    """
    choices = [range(len(values)) for values in parameters.values()]
    default, wide = few(in_default, choices), few(in_wide, choices)
    cases = list(itertools.product(*choices))
    return _marked(parameterized.parameters(*(
        {name: parameters[name][index] for name, index in zip(parameters, case)}
        for case in cases)), [DEFAULT if case in default else WIDE if case in wide else REST
                              for case in cases])


def _marked(decorator, marks):
    return lambda test: [functools.reduce(lambda case, mark: mark(case), of_case, case)
                         for of_case, case in zip(marks, decorator(test), strict=True)]


def few(count, choices):
    """Few cases, as indices in ``choices``, with every combination of values of ``count`` of them.
    """
    cases = list(itertools.product(*choices))
    missing = set().union(*(_combinations(case, count) for case in cases))
    uses = {value: 0 for case in cases for value in enumerate(case)}
    chosen = []
    while missing:  # greedily: the most missing combinations, then the least used values
        case = max(cases, key=lambda case: (len(missing & _combinations(case, count)),
                                            -sum(uses[value] for value in enumerate(case))))
        chosen.append(case)
        missing -= _combinations(case, count)
        for value in enumerate(case):
            uses[value] += 1
    return sorted(chosen)


def _combinations(case, count):
    return set(itertools.combinations(enumerate(case), count))
