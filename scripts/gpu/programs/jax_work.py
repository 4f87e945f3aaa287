"""JAX: a jitted training step and jitted inference over changing shapes. Knows nothing of ebb."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
import jax
import jax.numpy as jnp
import numpy as np

import works

args = works.options()


def parameters(layers=4, width=1024):
    keys = jax.random.split(jax.random.key(7), layers)
    return [jax.random.normal(key, (width, width), jnp.float32) / width**0.5 for key in keys]


def forward(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return x


def train(steps):
    def loss(weights, x):
        return jnp.mean((forward(weights, x) - jnp.sin(x)) ** 2)

    @jax.jit
    def step(weights, moments, key):
        x = jax.random.normal(key, (512, 1024), jnp.float32)
        value, gradient = jax.value_and_grad(loss)(weights, x)
        moments = [0.9 * m + g for m, g in zip(moments, gradient)]
        return [w - 0.01 * m for w, m in zip(weights, moments)], moments, value

    weights = parameters()
    moments = [jnp.zeros_like(w) for w in weights]
    key, values = jax.random.key(3), []
    for i in steps:
        weights, moments, value = step(weights, moments, jax.random.fold_in(key, i))
        if i % 10 == 0:
            values.append(value)
    return [np.asarray(w) for w in weights] + [np.asarray(jnp.stack(values))]


def infer(steps):
    weights = parameters(8)

    @jax.jit
    def look(total, weights, x):
        return total + jnp.sum(jnp.sort(forward(weights, x), axis=1), axis=0)

    total = jnp.zeros(1024)
    inputs = [jax.random.normal(jax.random.key(i), (64 * (i + 1), 1024)) for i in range(5)]
    for i in steps:
        total = look(total * 0.5, weights, inputs[i % 5])
        if i % 20 == 0:
            host = np.asarray(total)  # out and in again
            total = jnp.asarray(host)
    return [np.asarray(total)]


works.run_all({"train": train, "infer": infer}, args)
