"""Every private TensorFlow name that the package uses, by subject.

Goes in: the installed TensorFlow.  Comes out: what the modules below define, for the rest of the
package, which imports nothing of ``tensorflow.python`` itself: each says what no public name does.
``tests/_tensorflow/tensorflow_names_test.py`` looks up what they take from there, so that a
TensorFlow release that moves a name fails loudly and here.
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
