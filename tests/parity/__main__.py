"""Runs ``python -m tests.parity``: every parity case on towers and on one device (:mod:`product`).
"""

import sys

from .product import main

if __name__ == "__main__":
    sys.exit(main())
