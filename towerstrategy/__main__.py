"""``python -m towerstrategy check``: does it work, and does it pay, on this machine?

Goes in: the command line.  Comes out: text, and an exit status.
"""

import sys

from towerstrategy.extras.check import command

if __name__ == "__main__":
    sys.exit(command.main())
