"""One process on both cards through cuda-bindings; the same words on stdin as two_cards.py: check, peer, direct, quit.

    two_cards_driver.py GIB        on each card
"""

import json
import sys

import numpy as np
from driver_work import driver, ok

piece = 16 << 20
ok(driver.cuInit(0))
contexts = [ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(i)))) for i in range(int(ok(driver.cuDeviceGetCount())))]


def on(card):
    ok(driver.cuCtxSetCurrent(contexts[card]))


def value(card, i):
    return 1_000_003 * (i + 1) + card


held = {}
for card in range(len(contexts)):
    on(card)
    held[card] = [ok(driver.cuMemAlloc(piece)) for _ in range(max(2, int(float(sys.argv[1]) * 2**30 / piece)))]
    for i, block in enumerate(held[card]):
        ok(driver.cuMemsetD32(block, value(card, i), piece // 4))
    ok(driver.cuCtxSynchronize())
host = np.zeros(piece // 4, dtype=np.uint32)


def wrong_words(block, want):
    ok(driver.cuMemcpyDtoH(host, block, piece))
    return int((host != np.uint32(want)).sum())


def check():
    found = {}
    for card, blocks in held.items():
        on(card)
        found[card] = sum(wrong_words(block, value(card, i)) for i, block in enumerate(blocks))
    return {"wrong": found}


def peer():
    wrong = 0
    for a in held:
        for b in held:
            if a != b:
                on(b)
                target = ok(driver.cuMemAlloc(piece))
                ok(driver.cuMemcpyPeer(target, contexts[b], held[a][1], contexts[a], piece))
                ok(driver.cuCtxSynchronize())
                wrong += wrong_words(target, value(a, 1))
                ok(driver.cuMemFree(target))
    return {"peer_wrong": wrong}


def direct():
    """With access from card to card: a plain copy whose source is the other's memory."""
    can = int(ok(driver.cuDeviceCanAccessPeer(ok(driver.cuDeviceGet(0)), ok(driver.cuDeviceGet(1)))))
    if not can:
        return {"direct": "no peer access"}
    on(0)
    enabled = driver.cuCtxEnablePeerAccess(contexts[1], 0)[0]
    if int(enabled) not in (0, 704):  # or it is enabled already
        raise RuntimeError(str(enabled))
    target = ok(driver.cuMemAlloc(piece))
    ok(driver.cuMemcpyDtoD(target, held[1][0], piece))
    wrong = wrong_words(target, value(1, 0))
    ok(driver.cuMemFree(target))
    return {"direct_wrong": wrong}


print(json.dumps({"ready": {card: len(blocks) * piece / 2**30 for card, blocks in held.items()}}), flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "quit":
        break
    try:
        answer = {"check": check, "peer": peer, "direct": direct}[word]()
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(answer), flush=True)
