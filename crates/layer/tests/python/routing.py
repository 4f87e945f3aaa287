"""Every name, version and flag by both look-ups, against the driver's own answers. The driver's own come from the library
itself, through the C library's own dlsym, which a program gets by asking for it in a table of symbols: here, by comparing symbol names."""

from gpu import *

NAMES = open(os.environ["EBB_TEST_NAMES"]).read().split()
VERSIONS = [10000, 10020, 11000, 11020, 11030, 11040, 11080, 12000, 12010, 12030, 12050, 12080, 12090, 13000, 13010, 13020, 13040, 13050]
first = c_void_p()
status = c_uint()
lines = []
for name in NAMES:
    for version in VERSIONS:
        for flags in (0, 1, 2):
            first.value = None
            status.value = 99
            code = cuda.cuGetProcAddress_v2(name.encode(), byref(first), version, c_uint64(flags), byref(status))
            where = owner(first.value) if first.value else ("-", "-")
            lines.append(f"{name} {version} {flags}: {code} {status.value} {where[1]} {where[0]}")
            again = c_void_p()
            old = cuda.cuGetProcAddress(name.encode(), byref(again), version, c_uint64(flags))
            # The older form fails where the newer one succeeds with a null pointer and a status.
            assert again.value == first.value, (name, version, flags, old, again.value, code, first.value)
            lines[-1] += f" {old}"
print("\n".join(lines))
