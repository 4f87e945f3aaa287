"""Prints the folder of numba-cuda's tests. Apart, because finding it imports the package."""

import os

import numba.cuda.tests

print(os.path.dirname(numba.cuda.tests.__file__))
