//! Copies and fills: one, two and three dimensions, all directions, several at once.

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::helpers::*;

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "copy.there_and_back",
        "Bytes come back as they were sent, over several sizes",
        |t, cu| {
            for bytes in [1, 3, 4096, MIB + 1, 5 * MIB] {
                let address = cu.alloc(bytes);
                let sent = pattern(bytes, 7);
                cu.write(address, &sent);
                t.see(&bytes.to_string(), compare(&cu.read(address, bytes), &sent));
                cu.free(address);
            }
        },
    )
    .fact(&[
        "1: right",
        "3: right",
        "4096: right",
        "1048577: right",
        "5242880: right",
    ]),
    Behaviour::new(
        "copy.between_allocations",
        "A copy inside the card, at offsets",
        |t, cu| {
            let (a, b) = (cu.alloc(3 * MIB), cu.alloc(3 * MIB));
            let sent = pattern(3 * MIB, 1);
            cu.write(a, &sent);
            t.code("copy", cu.cuMemcpyDtoD_v2(plus(b, 5), plus(a, 77), 2 * MIB + 100));
            t.see(
                "bytes",
                compare(&cu.read(plus(b, 5), 2 * MIB + 100), &sent[77..77 + 2 * MIB + 100]),
            );
            cu.free(a);
            cu.free(b);
        },
    )
    .fact(&["copy: SUCCESS", "bytes: right"]),
    Behaviour::new("copy.of_nothing", "A copy of no bytes succeeds", |t, cu| {
        let address = cu.alloc(64);
        let mut host = [0_u8; 4];
        t.code(
            "to the card",
            cu.cuMemcpyHtoD_v2(address, host.as_ptr().cast(), 0),
        );
        t.code(
            "from the card",
            cu.cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), address, 0),
        );
        t.code("inside", cu.cuMemcpyDtoD_v2(address, address, 0));
        t.code(
            "null to null",
            cu.cuMemcpyDtoD_v2(CUdeviceptr::NULL, CUdeviceptr::NULL, 0),
        );
        cu.free(address);
    }),
    Behaviour::new(
        "copy.past_the_end_is_invalid",
        "A copy beyond an allocation is refused and moves nothing",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            cu.write(address, &[1; 16]);
            let host = vec![9_u8; 8 * MIB];
            t.code(
                "to the card",
                cu.cuMemcpyHtoD_v2(address, host.as_ptr().cast(), 8 * MIB),
            );
            t.see("first byte", cu.read(address, 1)[0]);
            cu.free(address);
        },
    ),
    Behaviour::new(
        "copy.null_address_is_invalid",
        "Copies to and from no address are refused",
        |t, cu| {
            let mut host = [0_u8; 16];
            let address = cu.alloc(64);
            t.code(
                "to 0",
                cu.cuMemcpyHtoD_v2(CUdeviceptr::NULL, host.as_ptr().cast(), 16),
            );
            t.code(
                "from 0",
                cu.cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), CUdeviceptr::NULL, 16),
            );
            t.code("inside", cu.cuMemcpyDtoD_v2(address, CUdeviceptr::NULL, 16));
            cu.free(address);
        },
    ),
    Behaviour::new(
        "copy.unified_finds_the_directions",
        "cuMemcpy finds out by itself where both sides are",
        |t, cu| {
            let (a, b) = (cu.alloc(4096), cu.alloc(4096));
            let mut host = std::ptr::null_mut();
            must("cuMemHostAlloc", cu.cuMemHostAlloc(&mut host, 4096, 0));
            cu.write(a, &pattern(4096, 2));
            t.code("inside", cu.cuMemcpy(b, a, 4096));
            t.code("to the host", cu.cuMemcpy(CUdeviceptr(host as u64), b, 4096));
            // SAFETY: the host memory has 4096 bytes, and the copy above is done.
            let seen = unsafe { std::slice::from_raw_parts(host.cast::<u8>(), 4096) };
            t.see("bytes", compare(seen, &pattern(4096, 2)));
            must("cuMemFreeHost", cu.cuMemFreeHost(host));
            cu.free(a);
            cu.free(b);
        },
    )
    .fact(&["inside: SUCCESS", "to the host: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "copy.async_is_in_order",
        "Copies of one stream happen one after the other",
        |t, cu| {
            let stream = cu.stream();
            let (a, b) = (cu.alloc(MIB), cu.alloc(MIB));
            let mut host = std::ptr::null_mut();
            must("cuMemHostAlloc", cu.cuMemHostAlloc(&mut host, MIB, 0));
            must("memset", cu.cuMemsetD8Async(a, 1, MIB, stream));
            t.code("copy", cu.cuMemcpyDtoDAsync_v2(b, a, MIB, stream));
            must("memset", cu.cuMemsetD8Async(a, 2, MIB, stream));
            t.code("back", cu.cuMemcpyDtoHAsync_v2(host, b, MIB, stream));
            t.code("wait", cu.cuStreamSynchronize(stream));
            // SAFETY: the host memory has a MiB, and the stream is done with it.
            let seen = unsafe { std::slice::from_raw_parts(host.cast::<u8>(), MIB) };
            t.see("bytes", compare(seen, &vec![1; MIB]));
            t.see("source", cu.read(a, 1)[0]);
            must("cuMemFreeHost", cu.cuMemFreeHost(host));
            cu.free(a);
            cu.free(b);
        },
    )
    .fact(&[
        "copy: SUCCESS",
        "back: SUCCESS",
        "wait: SUCCESS",
        "bytes: right",
        "source: 2",
    ]),
    Behaviour::new(
        "memset.widths_8_16_32",
        "Fills of all widths write what they should and no more",
        |t, cu| {
            let address = cu.alloc(4096);
            must("memset", cu.cuMemsetD8_v2(address, 0, 4096));
            t.code("8", cu.cuMemsetD8_v2(plus(address, 3), 0xab, 5));
            t.code("16", cu.cuMemsetD16_v2(plus(address, 32), 0x1234, 3));
            t.code("32", cu.cuMemsetD32_v2(plus(address, 64), 0x0102_0304, 2));
            let seen = cu.read(address, 80);
            t.see("8", format!("{:x?}", &seen[2..9]));
            t.see("16", format!("{:x?}", &seen[31..39]));
            t.see("32", format!("{:x?}", &seen[63..73]));
            cu.free(address);
        },
    )
    .fact(&[
        "8: SUCCESS",
        "16: SUCCESS",
        "32: SUCCESS",
        "8: [0, ab, ab, ab, ab, ab, 0]",
        "16: [0, 34, 12, 34, 12, 34, 12, 0]",
        "32: [0, 4, 3, 2, 1, 4, 3, 2, 1, 0]",
    ]),
    Behaviour::new(
        "memset.alignment",
        "Fills of 16 and 32 bits need aligned addresses",
        |t, cu| {
            let address = cu.alloc(4096);
            t.code("16 at 1", cu.cuMemsetD16_v2(plus(address, 1), 0, 1));
            t.code("32 at 1", cu.cuMemsetD32_v2(plus(address, 1), 0, 1));
            t.code("32 at 2", cu.cuMemsetD32_v2(plus(address, 2), 0, 1));
            t.code("8 at 1", cu.cuMemsetD8_v2(plus(address, 1), 0, 1));
            cu.free(address);
        },
    ),
];
