"""Which GPUs reach each other, as CUDA's driver says it; here a class stands for the driver."""

import ctypes
from unittest import mock

import tensorflow as tf
from absl.testing import absltest

from towerstrategy.placement import peers


class Driver:
    """Of four devices those reach each other whose handles are 1 apart."""

    def __init__(self, fails=False):
        self.cuInit = lambda flags: 999 if fails else 0

    def cuDeviceGet(self, handle, number):
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_int))[0] = 10 + number
        return 0 if number < 4 else 101

    def cuDeviceCanAccessPeer(self, can, one, other):
        ctypes.cast(can, ctypes.POINTER(ctypes.c_int))[0] = abs(one.value - other.value) == 1
        return 0


class PeersTest(absltest.TestCase):

    def test_of_driver(self):
        """Else rows go by way of a GPU that does not reach where they go; a user may show
        TensorFlow some of the GPUs alone."""
        self.assertEqual(peers.of_driver(Driver(), [0, 1, 3]), {
            0: frozenset([1]), 1: frozenset([0]), 2: frozenset()})

    def test_not_known(self):
        """Else a step ends in an error of CUDA's for want of a hint."""
        self.assertEqual(peers.of_driver(Driver(fails=True), [0, 1]), {})
        self.assertEqual(peers.of_driver(Driver(), [0, 5]), {})
        with mock.patch.object(peers, "DRIVER", "libnone.so"):
            self.assertEqual(peers.reached.__wrapped__(), {})

    def test_parts_of_a_gpu(self):
        """Else TensorFlow's second GPU is taken for CUDA's, of which it is a part of the first."""
        gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
        with mock.patch.object(tf.config, "get_visible_devices", lambda kind: [gpu]), \
                mock.patch.object(tf.config, "list_logical_devices", lambda kind: [gpu, gpu]), \
                mock.patch.object(ctypes, "CDLL", lambda name: Driver()):
            self.assertEqual(peers.reached.__wrapped__(), {})
        with mock.patch.object(tf.config, "get_visible_devices", lambda kind: [gpu]), \
                mock.patch.object(tf.config, "list_logical_devices", lambda kind: [gpu]), \
                mock.patch.object(ctypes, "CDLL", lambda name: Driver()):
            self.assertEqual(peers.reached.__wrapped__(), {0: frozenset()})
