//! Copies and fills: one, two and three dimensions, all directions, several at once.

use ebb_abi::*;

use crate::behaviour::{Behaviour, Need};
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
    Behaviour::new("memset.of_nothing", "A fill of no elements succeeds", |t, cu| {
        let address = cu.alloc(64);
        t.code("8", cu.cuMemsetD8_v2(address, 1, 0));
        t.code("32", cu.cuMemsetD32_v2(address, 1, 0));
        t.code("nowhere", cu.cuMemsetD8_v2(CUdeviceptr::NULL, 1, 0));
    }),
    Behaviour::new(
        "memset.past_the_end_is_refused",
        "A fill of an address that nobody has is refused",
        |t, cu| {
            t.code("null", cu.cuMemsetD8_v2(CUdeviceptr::NULL, 1, 16));
            t.code("low", cu.cuMemsetD8_v2(CUdeviceptr(0x1000), 1, 16));
        },
    ),
    Behaviour::new(
        "memset.rows",
        "Two-dimensional fills leave the gaps between the rows alone",
        |t, cu| {
            let address = cu.alloc(4096);
            must("memset", cu.cuMemsetD8_v2(address, 0, 4096));
            t.code("8", cu.cuMemsetD2D8_v2(address, 512, 1, 3, 2));
            t.code("16", cu.cuMemsetD2D16_v2(plus(address, 64), 512, 0x0203, 1, 2));
            t.code(
                "32",
                cu.cuMemsetD2D32_v2(plus(address, 128), 512, 0x0405_0607, 1, 2),
            );
            let seen = cu.read(address, 1024);
            for row in [0, 512] {
                t.see(
                    "row",
                    format!(
                        "{:?} {:?} {:?}",
                        &seen[row..row + 4],
                        &seen[row + 64..row + 67],
                        &seen[row + 128..row + 133]
                    ),
                );
            }
            t.see("sum", seen.iter().map(|byte| u64::from(*byte)).sum::<u64>());
            cu.free(address);
        },
    )
    .fact(&[
        "8: SUCCESS",
        "16: SUCCESS",
        "32: SUCCESS",
        "row: [1, 1, 1, 0] [3, 2, 0] [7, 6, 5, 4, 0]",
        "row: [1, 1, 1, 0] [3, 2, 0] [7, 6, 5, 4, 0]",
        "sum: 60",
    ]),
    Behaviour::new(
        "memset.async_all_widths",
        "Fills in a stream, of all widths and shapes",
        |t, cu| {
            let (address, stream) = (cu.alloc(4096), cu.stream());
            t.code("8", cu.cuMemsetD8Async(address, 1, 4, stream));
            t.code("16", cu.cuMemsetD16Async(plus(address, 4), 0x0202, 2, stream));
            t.code(
                "32",
                cu.cuMemsetD32Async(plus(address, 8), 0x0303_0303, 1, stream),
            );
            t.code(
                "rows of 8",
                cu.cuMemsetD2D8Async(plus(address, 12), 16, 4, 2, 2, stream),
            );
            t.code(
                "rows of 16",
                cu.cuMemsetD2D16Async(plus(address, 14), 16, 0x0505, 1, 2, stream),
            );
            t.code(
                "rows of 32",
                cu.cuMemsetD2D32Async(plus(address, 16), 16, 0x0606_0606, 1, 2, stream),
            );
            must("sync", cu.cuStreamSynchronize(stream));
            t.see("bytes", format!("{:?}", cu.read(address, 20)));
            cu.free(address);
        },
    )
    .fact(&[
        "8: SUCCESS",
        "16: SUCCESS",
        "32: SUCCESS",
        "rows of 8: SUCCESS",
        "rows of 16: SUCCESS",
        "rows of 32: SUCCESS",
        "bytes: [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 6, 6, 6, 6]",
    ]),
    Behaviour::new(
        "memset.whole_allocation",
        "A fill of the whole of an allocation of several chunks",
        |t, cu| {
            let address = cu.alloc(40 * MIB);
            t.code("fill", cu.cuMemsetD32_v2(address, 0x0707_0707, 10 * MIB));
            t.see("first", cu.read(address, 1)[0]);
            t.see("middle", cu.read(plus(address, 20 * MIB + 1), 1)[0]);
            t.see("last", cu.read(plus(address, 40 * MIB - 1), 1)[0]);
            cu.free(address);
        },
    )
    .fact(&["fill: SUCCESS", "first: 7", "middle: 7", "last: 7"]),
    Behaviour::new(
        "memset.does_not_spill_over",
        "A fill up to the end of an allocation leaves its neighbours",
        |t, cu| {
            let all: Vec<CUdeviceptr> = (0..3).map(|_| cu.alloc(512)).collect();
            for address in &all {
                must("memset", cu.cuMemsetD8_v2(*address, 0, 512));
            }
            must("memset", cu.cuMemsetD8_v2(all[1], 9, 512));
            let sums: Vec<u64> = all
                .iter()
                .map(|a| cu.read(*a, 512).iter().map(|b| u64::from(*b)).sum())
                .collect();
            t.see("sums", format!("{sums:?}"));
        },
    )
    .fact(&["sums: [0, 4608, 0]"]),
    Behaviour::new(
        "copy.overlapping_ranges",
        "What the driver says to a copy onto itself, shifted",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            t.code("shifted", cu.cuMemcpyDtoD_v2(plus(address, 4), address, MIB));
            t.code("the same", cu.cuMemcpyDtoD_v2(address, address, MIB));
            cu.free(address);
        },
    ),
    Behaviour::new(
        "copy.across_two_small_allocations",
        "A copy over the border of two small neighbours, as the driver allows in one block",
        |t, cu| {
            let all: Vec<CUdeviceptr> = (0..2).map(|_| cu.alloc(512)).collect();
            let low = all[0].0.min(all[1].0);
            let adjacent = all[0].0.abs_diff(all[1].0) == 512;
            t.see("adjacent", adjacent);
            let mut seen = [0_u8; 1024];
            t.code(
                "copy",
                cu.cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), CUdeviceptr(low), 1024),
            );
        },
    ),
    Behaviour::new(
        "copy.large_pageable",
        "A copy of 24 MiB from ordinary memory, both ways",
        |t, cu| {
            let address = cu.alloc(24 * MIB);
            let sent = pattern(24 * MIB, 11);
            cu.write(address, &sent);
            t.see("bytes", compare(&cu.read(address, 24 * MIB), &sent));
            cu.free(address);
        },
    )
    .fact(&["bytes: right"]),
    Behaviour::new(
        "copy.async_from_ordinary_memory",
        "An asynchronous copy from ordinary memory has taken its bytes when it returns",
        |t, cu| {
            let (address, stream) = (cu.alloc(4096), cu.stream());
            let mut host = pattern(4096, 4);
            t.code(
                "copy",
                cu.cuMemcpyHtoDAsync_v2(address, host.as_ptr().cast(), 4096, stream),
            );
            host.fill(0);
            must("sync", cu.cuStreamSynchronize(stream));
            t.see("bytes", compare(&cu.read(address, 4096), &pattern(4096, 4)));
        },
    )
    .fact(&["copy: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "copy.per_thread_symbols",
        "The _ptds and _ptsz symbols copy",
        |t, cu| {
            let address = cu.alloc(4096);
            let (sent, mut seen) = (pattern(4096, 9), vec![0_u8; 4096]);
            t.code(
                "to the card",
                cu.cuMemcpyHtoD_v2_ptds(address, sent.as_ptr().cast(), 4096),
            );
            t.code(
                "back",
                cu.cuMemcpyDtoHAsync_v2_ptsz(seen.as_mut_ptr().cast(), address, 4096, NO_STREAM),
            );
            t.code("wait", cu.cuStreamSynchronize(CU_STREAM_PER_THREAD));
            t.see("bytes", compare(&seen, &sent));
        },
    )
    .fact(&[
        "to the card: SUCCESS",
        "back: SUCCESS",
        "wait: SUCCESS",
        "bytes: right",
    ]),
    Behaviour::new(
        "copy.peer_to_the_same_device",
        "cuMemcpyPeer with one context on both sides",
        |t, cu| {
            let mut context = CUcontext::NULL;
            must("cuCtxGetCurrent", cu.cuCtxGetCurrent(&mut context));
            let (a, b) = (cu.alloc(MIB), cu.alloc(MIB));
            cu.write(a, &pattern(MIB, 8));
            t.code("copy", cu.cuMemcpyPeer(b, context, a, context, MIB));
            t.see("bytes", compare(&cu.read(b, MIB), &pattern(MIB, 8)));
        },
    )
    .fact(&["copy: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "copy.peer_to_another_device",
        "cuMemcpyPeer and the asynchronous form between two devices",
        |t, cu| {
            let first = cu.primary(0);
            let a = cu.alloc(MIB);
            cu.write(a, &pattern(MIB, 8));
            let second = cu.primary(1);
            let b = cu.alloc(MIB);
            t.code("copy", cu.cuMemcpyPeer(b, second, a, first, MIB));
            t.see("bytes", compare(&cu.read(b, MIB), &pattern(MIB, 8)));
            must("memset", cu.cuMemsetD8_v2(b, 6, MIB));
            cu.sync();
            let stream = cu.stream();
            t.code("back", cu.cuMemcpyPeerAsync(a, first, b, second, MIB, stream));
            must("sync", cu.cuStreamSynchronize(stream));
            cu.primary(0);
            t.see("bytes", compare(&cu.read(a, MIB), &vec![6; MIB]));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&["copy: SUCCESS", "bytes: right", "back: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "copy.peer_back_and_forth",
        "Bytes go eight times to the other device and back, each time changed there",
        |t, cu| {
            let first = cu.primary(0);
            let (a, here) = (cu.alloc(4 * MIB), cu.stream());
            must("memset", cu.cuMemsetD8_v2(a, 0, 4 * MIB));
            cu.sync();
            let second = cu.primary(1);
            let (b, there) = (cu.alloc(4 * MIB), cu.stream());
            let touch = cu.kernel("ebb_touch");
            for _ in 0..8 {
                must("there", cu.cuMemcpyPeerAsync(b, second, a, first, 4 * MIB, there));
                must("change", cu.launch(touch, there, &[b.0, MIB as u64, 1]));
                must("back", cu.cuMemcpyPeerAsync(a, first, b, second, 4 * MIB, there));
                must("wait", cu.cuStreamSynchronize(there));
            }
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(first));
            must("wait", cu.cuStreamSynchronize(here));
            t.see("bytes", compare(&cu.read(a, 4 * MIB), &[8, 0, 0, 0].repeat(MIB)));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&["bytes: right"]),
    Behaviour::new(
        "copy.of_another_devices_memory",
        "cuMemcpy between two devices' allocations without naming them",
        |t, cu| {
            let a = cu.alloc(MIB);
            cu.write(a, &pattern(MIB, 3));
            cu.sync();
            cu.primary(1);
            let b = cu.alloc(MIB);
            t.code("copy", cu.cuMemcpy(b, a, MIB));
            t.see("bytes", compare(&cu.read(b, MIB), &pattern(MIB, 3)));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&["copy: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "copy.of_another_devices_memory_in_a_stream",
        "Copies of another device's allocations stay in the order of their stream",
        |t, cu| {
            let a = cu.alloc(MIB);
            cu.write(a, &pattern(MIB, 3));
            cu.sync();
            cu.primary(1);
            let (b, stream) = (cu.alloc(MIB), cu.stream());
            let mut seen = vec![0_u8; MIB];
            must("memset", cu.cuMemsetD8Async(b, 9, MIB, stream));
            t.code("there", cu.cuMemcpyDtoDAsync_v2(a, b, MIB / 2, stream));
            must("memset", cu.cuMemsetD8Async(b, 0, MIB, stream));
            t.code("back", cu.cuMemcpyAsync(b, a, MIB, stream));
            t.code(
                "to the host",
                cu.cuMemcpyDtoHAsync_v2(seen.as_mut_ptr().cast(), a, MIB, stream),
            );
            must("sync", cu.cuStreamSynchronize(stream));
            let mut wanted = pattern(MIB, 3);
            wanted[..MIB / 2].fill(9);
            t.see("bytes", compare(&cu.read(b, MIB), &wanted));
            t.see("the host's", compare(&seen, &wanted));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&[
        "there: SUCCESS",
        "back: SUCCESS",
        "to the host: SUCCESS",
        "bytes: right",
        "the host's: right",
    ]),
    Behaviour::new(
        "copy.to_and_from_another_device",
        "The host's memory to and from an allocation of a device that is not the current one",
        |t, cu| {
            let (a, b) = (cu.alloc(MIB), cu.alloc(MIB));
            cu.primary(1);
            let _here = cu.alloc(MIB);
            let (sent, mut seen) = (pattern(MIB, 5), vec![0_u8; MIB]);
            t.code("to it", cu.cuMemcpyHtoD_v2(a, sent.as_ptr().cast(), MIB));
            t.code("inside it", cu.cuMemcpyDtoD_v2(b, a, MIB));
            t.code("from it", cu.cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), b, MIB));
            t.see("bytes", compare(&seen, &sent));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&[
        "to it: SUCCESS",
        "inside it: SUCCESS",
        "from it: SUCCESS",
        "bytes: right",
    ]),
    Behaviour::new(
        "copy.rows_of_another_device",
        "Two- and three-dimensional copies between two devices' allocations",
        |t, cu| {
            let a = cu.alloc(4096);
            cu.write(a, &pattern(4096, 2));
            cu.sync();
            cu.primary(1);
            let b = cu.alloc(4096);
            must("memset", cu.cuMemsetD8_v2(b, 0, 4096));
            let rows = CUDA_MEMCPY2D {
                srcMemoryType: CU_MEMORYTYPE_DEVICE,
                srcDevice: a,
                srcPitch: 64,
                srcY: 1,
                dstMemoryType: CU_MEMORYTYPE_UNIFIED,
                dstDevice: b,
                dstPitch: 128,
                dstXInBytes: 4,
                WidthInBytes: 32,
                Height: 8,
                ..CUDA_MEMCPY2D::default()
            };
            t.code("rows", cu.cuMemcpy2D_v2(&rows));
            let planes = CUDA_MEMCPY3D {
                srcMemoryType: CU_MEMORYTYPE_DEVICE,
                srcDevice: a,
                srcPitch: 64,
                srcHeight: 8,
                dstMemoryType: CU_MEMORYTYPE_DEVICE,
                dstDevice: plus(b, 2048),
                dstPitch: 32,
                dstHeight: 4,
                WidthInBytes: 32,
                Height: 4,
                Depth: 2,
                ..CUDA_MEMCPY3D::default()
            };
            t.code("planes", cu.cuMemcpy3D_v2(&planes));
            let (sent, got) = (pattern(4096, 2), cu.read(b, 4096));
            let mut wanted = vec![0_u8; 4096];
            for y in 0..8 {
                wanted[y * 128 + 4..][..32].copy_from_slice(&sent[(y + 1) * 64..][..32]);
                let from = (y / 4 * 8 + y % 4) * 64;
                wanted[2048 + y * 32..][..32].copy_from_slice(&sent[from..][..32]);
            }
            t.see("bytes", compare(&got, &wanted));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&["rows: SUCCESS", "planes: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "copy.batch_of_two_devices",
        "A batch with copies between two devices and inside one",
        |t, cu| {
            let a = cu.alloc(MIB);
            cu.write(a, &pattern(MIB, 7));
            cu.sync();
            cu.primary(1);
            let (b, c, stream) = (cu.alloc(MIB), cu.alloc(MIB), cu.stream());
            cu.write(c, &pattern(MIB, 8));
            let (mut to, mut from) = ([b, plus(b, 4096)], [a, c]);
            let (mut sizes, mut first) = ([4096_usize; 2], 0_usize);
            let mut attributes = CUmemcpyAttributes {
                srcAccessOrder: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
                ..CUmemcpyAttributes::default()
            };
            let copied = cu.cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                2,
                &mut attributes,
                &mut first,
                1,
                stream,
            );
            t.code("batch", copied);
            must("sync", cu.cuStreamSynchronize(stream));
            let wanted = [&pattern(MIB, 7)[..4096], &pattern(MIB, 8)[..4096]].concat();
            t.see("bytes", compare(&cu.read(b, 8192), &wanted));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&["batch: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "copy.gives_no_access",
        "A kernel cannot use another device's memory, although it was copied",
        |t, cu| {
            let a = cu.alloc(MIB);
            cu.write(a, &pattern(MIB, 3));
            cu.sync();
            cu.primary(1);
            let (b, stream) = (cu.alloc(MIB), cu.stream());
            must("copy", cu.cuMemcpyDtoD_v2(b, a, MIB));
            let touch = cu.kernel("ebb_touch");
            must("launch", cu.launch(touch, stream, &[a.0, 16, 1]));
            t.code("wait", cu.cuStreamSynchronize(stream));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&["wait: ILLEGAL_ADDRESS"]),
    Behaviour::new(
        "copy.of_another_devices_mapped_memory",
        "A plain copy of memory that another device's program mapped is refused; one that names the contexts is made",
        |t, cu| {
            let first = cu.primary(0);
            let (address, handle) = (cu.reserve(GRANULE), cu.create(GRANULE));
            cu.map(address, GRANULE, handle);
            cu.write(address, &pattern(64, 4));
            let second = cu.primary(1);
            let b = cu.alloc(MIB);
            t.code("plain", cu.cuMemcpyDtoD_v2(b, address, 64));
            t.code("peer", cu.cuMemcpyPeer(b, second, address, first, 64));
            t.see("bytes", compare(&cu.read(b, 64), &pattern(64, 4)));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&["plain: INVALID_VALUE", "peer: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "copy.rows_to_and_from_the_host",
        "Two-dimensional copies with different pitches and offsets",
        |t, cu| {
            let address = cu.alloc(64 * 64);
            let host = pattern(100 * 20, 5);
            let mut down = CUDA_MEMCPY2D {
                srcMemoryType: CU_MEMORYTYPE_HOST,
                srcHost: host.as_ptr().cast(),
                srcPitch: 100,
                srcXInBytes: 3,
                srcY: 2,
                dstMemoryType: CU_MEMORYTYPE_DEVICE,
                dstDevice: address,
                dstPitch: 64,
                dstXInBytes: 1,
                dstY: 4,
                WidthInBytes: 50,
                Height: 10,
                ..CUDA_MEMCPY2D::default()
            };
            t.code("down", cu.cuMemcpy2D_v2(&down));
            let row = cu.read(plus(address, 5 * 64 + 1), 50);
            t.see("row", compare(&row, &host[3 * 100 + 3..3 * 100 + 53]));
            let mut back = vec![0_u8; 50 * 10];
            let up = CUDA_MEMCPY2D {
                srcMemoryType: CU_MEMORYTYPE_DEVICE,
                srcDevice: address,
                srcPitch: 64,
                srcXInBytes: 1,
                srcY: 4,
                dstMemoryType: CU_MEMORYTYPE_HOST,
                dstHost: back.as_mut_ptr().cast(),
                dstPitch: 50,
                WidthInBytes: 50,
                Height: 10,
                ..CUDA_MEMCPY2D::default()
            };
            t.code("up", cu.cuMemcpy2DUnaligned_v2(&up));
            let wanted: Vec<u8> = (2..12)
                .flat_map(|y| host[y * 100 + 3..y * 100 + 53].to_vec())
                .collect();
            t.see("all", compare(&back, &wanted));
            down.dstPitch = 10;
            t.code("pitch below the width", cu.cuMemcpy2D_v2(&down));
            t.code("no description", cu.cuMemcpy2D_v2(std::ptr::null()));
        },
    )
    .fact(&[
        "down: SUCCESS",
        "row: right",
        "up: SUCCESS",
        "all: right",
        "pitch below the width: INVALID_VALUE",
        "no description: INVALID_VALUE",
    ]),
    Behaviour::new(
        "copy.rows_inside_the_card",
        "A two-dimensional copy in a stream, from one allocation to another",
        |t, cu| {
            let (a, b, stream) = (cu.alloc(8192), cu.alloc(8192), cu.stream());
            cu.write(a, &pattern(8192, 1));
            must("memset", cu.cuMemsetD8_v2(b, 0, 8192));
            let copy = CUDA_MEMCPY2D {
                srcMemoryType: CU_MEMORYTYPE_DEVICE,
                srcDevice: a,
                srcPitch: 1024,
                dstMemoryType: CU_MEMORYTYPE_DEVICE,
                dstDevice: b,
                dstPitch: 512,
                WidthInBytes: 512,
                Height: 8,
                ..CUDA_MEMCPY2D::default()
            };
            cu.sync();
            t.code("copy", cu.cuMemcpy2DAsync_v2(&copy, stream));
            must("sync", cu.cuStreamSynchronize(stream));
            let wanted: Vec<u8> = (0..8)
                .flat_map(|y| pattern(8192, 1)[y * 1024..y * 1024 + 512].to_vec())
                .collect();
            t.see("bytes", compare(&cu.read(b, 4096), &wanted));
        },
    )
    .fact(&["copy: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "copy.boxes",
        "A three-dimensional copy with offsets, to the card and back",
        |t, cu| {
            let address = cu.alloc(16 * 8 * 4);
            must("memset", cu.cuMemsetD8_v2(address, 0, 16 * 8 * 4));
            let host = pattern(10 * 6 * 3, 2);
            let down = CUDA_MEMCPY3D {
                srcMemoryType: CU_MEMORYTYPE_HOST,
                srcHost: host.as_ptr().cast(),
                srcPitch: 10,
                srcHeight: 6,
                dstMemoryType: CU_MEMORYTYPE_DEVICE,
                dstDevice: address,
                dstPitch: 16,
                dstHeight: 8,
                dstXInBytes: 2,
                dstY: 1,
                dstZ: 1,
                WidthInBytes: 10,
                Height: 6,
                Depth: 3,
                ..CUDA_MEMCPY3D::default()
            };
            t.code("down", cu.cuMemcpy3D_v2(&down));
            let whole = cu.read(address, 16 * 8 * 4);
            let right = (0..3).all(|z| {
                (0..6).all(|y| {
                    let at = ((z + 1) * 8 + y + 1) * 16 + 2;
                    whole[at..at + 10] == host[(z * 6 + y) * 10..(z * 6 + y + 1) * 10]
                })
            });
            t.see("box", right);
            t.see(
                "around it",
                whole[..(8 + 1) * 16 + 2].iter().all(|byte| *byte == 0),
            );
            let empty = CUDA_MEMCPY3D { Depth: 0, ..down };
            t.code("nothing", cu.cuMemcpy3D_v2(&empty));
            t.code("in a stream", cu.cuMemcpy3DAsync_v2(&down, cu.stream()));
            cu.sync();
        },
    ),
    Behaviour::new(
        "copy.several_at_once",
        "cuMemcpyBatchAsync does all its copies in the stream",
        |t, cu| {
            let (a, b, stream) = (cu.alloc(4096), cu.alloc(4096), cu.stream());
            cu.write(a, &pattern(4096, 6));
            must("memset", cu.cuMemsetD8_v2(b, 0, 4096));
            cu.sync();
            let mut from = [a, plus(a, 1024), plus(a, 2000)];
            let mut to = [plus(b, 512), b, plus(b, 3000)];
            let mut sizes = [512_usize, 256, 100];
            let mut attributes = CUmemcpyAttributes {
                srcAccessOrder: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
                ..CUmemcpyAttributes::default()
            };
            let mut first = [0_usize];
            let code = cu.cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                3,
                &mut attributes,
                first.as_mut_ptr(),
                1,
                stream,
            );
            t.code("copy", code);
            must("sync", cu.cuStreamSynchronize(stream));
            let (seen, sent) = (cu.read(b, 4096), pattern(4096, 6));
            t.see("first", compare(&seen[512..1024], &sent[..512]));
            t.see("second", compare(&seen[..256], &sent[1024..1280]));
            t.see("third", compare(&seen[3000..3100], &sent[2000..2100]));
        },
    ),
    Behaviour::new(
        "copy.needs_a_context",
        "Without a current context nothing is copied",
        |t, cu| {
            let address = cu.alloc(4096);
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(CUcontext::NULL));
            let mut host = [0_u8; 4];
            t.code("from", cu.cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), address, 4));
            t.code("to", cu.cuMemcpyHtoD_v2(address, host.as_ptr().cast(), 4));
            t.code("fill", cu.cuMemsetD8_v2(address, 0, 4));
        },
    )
    .fact(&[
        "from: INVALID_CONTEXT",
        "to: INVALID_CONTEXT",
        "fill: INVALID_CONTEXT",
    ]),
    Behaviour::new(
        "copy.between_kinds_of_memory",
        "From plain to stream-ordered to mapped memory and back",
        |t, cu| {
            let plain = cu.alloc(MIB);
            let (mapped, handle) = (cu.reserve(GRANULE), cu.create(GRANULE));
            cu.map(mapped, GRANULE, handle);
            let mut ordered = CUdeviceptr::NULL;
            must("alloc", cu.cuMemAllocAsync(&mut ordered, MIB, NO_STREAM));
            cu.write(plain, &pattern(MIB, 12));
            t.code("one", cu.cuMemcpyDtoD_v2(ordered, plain, MIB));
            t.code("two", cu.cuMemcpyDtoD_v2(mapped, ordered, MIB));
            must("memset", cu.cuMemsetD8_v2(plain, 0, MIB));
            t.code("three", cu.cuMemcpyDtoD_v2(plain, mapped, MIB));
            t.see("bytes", compare(&cu.read(plain, MIB), &pattern(MIB, 12)));
        },
    )
    .fact(&["one: SUCCESS", "two: SUCCESS", "three: SUCCESS", "bytes: right"]),
];
