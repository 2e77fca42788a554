"""Eight logical CPU devices for all tests of a process, before anything starts TensorFlow."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import towerstrategy

towerstrategy.split_cpu(8)
