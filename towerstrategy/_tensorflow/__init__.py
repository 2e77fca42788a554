"""Every private TensorFlow name that the package uses, by subject.

Goes in: the installed TensorFlow.  Comes out: what the modules below define, for the rest of the
package, which imports nothing of ``tensorflow.python`` itself.  Their :data:`PRIVATE_NAMES` say
where names stand upstream (``module:names``) and what for no public name does;
``tests/_tensorflow/tensorflow_names_test.py`` looks each up, so that a TensorFlow release that
moves one fails loudly and here.
"""

from towerstrategy._tensorflow.compiling import *
from towerstrategy._tensorflow.data import *
from towerstrategy._tensorflow.devices import *
from towerstrategy._tensorflow.errors import *
from towerstrategy._tensorflow.functions import *
from towerstrategy._tensorflow.graphs import *
from towerstrategy._tensorflow.importing import *
from towerstrategy._tensorflow.losses import *
from towerstrategy._tensorflow.machines import *
from towerstrategy._tensorflow.partitioning import *
from towerstrategy._tensorflow.seeds import *
from towerstrategy._tensorflow.strategies import *
from towerstrategy._tensorflow.threads import *
from towerstrategy._tensorflow.values import *
from towerstrategy._tensorflow.variables import *
from towerstrategy._tensorflow.wrapping import *

# The functions of TensorFlow that the package replaces.
PLACES = (AVERAGE, REGULARIZATION, KEYS, RECORD, CAPTURE)
PRIVATE_NAMES = {
    f"tensorflow.{place}:{name}": why for module in list(globals().values())
    for entry, why in getattr(module, "PRIVATE_NAMES", {}).items()
    for place, _, names in [entry.partition(":")] for name in names.split()}
