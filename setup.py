"""A shim: everything stands in setup.cfg."""

from setuptools import setup

setup()
