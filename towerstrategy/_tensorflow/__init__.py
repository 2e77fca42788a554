"""Every private TensorFlow name that the package uses, by subject.

Goes in: the installed TensorFlow.  Comes out: the functions and classes of the modules below, each
with the reason why no public name will do.  No other module imports ``tensorflow.python``.
``tests/_tensorflow/tensorflow_names_test.py`` looks up each name, so a TensorFlow release that
moves one fails loudly, and here.
"""

from towerstrategy._tensorflow.calling import *
from towerstrategy._tensorflow.data import *
from towerstrategy._tensorflow.errors import *
from towerstrategy._tensorflow.functions import *
from towerstrategy._tensorflow.graphs import *
from towerstrategy._tensorflow.machines import *
from towerstrategy._tensorflow.partitioning import *
from towerstrategy._tensorflow.strategies import *
from towerstrategy._tensorflow.variables import *
from towerstrategy._tensorflow.wrapping import *
