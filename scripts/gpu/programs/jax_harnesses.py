"""JAX's own collection of primitives (it ships in its wheel): each is jitted and run; a line of JSON with its SHA-256.

    jax_harnesses.py PART PARTS [SECONDS]

Every PARTS-th from PART on, as many as fit into the time; they are spread over all groups.
"""

import hashlib
import json
import os
import sys
import time

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
part, parts = int(sys.argv[1]), int(sys.argv[2])
seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 60
sys.argv[1:] = []
import jax
import numpy as np
from jax._src.internal_test_util import test_harnesses

began = time.monotonic()
order = sorted(test_harnesses.all_harnesses, key=lambda h: hashlib.sha256(h.fullname.encode()).hexdigest())
for harness in order[part::parts]:
    if time.monotonic() - began > seconds:
        print(json.dumps({"cut": True}), flush=True)
        break
    line = {"test": harness.fullname}
    try:
        if not harness.filter(jax.default_backend()):
            line["result"] = "skipped"
        else:
            rng = np.random.RandomState(12)
            result = jax.jit(harness.dyn_fun)(*harness.dyn_args_maker(rng))
            sha = hashlib.sha256()
            for leaf in jax.tree.leaves(result):
                if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                    leaf = jax.random.key_data(leaf)
                sha.update(np.asarray(leaf).tobytes())
            line["result"] = sha.hexdigest()[:16]
    except Exception as error:
        line["result"] = f"error {type(error).__name__}"
        line["why"] = str(error)[:200]
    print(json.dumps(line), flush=True)
