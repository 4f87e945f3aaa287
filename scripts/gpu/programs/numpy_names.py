"""Names that NumPy 2.5 dropped and that numba-cuda 0.30 still looks up: without them no kernel of it compiles."""

import numpy

for gone, now in {"row_stack": "vstack", "in1d": "isin", "trapz": "trapezoid"}.items():
    if not hasattr(numpy, gone) and hasattr(numpy, now):
        setattr(numpy, gone, getattr(numpy, now))
