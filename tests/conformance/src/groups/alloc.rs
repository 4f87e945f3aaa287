//! Allocation and release: `cuMemAlloc`, `cuMemAllocPitch`, `cuMemFree`.

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::helpers::*;

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "alloc.zero_size_is_invalid",
        "An allocation of no bytes is refused",
        |t, cu| {
            let mut address = CUdeviceptr(7);
            t.code("alloc 0", cu.cuMemAlloc_v2(&mut address, 0));
        },
    )
    .fact(&["alloc 0: INVALID_VALUE"]),
    Behaviour::new(
        "alloc.null_place_is_invalid",
        "There must be a place for the address",
        |t, cu| {
            t.code("alloc", cu.cuMemAlloc_v2(std::ptr::null_mut(), 64));
            t.code("alloc 0", cu.cuMemAlloc_v2(std::ptr::null_mut(), 0));
        },
    )
    .fact(&["alloc: INVALID_VALUE", "alloc 0: INVALID_VALUE"]),
    Behaviour::new(
        "alloc.one_byte",
        "One byte can be had, written and read",
        |t, cu| {
            let address = cu.alloc(1);
            cu.write(address, &[0x5a]);
            t.see("byte", cu.read(address, 1)[0]);
            t.code("free", cu.cuMemFree_v2(address));
        },
    )
    .fact(&["byte: 90", "free: SUCCESS"]),
    Behaviour::new(
        "alloc.small_ones_are_512_bytes_apart",
        "Addresses of small allocations are multiples of 512",
        |t, cu| {
            let small: Vec<CUdeviceptr> = (0..4).map(|_| cu.alloc(100)).collect();
            t.see("aligned", small.iter().all(|a| a.0 % 512 == 0));
            t.see("apart", small[1].0.abs_diff(small[0].0) % 512);
            small.into_iter().for_each(|a| cu.free(a));
        },
    )
    .fact(&["aligned: true", "apart: 0"]),
    Behaviour::new(
        "alloc.sizes_around_a_granule",
        "Sizes around 2 MiB can be had, and their last bytes be used",
        |t, cu| {
            for bytes in [GRANULE - 1, GRANULE, GRANULE + 1, 3 * GRANULE - 4096, 16 * MIB] {
                let address = cu.alloc(bytes);
                let last = plus(address, bytes - 4);
                cu.write(last, &[1, 2, 3, 4]);
                t.see(&bytes.to_string(), format!("{:?}", cu.read(last, 4)));
                cu.free(address);
            }
        },
    ),
    Behaviour::new(
        "alloc.range_is_the_size_asked_for",
        "The range of an allocation is what was asked for, not what was rounded to",
        |t, cu| {
            for bytes in [1, 100, 4096, MIB + 12, GRANULE, GRANULE + 1, 5 * MIB + 3] {
                let address = cu.alloc(bytes);
                t.see(&bytes.to_string(), either(cu.range(plus(address, bytes / 2))));
                cu.free(address);
            }
        },
    )
    .fact(&[
        "1: (0, 1)",
        "100: (50, 100)",
        "4096: (2048, 4096)",
        "1048588: (524294, 1048588)",
        "2097152: (1048576, 2097152)",
        "2097153: (1048576, 2097153)",
        "5242883: (2621441, 5242883)",
    ]),
    Behaviour::new(
        "alloc.more_than_the_card_is_out_of_memory",
        "More than the card has is out of memory, and harms nothing",
        |t, cu| {
            let (mut free, mut total, mut address) = (0, 0, CUdeviceptr::NULL);
            must("cuMemGetInfo", cu.cuMemGetInfo_v2(&mut free, &mut total));
            t.code("twice the card", cu.cuMemAlloc_v2(&mut address, total * 2));
            t.code("2^48", cu.cuMemAlloc_v2(&mut address, 1 << 48));
            let after = cu.alloc(MIB);
            t.code("free", cu.cuMemFree_v2(after));
        },
    )
    .fact(&[
        "twice the card: OUT_OF_MEMORY",
        "2^48: OUT_OF_MEMORY",
        "free: SUCCESS",
    ]),
    Behaviour::new(
        "alloc.all_ones_size_is_out_of_memory",
        "The largest number as a size is out of memory, without an overflow",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            t.code("usize::MAX", cu.cuMemAlloc_v2(&mut address, usize::MAX));
            t.code(
                "usize::MAX - 511",
                cu.cuMemAlloc_v2(&mut address, usize::MAX - 511),
            );
            t.code("2^63", cu.cuMemAlloc_v2(&mut address, 1 << 63));
        },
    ),
    Behaviour::new(
        "alloc.a_failed_one_leaves_the_place_alone",
        "A refused allocation does not write an address of something",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            t.code("alloc", cu.cuMemAlloc_v2(&mut address, 1 << 60));
            t.see("null", address.is_null());
        },
    ),
    Behaviour::new(
        "alloc.many_small_ones_do_not_overlap",
        "Three hundred small allocations are apart, each with its own bytes",
        |t, cu| {
            let all: Vec<CUdeviceptr> = (0..300).map(|n| cu.alloc(1 + n % 700)).collect();
            let mut sorted: Vec<(u64, u64)> = all
                .iter()
                .enumerate()
                .map(|(n, a)| (a.0, a.0 + 1 + n as u64 % 700))
                .collect();
            sorted.sort_unstable();
            t.see("apart", sorted.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            for n in [0, 1, 149, 298, 299] {
                cu.write(all[n], &[(n % 251) as u8]);
            }
            let right = [0, 1, 149, 298, 299]
                .iter()
                .all(|n| cu.read(all[*n], 1)[0] == (n % 251) as u8);
            t.see("bytes", right);
            let freed = all
                .iter()
                .filter(|a| cu.cuMemFree_v2(**a) == CUresult::SUCCESS)
                .count();
            t.see("freed", freed);
        },
    )
    .fact(&["apart: true", "bytes: true", "freed: 300"]),
    Behaviour::new(
        "alloc.freed_addresses_may_return",
        "What was freed can be had again, many times",
        |t, cu| {
            let mut worst = 0;
            for _ in 0..200 {
                let mut address = CUdeviceptr::NULL;
                worst = worst.max(cu.cuMemAlloc_v2(&mut address, 8 * MIB).0);
                worst = worst.max(cu.cuMemFree_v2(address).0);
            }
            t.see("worst result", worst);
        },
    )
    .fact(&["worst result: 0"]),
    Behaviour::new(
        "alloc.does_not_wait_for_running_work",
        "An allocation comes back while a stream is busy",
        |t, cu| {
            let stream = cu.stream();
            block(cu, stream);
            let mut address = CUdeviceptr::NULL;
            t.code("alloc", cu.cuMemAlloc_v2(&mut address, 8 * MIB));
            t.code("stream", cu.cuStreamQuery(stream));
            unblock();
            t.code("free", cu.cuMemFree_v2(address));
            t.code("stream", cu.cuStreamQuery(stream));
        },
    )
    .fact(&[
        "alloc: SUCCESS",
        "stream: NOT_READY",
        "free: SUCCESS",
        "stream: SUCCESS",
    ]),
    Behaviour::new(
        "alloc.needs_a_context",
        "Without a current context there is no allocation",
        |t, cu| {
            t.code("no context", cu.cuCtxSetCurrent(CUcontext::NULL));
            let mut address = CUdeviceptr::NULL;
            t.code("alloc", cu.cuMemAlloc_v2(&mut address, 64));
        },
    )
    .fact(&["no context: SUCCESS", "alloc: INVALID_CONTEXT"]),
    Behaviour::new(
        "alloc.needs_init",
        "Before cuInit there is no allocation",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            t.code("alloc", cu.cuMemAlloc_v2(&mut address, 64));
            t.code("free", cu.cuMemFree_v2(CUdeviceptr(512)));
        },
    )
    .raw()
    .fact(&["alloc: NOT_INITIALIZED", "free: NOT_INITIALIZED"]),
    Behaviour::new(
        "alloc.is_seen_from_every_thread",
        "Another thread with the same context uses and frees it",
        |t, cu| {
            let address = cu.alloc(4096);
            cu.write(address, &[1, 2, 3]);
            let other = std::thread::spawn(move || {
                let mut first = [0; 3];
                let bare = cu.cuMemcpyDtoH_v2(first.as_mut_ptr().cast(), address, 3);
                cu.primary(0);
                let seen = cu.read(address, 3);
                (bare, seen, cu.cuMemFree_v2(address))
            });
            let (bare, seen, freed) = other.join().expect("the thread ends");
            t.code("without a context", bare);
            t.see("seen", format!("{seen:?}"));
            t.code("free", freed);
            t.code("again", cu.cuMemFree_v2(address));
        },
    ),
    Behaviour::new(
        "alloc.old_symbol_is_another_interface",
        "The interface before 3.2 is there under its own name",
        |t, cu| {
            let old = crate::driver::symbol("cuMemAlloc");
            let new = crate::driver::symbol("cuMemAlloc_v2");
            t.see("there", !old.is_null() && !new.is_null());
            t.see("different", old != new);
            let address = cu.alloc(16);
            cu.free(address);
        },
    )
    .fact(&["there: true", "different: true"]),
    Behaviour::new("free.null_is_fine", "Freeing no address succeeds", |t, cu| {
        t.code("free 0", cu.cuMemFree_v2(CUdeviceptr::NULL));
    })
    .fact(&["free 0: SUCCESS"]),
    Behaviour::new(
        "free.inner_address_is_invalid",
        "An address inside an allocation cannot be freed",
        |t, cu| {
            let address = cu.alloc(GRANULE);
            t.code("inner", cu.cuMemFree_v2(plus(address, 512)));
            t.code("next byte", cu.cuMemFree_v2(plus(address, 1)));
            cu.write(address, &[9]);
            t.see("still there", cu.read(address, 1)[0]);
            t.code("start", cu.cuMemFree_v2(address));
        },
    )
    .fact(&[
        "inner: INVALID_VALUE",
        "next byte: INVALID_VALUE",
        "still there: 9",
        "start: SUCCESS",
    ]),
    Behaviour::new(
        "free.twice_is_invalid",
        "What was freed cannot be freed again",
        |t, cu| {
            for bytes in [100, GRANULE, 9 * MIB] {
                let address = cu.alloc(bytes);
                t.code("first", cu.cuMemFree_v2(address));
                t.code("second", cu.cuMemFree_v2(address));
            }
        },
    )
    .fact(&[
        "first: SUCCESS",
        "second: INVALID_VALUE",
        "first: SUCCESS",
        "second: INVALID_VALUE",
        "first: SUCCESS",
        "second: INVALID_VALUE",
    ]),
    Behaviour::new(
        "free.unknown_address_is_invalid",
        "An address that nobody allocated cannot be freed",
        |t, cu| {
            let local = 5_u64;
            t.code(
                "of the stack",
                cu.cuMemFree_v2(CUdeviceptr(std::ptr::from_ref(&local) as u64)),
            );
            t.code("one", cu.cuMemFree_v2(CUdeviceptr(1)));
            t.code("all ones", cu.cuMemFree_v2(CUdeviceptr(u64::MAX)));
        },
    ),
    Behaviour::new(
        "free.waits_for_running_work",
        "Freeing waits for the work that uses the memory",
        |t, cu| {
            let address = cu.alloc(MIB);
            let spin = cu.kernel("ebb_spin");
            let event = cu.event();
            let stream = cu.stream();
            must("launch", cu.launch(spin, stream, &[60_000_000]));
            must("record", cu.cuEventRecord(event, stream));
            t.code("free", cu.cuMemFree_v2(address));
            t.code("then the work is done", cu.cuEventQuery(event));
        },
    )
    .fact(&["free: SUCCESS", "then the work is done: SUCCESS"]),
    Behaviour::new(
        "free.then_use_is_refused",
        "A copy from freed memory is refused",
        |t, cu| {
            let address = cu.alloc(8 * MIB);
            let other = cu.alloc(8 * MIB);
            cu.free(address);
            let mut seen = [0; 16];
            t.code(
                "range",
                cu.cuMemGetAddressRange_v2(&mut { CUdeviceptr::NULL }, &mut 0, address),
            );
            t.see(
                "copy is refused",
                cu.cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), address, 16) != CUresult::SUCCESS,
            );
            let _ = cu.cuMemFree_v2(other);
        },
    ),
    Behaviour::new(
        "free.of_vmm_address_is_invalid",
        "Memory that the program mapped is not for cuMemFree",
        |t, cu| {
            let (address, handle) = (cu.reserve(GRANULE), cu.create(GRANULE));
            cu.map(address, GRANULE, handle);
            t.code("free", cu.cuMemFree_v2(address));
            cu.write(address, &[3]);
            t.see("still there", cu.read(address, 1)[0]);
        },
    )
    .fact(&["free: INVALID_VALUE", "still there: 3"]),
    Behaviour::new(
        "free.of_host_memory_is_invalid",
        "Page-locked memory is not for cuMemFree",
        |t, cu| {
            let mut host = std::ptr::null_mut();
            must("cuMemHostAlloc", cu.cuMemHostAlloc(&mut host, 4096, 0));
            t.code("free", cu.cuMemFree_v2(CUdeviceptr(host as u64)));
            t.code("its own free", cu.cuMemFreeHost(host));
        },
    ),
    Behaviour::new(
        "pitch.rows_of_100_bytes_are_512_apart",
        "The pitch of 100-byte rows is 512",
        |t, cu| {
            let (mut address, mut pitch) = (CUdeviceptr::NULL, 0);
            t.code(
                "alloc",
                cu.cuMemAllocPitch_v2(&mut address, &mut pitch, 100, 7, 4),
            );
            t.see("pitch", pitch);
            t.see("aligned", address.0 % 512);
            t.code("free", cu.cuMemFree_v2(address));
        },
    )
    .fact(&["alloc: SUCCESS", "pitch: 512", "aligned: 0", "free: SUCCESS"]),
    Behaviour::new(
        "pitch.is_a_multiple_of_512",
        "Pitches of several widths",
        |t, cu| {
            for width in [1, 512, 513, 1000, 4096, 5000] {
                let (mut address, mut pitch) = (CUdeviceptr::NULL, 0);
                must(
                    "cuMemAllocPitch",
                    cu.cuMemAllocPitch_v2(&mut address, &mut pitch, width, 3, 16),
                );
                t.see(&width.to_string(), pitch);
                cu.free(address);
            }
        },
    )
    .fact(&[
        "1: 512",
        "512: 512",
        "513: 1024",
        "1000: 1024",
        "4096: 4096",
        "5000: 5120",
    ]),
    Behaviour::new(
        "pitch.element_sizes_4_8_16",
        "An element has 4, 8 or 16 bytes",
        |t, cu| {
            for element in [0, 1, 2, 3, 4, 8, 16, 32] {
                let (mut address, mut pitch) = (CUdeviceptr::NULL, 0);
                let code = cu.cuMemAllocPitch_v2(&mut address, &mut pitch, 64, 2, element);
                t.code(&element.to_string(), code);
            }
        },
    ),
    Behaviour::new(
        "pitch.nothing_is_invalid",
        "No width, no height, no place: refused",
        |t, cu| {
            let (mut address, mut pitch) = (CUdeviceptr::NULL, 0);
            t.code(
                "no width",
                cu.cuMemAllocPitch_v2(&mut address, &mut pitch, 0, 7, 4),
            );
            t.code(
                "no height",
                cu.cuMemAllocPitch_v2(&mut address, &mut pitch, 64, 0, 4),
            );
            let none = std::ptr::null_mut();
            t.code("no place", cu.cuMemAllocPitch_v2(none, &mut pitch, 64, 7, 4));
            t.code(
                "no pitch",
                cu.cuMemAllocPitch_v2(&mut address, std::ptr::null_mut(), 64, 7, 4),
            );
        },
    ),
    Behaviour::new(
        "pitch.more_than_the_card",
        "More rows than the card has room for",
        |t, cu| {
            let (mut address, mut pitch) = (CUdeviceptr::NULL, 0);
            t.code(
                "alloc",
                cu.cuMemAllocPitch_v2(&mut address, &mut pitch, 1 << 20, 1 << 30, 4),
            );
        },
    )
    .fact(&["alloc: OUT_OF_MEMORY"]),
    Behaviour::new(
        "pitch.range_covers_all_rows",
        "The range of a pitched allocation reaches to the last row",
        |t, cu| {
            let (mut address, mut pitch) = (CUdeviceptr::NULL, 0);
            must(
                "cuMemAllocPitch",
                cu.cuMemAllocPitch_v2(&mut address, &mut pitch, 100, 7, 4),
            );
            let range = cu.range(plus(address, 6 * pitch + 99));
            t.see(
                "covers",
                matches!(range, Ok((offset, size)) if offset == 6 * 512 + 99 && size >= 6 * 512 + 100),
            );
            cu.free(address);
        },
    )
    .fact(&["covers: true"]),
    Behaviour::new(
        "pitch.rows_keep_their_bytes",
        "Rows written by a 2D copy are read back by plain ones",
        |t, cu| {
            let (mut address, mut pitch) = (CUdeviceptr::NULL, 0);
            must(
                "cuMemAllocPitch",
                cu.cuMemAllocPitch_v2(&mut address, &mut pitch, 200, 50, 4),
            );
            let host = pattern(200 * 50, 3);
            let copy = CUDA_MEMCPY2D {
                srcMemoryType: CU_MEMORYTYPE_HOST,
                srcHost: host.as_ptr().cast(),
                srcPitch: 200,
                dstMemoryType: CU_MEMORYTYPE_DEVICE,
                dstDevice: address,
                dstPitch: pitch,
                WidthInBytes: 200,
                Height: 50,
                ..CUDA_MEMCPY2D::default()
            };
            t.code("copy", cu.cuMemcpy2D_v2(&copy));
            for row in [0, 1, 49] {
                let seen = cu.read(plus(address, row * pitch), 200);
                t.see(
                    &format!("row {row}"),
                    compare(&seen, &host[row * 200..(row + 1) * 200]),
                );
            }
            cu.free(address);
        },
    )
    .fact(&["copy: SUCCESS", "row 0: right", "row 1: right", "row 49: right"]),
];
