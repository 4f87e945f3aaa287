//! Memory and events between two processes: legacy IPC, exported handles, pools.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::driver::Driver;
use crate::fds::{hear, receive, send, tell};
use crate::helpers::*;
use crate::observe::Test;

fn bytes_of(handle: [std::ffi::c_char; 64]) -> [u8; 64] {
    handle.map(|byte| byte as u8)
}

fn handle_of(bytes: [u8; 64]) -> [std::ffi::c_char; 64] {
    bytes.map(|byte| byte as std::ffi::c_char)
}

fn ipc(cu: Driver, address: CUdeviceptr) -> Result<[u8; 64], CUresult> {
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    match cu.cuIpcGetMemHandle(&mut handle, address) {
        CUresult::SUCCESS => Ok(bytes_of(handle.reserved)),
        code => Err(code),
    }
}

fn open(cu: Driver, handle: [u8; 64]) -> Result<CUdeviceptr, CUresult> {
    let mut address = CUdeviceptr::NULL;
    let handle = CUipcMemHandle {
        reserved: handle_of(handle),
    };
    match cu.cuIpcOpenMemHandle_v2(&mut address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.0) {
        CUresult::SUCCESS => Ok(address),
        code => Err(code),
    }
}

/// The second process of most: opens the handle, looks at 16 bytes, writes others, closes.
fn opens_reads_and_writes(t: &mut Test, cu: Driver, socket: UnixStream) {
    let opened = open(cu, hear(&socket));
    t.see("open", either(opened.map(|_| "opened")));
    if let Ok(address) = opened {
        t.see("bytes", format!("{:?}", cu.read(address, 4)));
        cu.write(address, &[9, 8, 7, 6]);
        t.code("close", cu.cuIpcCloseMemHandle(address));
    }
    tell(&socket, b"d");
}

fn exportable(cu: Driver, bytes: usize) -> CUmemGenericAllocationHandle {
    let asked = CUmemAllocationProp {
        requestedHandleTypes: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        ..cu.properties(0)
    };
    let mut handle = CUmemGenericAllocationHandle::NULL;
    must("cuMemCreate", cu.cuMemCreate(&mut handle, bytes, &asked, 0));
    handle
}

fn export(cu: Driver, handle: CUmemGenericAllocationHandle) -> Result<OwnedFd, CUresult> {
    let mut fd = -1_i32;
    let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    match cu.cuMemExportToShareableHandle((&raw mut fd).cast(), handle, kind, 0) {
        // SAFETY: the driver made this descriptor for the caller.
        CUresult::SUCCESS => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        code => Err(code),
    }
}

fn import(cu: Driver, fd: &OwnedFd) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = CUmemGenericAllocationHandle::NULL;
    let fd = fd.as_raw_fd() as usize as *mut std::ffi::c_void;
    match cu.cuMemImportFromShareableHandle(&mut handle, fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        CUresult::SUCCESS => Ok(handle),
        code => Err(code),
    }
}

/// The second process of the exports: imports, maps, reads, writes.
fn imports_reads_and_writes(t: &mut Test, cu: Driver, socket: UnixStream) {
    let fd = receive(&socket).expect("a descriptor");
    let imported = import(cu, &fd);
    t.see("import", either(imported.map(|_| "a handle")));
    if let Ok(handle) = imported {
        drop(fd);
        let address = cu.reserve(GRANULE);
        cu.map(address, GRANULE, handle);
        t.see("bytes", format!("{:?}", cu.read(address, 4)));
        cu.write(plus(address, 4), &[5, 6]);
        // A short copy may still be under way when its call returns; neither unmapping nor the other process waits for it.
        cu.sync();
        t.code("unmap", cu.cuMemUnmap(address, GRANULE));
        t.code("release", cu.cuMemRelease(handle));
    }
    tell(&socket, b"d");
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "ipc.memory_is_shared",
        "Another process opens the handle, sees the bytes and writes others",
        |t, cu| {
            let address = cu.alloc(GRANULE);
            cu.write(address, &[1, 2, 3, 4]);
            cu.sync();
            let handle = ipc(cu, address);
            t.see("get", either(handle.map(|_| "a handle")));
            let Ok(handle) = handle else { return };
            let peer = t.peer();
            tell(&peer.socket, &handle);
            let _: [u8; 1] = hear(&peer.socket);
            peer.join(t);
            t.see("bytes", format!("{:?}", cu.read(address, 4)));
            t.code("free", cu.cuMemFree_v2(address));
        },
    )
    .with(opens_reads_and_writes)
    .fact(&[
        "get: \"a handle\"",
        "peer: open: \"opened\"",
        "peer: bytes: [1, 2, 3, 4]",
        "peer: close: SUCCESS",
        "bytes: [9, 8, 7, 6]",
        "free: SUCCESS",
    ]),
    Behaviour::new(
        "ipc.small_memory_is_shared",
        "A small allocation is shared at its own offset",
        |t, cu| {
            let (before, address) = (cu.alloc(512), cu.alloc(100));
            cu.write(before, &[0; 4]);
            cu.write(address, &[4, 3, 2, 1]);
            cu.sync();
            let handle = ipc(cu, address);
            t.see("get", either(handle.map(|_| "a handle")));
            let Ok(handle) = handle else { return };
            let peer = t.peer();
            tell(&peer.socket, &handle);
            let _: [u8; 1] = hear(&peer.socket);
            peer.join(t);
            t.see("bytes", format!("{:?}", cu.read(address, 4)));
            t.see("the neighbour", format!("{:?}", cu.read(before, 4)));
        },
    )
    .with(|t, cu, socket| {
        // The real driver opens the whole block: the address is of its base, so only success is looked at.
        let opened = open(cu, hear(&socket));
        t.see("open", either(opened.map(|_| "opened")));
        if let Ok(address) = opened {
            t.code("close", cu.cuIpcCloseMemHandle(address));
        }
        tell(&socket, b"d");
    }),
    Behaviour::new(
        "ipc.same_memory_same_handle",
        "A handle may be asked for twice; inner addresses have one too",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            let (first, second) = (ipc(cu, address), ipc(cu, address));
            t.see("first", either(first.map(|_| ())));
            t.see("second", either(second.map(|_| ())));
            t.see("inner", either(ipc(cu, plus(address, MIB)).map(|_| ())));
            t.code("free", cu.cuMemFree_v2(address));
        },
    ),
    Behaviour::new(
        "ipc.not_in_the_same_process",
        "The process that made a handle cannot open it",
        |t, cu| {
            let address = cu.alloc(GRANULE);
            let handle = ipc(cu, address);
            t.see("get", either(handle.map(|_| "a handle")));
            if let Ok(handle) = handle {
                t.see("open", either(open(cu, handle).map(|_| "opened")));
            }
            cu.free(address);
        },
    )
    .fact(&["get: \"a handle\"", "open: INVALID_CONTEXT"]),
    Behaviour::new(
        "ipc.not_of_mapped_memory",
        "Memory that the program mapped has no legacy handle",
        |t, cu| {
            let (address, handle) = (cu.reserve(GRANULE), cu.create(GRANULE));
            cu.map(address, GRANULE, handle);
            t.see("get", either(ipc(cu, address).map(|_| "a handle")));
        },
    )
    .fact(&["get: INVALID_VALUE"]),
    Behaviour::new(
        "ipc.not_of_stream_ordered_memory",
        "cuMemAllocAsync memory has no legacy handle",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            must(
                "cuMemAllocAsync",
                cu.cuMemAllocAsync(&mut address, MIB, NO_STREAM),
            );
            cu.sync();
            t.see("get", either(ipc(cu, address).map(|_| "a handle")));
            t.code("free", cu.cuMemFreeAsync(address, NO_STREAM));
        },
    ),
    Behaviour::new(
        "ipc.not_of_unknown_or_freed_memory",
        "Unknown and freed addresses have no handle",
        |t, cu| {
            let address = cu.alloc(8 * MIB);
            cu.free(address);
            t.see("freed", either(ipc(cu, address).map(|_| "a handle")));
            t.see("null", either(ipc(cu, CUdeviceptr::NULL).map(|_| "a handle")));
            t.code("no place", cu.cuIpcGetMemHandle(std::ptr::null_mut(), address));
        },
    ),
    Behaviour::new(
        "ipc.a_made_up_handle_is_refused",
        "Bytes that nobody made open nothing",
        |t, cu| {
            t.see("zeros is refused", open(cu, [0; 64]).is_err());
            t.see("ones is refused", open(cu, [0xff; 64]).is_err());
            t.code("close nothing", cu.cuIpcCloseMemHandle(CUdeviceptr(0x1000)));
        },
    ),
    Behaviour::new(
        "ipc.memory_outlives_the_maker",
        "Its maker may free memory that another process has open",
        |t, cu| {
            let address = cu.alloc(GRANULE);
            cu.write(address, &[7; 16]);
            cu.sync();
            let handle = ipc(cu, address);
            t.see("get", either(handle.map(|_| "a handle")));
            let Ok(handle) = handle else { return };
            let peer = t.peer();
            tell(&peer.socket, &handle);
            let _: [u8; 1] = hear(&peer.socket);
            t.code("free", cu.cuMemFree_v2(address));
            tell(&peer.socket, b"f");
            peer.join(t);
        },
    )
    .with(|t, cu, socket| {
        let opened = open(cu, hear(&socket));
        t.see("open", either(opened.map(|_| "opened")));
        tell(&socket, b"o");
        let _: [u8; 1] = hear(&socket);
        // What the bytes are then is nobody's promise.
        if let Ok(address) = opened {
            t.code("close", cu.cuIpcCloseMemHandle(address));
        }
    }),
    Behaviour::new(
        "ipc.opened_twice",
        "A handle opened twice in one process",
        |t, cu| {
            let address = cu.alloc(GRANULE);
            cu.write(address, &[7; 16]);
            let handle = ipc(cu, address);
            t.see("get", either(handle.map(|_| "a handle")));
            let Ok(handle) = handle else { return };
            let peer = t.peer();
            tell(&peer.socket, &handle);
            let _: [u8; 1] = hear(&peer.socket);
            peer.join(t);
        },
    )
    .with(|t, cu, socket| {
        let handle = hear(&socket);
        let (first, second) = (open(cu, handle), open(cu, handle));
        t.see("first", either(first.map(|_| "opened")));
        t.see("second", either(second.map(|_| "opened")));
        t.see("the same address", first == second);
        if let Ok(address) = first {
            t.code("close", cu.cuIpcCloseMemHandle(address));
        }
        tell(&socket, b"d");
    })
    .fact(&[
        "get: \"a handle\"",
        "peer: first: \"opened\"",
        "peer: second: \"opened\"",
        "peer: the same address: true",
        "peer: close: SUCCESS",
    ]),
    Behaviour::new(
        "ipc.close_then_use_is_refused",
        "After closing, the address is unknown",
        |t, cu| {
            let address = cu.alloc(GRANULE);
            let handle = ipc(cu, address);
            t.see("get", either(handle.map(|_| "a handle")));
            let Ok(handle) = handle else { return };
            let peer = t.peer();
            tell(&peer.socket, &handle);
            let _: [u8; 1] = hear(&peer.socket);
            peer.join(t);
        },
    )
    .with(|t, cu, socket| {
        let opened = open(cu, hear(&socket));
        t.see("open", either(opened.map(|_| "opened")));
        if let Ok(address) = opened {
            t.code("free is not close", cu.cuMemFree_v2(address));
            t.code("close", cu.cuIpcCloseMemHandle(address));
            t.code("again", cu.cuIpcCloseMemHandle(address));
            t.see("range", either(cu.range(address)));
        }
        tell(&socket, b"d");
    }),
    Behaviour::new(
        "ipc.attributes_of_opened_memory",
        "Opened memory looks like memory of the device",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            let handle = ipc(cu, address);
            t.see("get", either(handle.map(|_| "a handle")));
            let Ok(handle) = handle else { return };
            let peer = t.peer();
            tell(&peer.socket, &handle);
            let _: [u8; 1] = hear(&peer.socket);
            peer.join(t);
        },
    )
    .with(|t, cu, socket| {
        let opened = open(cu, hear(&socket));
        t.see("open", either(opened.map(|_| "opened")));
        if let Ok(address) = opened {
            t.see(
                "type",
                either(cu.attribute::<u32>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)),
            );
            t.see(
                "ordinal",
                either(cu.attribute::<u32>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)),
            );
            t.see("range", either(cu.range(plus(address, MIB))));
            t.code("close", cu.cuIpcCloseMemHandle(address));
        }
        tell(&socket, b"d");
    }),
    Behaviour::new(
        "ipc.event_is_shared",
        "Another process waits for an event of this one",
        |t, cu| {
            let mut event = CUevent::NULL;
            let flags = CU_EVENT_DISABLE_TIMING.0 | CU_EVENT_INTERPROCESS.0;
            t.code("create", cu.cuEventCreate(&mut event, flags));
            must("record", cu.cuEventRecord(event, NO_STREAM));
            let mut handle = CUipcEventHandle { reserved: [0; 64] };
            t.code("get", cu.cuIpcGetEventHandle(&mut handle, event));
            let peer = t.peer();
            tell(&peer.socket, &bytes_of(handle.reserved));
            let _: [u8; 1] = hear(&peer.socket);
            peer.join(t);
            t.code("destroy", cu.cuEventDestroy_v2(event));
        },
    )
    .with(|t, cu, socket| {
        let handle = CUipcEventHandle {
            reserved: handle_of(hear(&socket)),
        };
        let mut event = CUevent::NULL;
        t.code("open", cu.cuIpcOpenEventHandle(&mut event, handle));
        let stream = cu.stream();
        t.code("wait", cu.cuStreamWaitEvent(stream, event, 0));
        t.code("then", cu.cuStreamSynchronize(stream));
        t.code("query", cu.cuEventQuery(event));
        t.code("destroy", cu.cuEventDestroy_v2(event));
        tell(&socket, b"d");
    })
    .fact(&[
        "create: SUCCESS",
        "get: SUCCESS",
        "peer: open: SUCCESS",
        "peer: wait: SUCCESS",
        "peer: then: SUCCESS",
        "peer: query: SUCCESS",
        "peer: destroy: SUCCESS",
        "destroy: SUCCESS",
    ]),
    Behaviour::new(
        "ipc.event_flags",
        "Only events made for it have a handle, and they have no timing",
        |t, cu| {
            let mut event = CUevent::NULL;
            t.code(
                "with timing",
                cu.cuEventCreate(&mut event, CU_EVENT_INTERPROCESS.0),
            );
            let plain = cu.event();
            let mut handle = CUipcEventHandle { reserved: [0; 64] };
            t.see(
                "not made for it is refused",
                cu.cuIpcGetEventHandle(&mut handle, plain) != CUresult::SUCCESS,
            );
        },
    ),
    Behaviour::new(
        "export.handle_to_another_process",
        "An exported handle is imported, mapped and written by another process",
        |t, cu| {
            let handle = exportable(cu, GRANULE);
            let address = cu.reserve(GRANULE);
            cu.map(address, GRANULE, handle);
            cu.write(address, &[1, 2, 3, 4, 0, 0]);
            cu.sync();
            let fd = export(cu, handle);
            t.see(
                "export",
                either(fd.as_ref().map(|_| "a descriptor").map_err(|code| *code)),
            );
            let Ok(fd) = fd else { return };
            let peer = t.peer();
            send(&peer.socket, fd.as_raw_fd()).expect("the other process lives");
            let _: [u8; 1] = hear(&peer.socket);
            peer.join(t);
            t.see("bytes", format!("{:?}", cu.read(address, 6)));
        },
    )
    .with(imports_reads_and_writes)
    .fact(&[
        "export: \"a descriptor\"",
        "peer: import: \"a handle\"",
        "peer: bytes: [1, 2, 3, 4]",
        "peer: unmap: SUCCESS",
        "peer: release: SUCCESS",
        "bytes: [1, 2, 3, 4, 5, 6]",
    ]),
    Behaviour::new(
        "export.import_in_the_same_process",
        "A descriptor imported where it was made is the same memory",
        |t, cu| {
            let handle = exportable(cu, GRANULE);
            let (a, b) = (cu.reserve(GRANULE), cu.reserve(GRANULE));
            cu.map(a, GRANULE, handle);
            cu.write(a, &[3; 8]);
            let fd = export(cu, handle).expect("exported");
            let again = import(cu, &fd);
            t.see("import", either(again.map(|_| "a handle")));
            if let Ok(again) = again {
                cu.map(b, GRANULE, again);
                t.see("bytes", format!("{:?}", cu.read(b, 2)));
                t.code("release", cu.cuMemRelease(again));
            }
            t.code("release", cu.cuMemRelease(handle));
        },
    )
    .fact(&[
        "import: \"a handle\"",
        "bytes: [3, 3]",
        "release: SUCCESS",
        "release: SUCCESS",
    ]),
    Behaviour::new(
        "export.memory_outlives_the_handle",
        "A descriptor alone keeps the memory",
        |t, cu| {
            let handle = exportable(cu, GRANULE);
            let address = cu.reserve(GRANULE);
            cu.map(address, GRANULE, handle);
            cu.write(address, &[8; 8]);
            cu.sync();
            let fd = export(cu, handle).expect("exported");
            must("unmap", cu.cuMemUnmap(address, GRANULE));
            must("release", cu.cuMemRelease(handle));
            let again = import(cu, &fd);
            t.see("import", either(again.map(|_| "a handle")));
            if let Ok(again) = again {
                cu.map(address, GRANULE, again);
                t.see("bytes", format!("{:?}", cu.read(address, 2)));
            }
        },
    )
    .fact(&["import: \"a handle\"", "bytes: [8, 8]"]),
    Behaviour::new(
        "export.twice",
        "Two exports are two descriptors of one memory",
        |t, cu| {
            let handle = exportable(cu, GRANULE);
            let (first, second) = (export(cu, handle), export(cu, handle));
            let different = match (&first, &second) {
                (Ok(a), Ok(b)) => a.as_raw_fd() != b.as_raw_fd(),
                _ => false,
            };
            t.see("two descriptors", different);
            t.code("release", cu.cuMemRelease(handle));
        },
    )
    .fact(&["two descriptors: true", "release: SUCCESS"]),
    Behaviour::new(
        "export.misuse",
        "No place, no handle, another kind, flags",
        |t, cu| {
            let handle = exportable(cu, GRANULE);
            let mut fd = -1_i32;
            let place = (&raw mut fd).cast();
            let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            t.code(
                "no place",
                cu.cuMemExportToShareableHandle(std::ptr::null_mut(), handle, kind, 0),
            );
            t.code(
                "no handle",
                cu.cuMemExportToShareableHandle(place, CUmemGenericAllocationHandle::NULL, kind, 0),
            );
            t.see(
                "another kind is refused",
                cu.cuMemExportToShareableHandle(place, handle, CU_MEM_HANDLE_TYPE_WIN32, 0)
                    != CUresult::SUCCESS,
            );
            t.code("flags", cu.cuMemExportToShareableHandle(place, handle, kind, 7));
            t.code("release", cu.cuMemRelease(handle));
        },
    ),
    Behaviour::new(
        "export.import_misuse",
        "Descriptors that are no memory are refused",
        |t, cu| {
            let null = OwnedFd::from(std::fs::File::open("/dev/null").expect("/dev/null"));
            t.see("/dev/null is refused", import(cu, &null).is_err());
            let mut handle = CUmemGenericAllocationHandle::NULL;
            t.see(
                "-1 is refused",
                cu.cuMemImportFromShareableHandle(
                    &mut handle,
                    usize::MAX as *mut std::ffi::c_void,
                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                ) != CUresult::SUCCESS,
            );
        },
    )
    .fact(&["/dev/null is refused: true", "-1 is refused: true"]),
    Behaviour::new(
        "export.properties_of_an_import",
        "An imported handle tells the properties of the exporter's",
        |t, cu| {
            let handle = exportable(cu, GRANULE);
            let fd = export(cu, handle).expect("exported");
            let again = import(cu, &fd).expect("imported");
            let mut told = CUmemAllocationProp::default();
            t.code("ask", cu.cuMemGetAllocationPropertiesFromHandle(&mut told, again));
            t.see(
                "location",
                format!("{} {}", told.location.type_.0, told.location.id()),
            );
            t.see("type", told.type_.0);
        },
    ),
    Behaviour::new(
        "export.dma_buf_of_an_allocation",
        "A dma-buf of cuMemAlloc memory, where the device has it",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            let mut fd = -1_i32;
            let code = cu.cuMemGetHandleForAddressRange(
                (&raw mut fd).cast(),
                address,
                GRANULE,
                CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                0,
            );
            let code = t.exists("dma-buf", code);
            t.code("export", code);
            t.see("a descriptor", fd >= 0);
            cu.free(address);
        },
    )
    .needs(&[crate::behaviour::Need::Attribute(124, "dma-buf")]),
];
