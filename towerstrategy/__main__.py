"""``python -m towerstrategy check``: tests results and speed of the towers on this machine.

Goes in: the command line.  Comes out: text, and an exit status.
"""

import sys

from towerstrategy.extras.check import command

if __name__ == "__main__":
    sys.exit(command.main())
