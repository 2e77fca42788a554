"""``python -m tests.parity`` runs all parity cases on towers and one device: :mod:`product`."""

import sys

from .product import main

if __name__ == "__main__":
    sys.exit(main())
