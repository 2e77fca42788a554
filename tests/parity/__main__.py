"""``python -m tests.parity``: see :mod:`product`."""

import sys

from .product import main

if __name__ == "__main__":
    sys.exit(main())
