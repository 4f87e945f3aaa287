//! Page-locked host memory: allocated, registered, mapped into the device.

use std::ffi::c_void;
use std::ptr::null_mut;

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::driver::Driver;
use crate::helpers::*;

#[track_caller]
fn pinned(cu: Driver, bytes: usize, flags: u32) -> *mut c_void {
    let mut host = null_mut();
    must("cuMemHostAlloc", cu.cuMemHostAlloc(&mut host, bytes, flags));
    host
}

/// Whole pages of ordinary memory.
struct Pages(*mut c_void, usize);

impl Pages {
    fn new(bytes: usize) -> Self {
        let (rights, kind) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: new anonymous memory, at an address that the kernel chooses.
        let at = unsafe { libc::mmap(null_mut(), bytes, rights, kind, -1, 0) };
        assert!(at != libc::MAP_FAILED, "memory of the host");
        Self(at, bytes)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has so many bytes, all zero or written since; the device is done with them when we look.
        unsafe { std::slice::from_raw_parts_mut(self.0.cast(), self.1) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which nobody holds a part any more.
        unsafe { libc::munmap(self.0, self.1) };
    }
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "host.whole_life",
        "Page-locked memory is taken, copied to and from, and freed",
        |t, cu| {
            let (host, address) = (pinned(cu, MIB, 0), cu.alloc(MIB));
            // SAFETY: a MiB was just allocated there.
            let bytes = unsafe { std::slice::from_raw_parts_mut(host.cast::<u8>(), MIB) };
            bytes.copy_from_slice(&pattern(MIB, 1));
            t.code("down", cu.cuMemcpyHtoDAsync_v2(address, host, MIB, NO_STREAM));
            cu.sync();
            bytes.fill(0);
            t.code("up", cu.cuMemcpyDtoHAsync_v2(host, address, MIB, NO_STREAM));
            cu.sync();
            t.see("bytes", compare(bytes, &pattern(MIB, 1)));
            t.code("free", cu.cuMemFreeHost(host));
            t.code("again", cu.cuMemFreeHost(host));
        },
    ),
    Behaviour::new("host.sizes", "Nothing, one byte, more than there is", |t, cu| {
        let mut host = null_mut();
        t.code("0", cu.cuMemHostAlloc(&mut host, 0, 0));
        t.code("1", cu.cuMemHostAlloc(&mut host, 1, 0));
        t.code("free", cu.cuMemFreeHost(host));
        t.code("no place", cu.cuMemHostAlloc(null_mut(), 64, 0));
    }),
    Behaviour::new(
        "host.flags",
        "Known flags are told, unknown ones refused",
        |t, cu| {
            for flags in [0, 1, 2, 4, 7, 0x100] {
                let mut host = null_mut();
                let code = cu.cuMemHostAlloc(&mut host, 4096, flags);
                t.code(&flags.to_string(), code);
                if code == CUresult::SUCCESS {
                    let mut told = 0;
                    t.code("ask", cu.cuMemHostGetFlags(&mut told, host));
                    t.see("asked are told", told & flags == flags);
                    must("free", cu.cuMemFreeHost(host));
                }
            }
        },
    ),
    Behaviour::new(
        "host.old_interface",
        "cuMemAllocHost gives page-locked memory too",
        |t, cu| {
            let mut host = null_mut();
            t.code("alloc", cu.cuMemAllocHost_v2(&mut host, 4096));
            let mut flags = 0;
            t.code("flags", cu.cuMemHostGetFlags(&mut flags, host));
            t.code("free", cu.cuMemFreeHost(host));
        },
    )
    .fact(&["alloc: SUCCESS", "flags: SUCCESS", "free: SUCCESS"]),
    Behaviour::new(
        "host.device_address_is_the_same",
        "With unified addresses the device uses the host's address",
        |t, cu| {
            let host = pinned(cu, 4096, CU_MEMHOSTALLOC_DEVICEMAP);
            let mut address = CUdeviceptr::NULL;
            t.code("ask", cu.cuMemHostGetDevicePointer_v2(&mut address, host, 0));
            t.see("the same", address.0 == host as u64);
            t.code("flags", cu.cuMemHostGetDevicePointer_v2(&mut address, host, 1));
            let local = 5_u64;
            let local: *const u64 = &local;
            t.code(
                "of the stack",
                cu.cuMemHostGetDevicePointer_v2(&mut address, local.cast_mut().cast(), 0),
            );
            must("free", cu.cuMemFreeHost(host));
        },
    ),
    Behaviour::new(
        "host.a_kernel_writes_it",
        "A kernel writes into mapped host memory",
        |t, cu| {
            let host = pinned(cu, 64 * 1024, CU_MEMHOSTALLOC_DEVICEMAP);
            let (fill, check) = (cu.kernel("ebb_fill"), cu.kernel("ebb_check"));
            let result = cu.alloc(8);
            must("memset", cu.cuMemsetD8_v2(result, 0, 8));
            let words = 16 * 1024;
            t.code("fill", cu.launch(fill, NO_STREAM, &[host as u64, words, 3, 0]));
            t.code(
                "check",
                cu.launch(check, NO_STREAM, &[host as u64, words, 3, 0, result.0]),
            );
            cu.sync();
            t.see("wrong words", cu.read(result, 1)[0]);
            must("free", cu.cuMemFreeHost(host));
        },
    )
    .fact(&["fill: SUCCESS", "check: SUCCESS", "wrong words: 0"]),
    Behaviour::new(
        "host.free_misuse",
        "Only page-locked allocations are for cuMemFreeHost",
        |t, cu| {
            t.code("null", cu.cuMemFreeHost(null_mut()));
            let local = 5_u64;
            let local: *const u64 = &local;
            t.code("the stack", cu.cuMemFreeHost(local.cast_mut().cast()));
            let address = cu.alloc(4096);
            t.see(
                "device memory is refused",
                cu.cuMemFreeHost(address.0 as *mut c_void) != CUresult::SUCCESS,
            );
            cu.free(address);
        },
    ),
    Behaviour::new(
        "host.registered_memory",
        "Ordinary memory is registered, copied, and unregistered",
        |t, cu| {
            let mut pages = Pages::new(MIB);
            let address = cu.alloc(MIB);
            pages.bytes().copy_from_slice(&pattern(MIB, 2));
            t.code("register", cu.cuMemHostRegister_v2(pages.0, MIB, 0));
            t.code("copy", cu.cuMemcpyHtoDAsync_v2(address, pages.0, MIB, NO_STREAM));
            cu.sync();
            t.see("bytes", compare(&cu.read(address, MIB), &pattern(MIB, 2)));
            t.code("unregister", cu.cuMemHostUnregister(pages.0));
            t.code("again", cu.cuMemHostUnregister(pages.0));
        },
    )
    .fact(&[
        "register: SUCCESS",
        "copy: SUCCESS",
        "bytes: right",
        "unregister: SUCCESS",
        "again: HOST_MEMORY_NOT_REGISTERED",
    ]),
    Behaviour::new(
        "host.registered_twice",
        "Memory that is registered cannot be registered again",
        |t, cu| {
            let pages = Pages::new(MIB);
            must("register", cu.cuMemHostRegister_v2(pages.0, MIB, 0));
            t.code("again", cu.cuMemHostRegister_v2(pages.0, MIB, 0));
            t.code("a part", cu.cuMemHostRegister_v2(pages.0, 4096, 0));
            must("unregister", cu.cuMemHostUnregister(pages.0));
            t.code("then", cu.cuMemHostRegister_v2(pages.0, MIB, 0));
            must("unregister", cu.cuMemHostUnregister(pages.0));
        },
    ),
    Behaviour::new(
        "host.register_misuse",
        "No memory, no bytes, memory that is not there",
        |t, cu| {
            let pages = Pages::new(MIB);
            t.code("null", cu.cuMemHostRegister_v2(null_mut(), 4096, 0));
            t.code("no bytes", cu.cuMemHostRegister_v2(pages.0, 0, 0));
            t.code("flags", cu.cuMemHostRegister_v2(pages.0, MIB, 0x1000));
            t.code("unregister", cu.cuMemHostUnregister(pages.0));
        },
    ),
    Behaviour::new(
        "host.registered_has_a_device_address",
        "The device's address of registered memory",
        |t, cu| {
            let mut pages = Pages::new(64 * 1024);
            must(
                "register",
                cu.cuMemHostRegister_v2(pages.0, 64 * 1024, CU_MEMHOSTREGISTER_DEVICEMAP),
            );
            let mut address = CUdeviceptr::NULL;
            t.code("ask", cu.cuMemHostGetDevicePointer_v2(&mut address, pages.0, 0));
            t.code("fill", cu.cuMemsetD8_v2(address, 5, 64 * 1024));
            cu.sync();
            t.see("bytes", pages.bytes().iter().all(|byte| *byte == 5));
            let kind = cu.attribute::<u32>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
            t.see("type", either(kind));
            must("unregister", cu.cuMemHostUnregister(pages.0));
        },
    )
    .fact(&["ask: SUCCESS", "fill: SUCCESS", "bytes: true", "type: 1"]),
    Behaviour::new(
        "host.free_is_not_unregister",
        "cuMemFreeHost and cuMemHostUnregister are each for their own kind",
        |t, cu| {
            let (pages, host) = (Pages::new(MIB), pinned(cu, 4096, 0));
            must("register", cu.cuMemHostRegister_v2(pages.0, MIB, 0));
            t.see(
                "free of registered is refused",
                cu.cuMemFreeHost(pages.0) != CUresult::SUCCESS,
            );
            t.see(
                "unregister of allocated is refused",
                cu.cuMemHostUnregister(host) != CUresult::SUCCESS,
            );
            t.code("unregister", cu.cuMemHostUnregister(pages.0));
            t.code("free", cu.cuMemFreeHost(host));
        },
    )
    .fact(&[
        "free of registered is refused: true",
        "unregister of allocated is refused: true",
        "unregister: SUCCESS",
        "free: SUCCESS",
    ]),
    Behaviour::new("host.range_of_it", "The range of page-locked memory", |t, cu| {
        let host = pinned(cu, 10_000, 0);
        t.see(
            "range",
            either(cu.range(CUdeviceptr(host as u64 + 5_000)).map(|range| range.0)),
        );
        must("free", cu.cuMemFreeHost(host));
    }),
];
