"""The table of rules, a file a family of operations.

Goes in: nothing.  Comes out: :mod:`registry`, filled: each file registers its rules when imported.
"""

from towerstrategy.sharding.rules import contractions as contractions
from towerstrategy.sharding.rules import draws as draws
from towerstrategy.sharding.rules import elementwise as elementwise
from towerstrategy.sharding.rules import gathers as gathers
from towerstrategy.sharding.rules import images as images
from towerstrategy.sharding.rules import linalg as linalg
from towerstrategy.sharding.rules import lists as lists
from towerstrategy.sharding.rules import normalization as normalization
from towerstrategy.sharding.rules import reductions as reductions
from towerstrategy.sharding.rules import scatters as scatters
from towerstrategy.sharding.rules import shapes as shapes
from towerstrategy.sharding.rules import views as views
