"""Promise 1: training on R towers gives what one device gives for the same global batches.

Goes in: :mod:`cases`, named models with data and settings, and :mod:`runner`, which trains one
with no strategy and on towers.  Comes out: the worst relative difference of each case.  The
``*_test.py`` files hold a core of it for ``make test``; ``python -m tests.parity`` runs the whole
product.
"""
