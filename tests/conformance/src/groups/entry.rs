//! Ways to the calls: `cuGetProcAddress` in all versions, `dlsym`; and what a fork, threads and descriptors do to them.

use std::ffi::{CString, c_void};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::ptr::null_mut;

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::driver::{Driver, symbol};
use crate::helpers::*;
use crate::observe::{Test, short};

type Alloc = unsafe extern "C" fn(*mut CUdeviceptr, usize) -> CUresult;
type Free = unsafe extern "C" fn(CUdeviceptr) -> CUresult;
type AllocAsync = unsafe extern "C" fn(*mut CUdeviceptr, usize, CUstream) -> CUresult;

/// Asks by name; the code, the status and the address.
fn look_up(cu: Driver, name: &str, version: i32, flags: u64) -> (CUresult, u32, *mut c_void) {
    let name = CString::new(name).expect("no zero byte in a name");
    let (mut at, mut status) = (null_mut(), CUdriverProcAddressQueryResult(77));
    let code = cu.cuGetProcAddress_v2(name.as_ptr(), &mut at, version, flags, &mut status);
    (code, status.0, at)
}

fn show(t: &mut Test, cu: Driver, name: &str, version: i32, flags: u64) {
    let (code, status, at) = look_up(cu, name, version, flags);
    t.see(
        &format!("{name} {version} {flags}"),
        format!(
            "{} {status} {}",
            short(code),
            if at.is_null() { "none" } else { "found" }
        ),
    );
}

/// Runs `work` in a forked child; how it ended.
fn in_a_child(work: impl FnOnce() -> i32) -> String {
    // SAFETY: the process has no other thread that matters: the child runs only `work` and ends by _exit.
    match unsafe { libc::fork() } {
        0 => {
            let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(99);
            // SAFETY: ends the child without running what belongs to the parent.
            unsafe { libc::_exit(status) }
        }
        child => {
            let mut status = 0;
            // SAFETY: our child, and a place for its status.
            unsafe { libc::waitpid(child, &mut status, 0) };
            let status = ExitStatus::from_raw(status);
            status
                .code()
                .map_or_else(|| status.to_string(), |code| code.to_string())
        }
    }
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "entry.memory_calls_are_found",
        "cuGetProcAddress finds the memory calls of a current version",
        |t, cu| {
            for name in [
                "cuMemAlloc",
                "cuMemAllocPitch",
                "cuMemFree",
                "cuMemGetInfo",
                "cuMemAllocAsync",
                "cuMemCreate",
                "cuMemMap",
                "cuIpcGetMemHandle",
                "cuMemcpyHtoD",
                "cuPointerGetAttribute",
            ] {
                show(t, cu, name, 12000, 0);
            }
        },
    ),
    Behaviour::new(
        "entry.found_calls_work",
        "What cuGetProcAddress gives allocates and frees as dlsym's do",
        |t, cu| {
            let (_, _, alloc) = look_up(cu, "cuMemAlloc", 12000, 0);
            let (_, _, free) = look_up(cu, "cuMemFree", 12000, 0);
            // SAFETY: the driver's functions of these names and version, with these parameters.
            let alloc: Alloc = unsafe { std::mem::transmute(alloc) };
            // SAFETY: as above.
            let free: Free = unsafe { std::mem::transmute(free) };
            let mut address = CUdeviceptr::NULL;
            // SAFETY: a live place.
            t.code("alloc", unsafe { alloc(&mut address, 3 * MIB) });
            t.see("range", either(cu.range(address)));
            cu.write(address, &[1; 4]);
            t.see("byte", cu.read(address, 1)[0]);
            // SAFETY: the address that it gave.
            t.code("free", unsafe { free(address) });
            t.code("again", cu.cuMemFree_v2(address));
        },
    )
    .fact(&[
        "alloc: SUCCESS",
        "range: (0, 3145728)",
        "byte: 1",
        "free: SUCCESS",
        "again: INVALID_VALUE",
    ]),
    Behaviour::new(
        "entry.same_as_dlsym",
        "cuGetProcAddress and dlsym give one address for one version",
        |t, cu| {
            for (name, of) in [
                ("cuMemAlloc", "cuMemAlloc_v2"),
                ("cuMemFree", "cuMemFree_v2"),
                ("cuMemCreate", "cuMemCreate"),
                ("cuLaunchKernel", "cuLaunchKernel"),
            ] {
                t.see(of, look_up(cu, name, 12000, 0).2 == symbol(of));
            }
        },
    ),
    Behaviour::new(
        "entry.old_versions",
        "The version asked for decides which binary interface is given",
        |t, cu| {
            let (new, old) = (
                look_up(cu, "cuMemAlloc", 12000, 0).2,
                look_up(cu, "cuMemAlloc", 3010, 0).2,
            );
            t.see("different", new != old && !old.is_null());
            t.see("the old one", old == symbol("cuMemAlloc"));
            show(t, cu, "cuCtxCreate", 2000, 0);
            show(t, cu, "cuCtxCreate", 3020, 0);
            show(t, cu, "cuCtxCreate", 11040, 0);
        },
    ),
    Behaviour::new(
        "entry.version_too_old",
        "A call that is newer than the version asked for",
        |t, cu| {
            show(t, cu, "cuMemAllocAsync", 11010, 0);
            show(t, cu, "cuMemAllocAsync", 11020, 0);
            show(t, cu, "cuMemCreate", 10010, 0);
            show(t, cu, "cuMemCreate", 10020, 0);
        },
    ),
    Behaviour::new(
        "entry.unknown_names",
        "Names that do not exist, and names with a suffix",
        |t, cu| {
            show(t, cu, "cuNoSuchCall", 12000, 0);
            show(t, cu, "cuMemAlloc_v2", 12000, 0);
            show(t, cu, "", 12000, 0);
        },
    ),
    Behaviour::new(
        "entry.first_form",
        "cuGetProcAddress without a status answers by its code",
        |t, cu| {
            let mut at = null_mut();
            t.code(
                "known",
                cu.cuGetProcAddress(c"cuMemAlloc".as_ptr(), &mut at, 12000, 0),
            );
            t.see("found", !at.is_null());
            t.code(
                "unknown",
                cu.cuGetProcAddress(c"cuNoSuchCall".as_ptr(), &mut at, 12000, 0),
            );
        },
    )
    .fact(&["known: SUCCESS", "found: true", "unknown: NOT_FOUND"]),
    Behaviour::new(
        "entry.no_status_place",
        "The second form without a place for the status",
        |t, cu| {
            let mut at = null_mut();
            let none = null_mut();
            t.code(
                "known",
                cu.cuGetProcAddress_v2(c"cuMemFree".as_ptr(), &mut at, 12000, 0, none),
            );
            t.see("found", !at.is_null());
        },
    )
    .fact(&["known: SUCCESS", "found: true"]),
    Behaviour::new(
        "entry.per_thread_flag",
        "With the flag for per-thread streams another function is given where there is one",
        |t, cu| {
            for name in ["cuMemAllocAsync", "cuMemcpyHtoD", "cuMemAlloc", "cuMemsetD8Async"] {
                let (legacy, own) = (
                    look_up(cu, name, 12000, CU_GET_PROC_ADDRESS_LEGACY_STREAM.0.into()).2,
                    look_up(
                        cu,
                        name,
                        12000,
                        CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.0.into(),
                    )
                    .2,
                );
                t.see(name, legacy != own);
            }
            t.see(
                "it is the _ptsz one",
                look_up(cu, "cuMemAllocAsync", 12000, 2).2 == symbol("cuMemAllocAsync_ptsz"),
            );
        },
    )
    .fact(&[
        "cuMemAllocAsync: true",
        "cuMemcpyHtoD: true",
        "cuMemAlloc: false",
        "cuMemsetD8Async: true",
        "it is the _ptsz one: true",
    ]),
    Behaviour::new(
        "entry.per_thread_call_works",
        "A per-thread form found by name allocates in that thread's stream",
        |t, cu| {
            let (_, _, alloc) = look_up(cu, "cuMemAllocAsync", 12000, 2);
            // SAFETY: the driver's function of this name and version, with these parameters.
            let alloc: AllocAsync = unsafe { std::mem::transmute(alloc) };
            let mut address = CUdeviceptr::NULL;
            // SAFETY: a live place and the default stream.
            t.code("alloc", unsafe { alloc(&mut address, MIB, NO_STREAM) });
            t.code("wait", cu.cuStreamSynchronize(CU_STREAM_PER_THREAD));
            t.code("free", cu.cuMemFreeAsync(address, CU_STREAM_PER_THREAD));
        },
    )
    .fact(&["alloc: SUCCESS", "wait: SUCCESS", "free: SUCCESS"]),
    Behaviour::new(
        "entry.it_finds_itself",
        "cuGetProcAddress finds itself and works through that",
        |t, cu| {
            let (_, _, at) = look_up(cu, "cuGetProcAddress", 12000, 0);
            t.see("found", !at.is_null());
            type Ask = unsafe extern "C" fn(
                *const std::ffi::c_char,
                *mut *mut c_void,
                i32,
                u64,
                *mut CUdriverProcAddressQueryResult,
            ) -> CUresult;
            // SAFETY: the second form, which is the one of this version.
            let ask: Ask = unsafe { std::mem::transmute(at) };
            let (mut found, mut status) = (null_mut(), CUdriverProcAddressQueryResult(77));
            // SAFETY: live places and a C string.
            t.code("ask", unsafe {
                ask(c"cuMemAlloc".as_ptr(), &mut found, 12000, 0, &mut status)
            });
            t.see("the same", found == look_up(cu, "cuMemAlloc", 12000, 0).2);
        },
    )
    .fact(&["found: true", "ask: SUCCESS", "the same: true"]),
    Behaviour::new(
        "entry.every_exported_call_is_there",
        "dlsym finds the memory calls in all their versions",
        |t, _| {
            for name in [
                "cuMemAlloc_v2",
                "cuMemAllocPitch_v2",
                "cuMemFree_v2",
                "cuMemGetInfo_v2",
                "cuMemAllocAsync_ptsz",
                "cuMemcpyHtoD_v2_ptds",
                "cuIpcOpenMemHandle",
                "cuIpcOpenMemHandle_v2",
                "cuMemNoSuchCall",
            ] {
                t.see(name, !symbol(name).is_null());
            }
        },
    ),
    Behaviour::new(
        "entry.error_names",
        "Codes have their names and texts",
        |t, cu| {
            for code in [0, 1, 2, 201, 700, 12_345] {
                let mut name: *const std::ffi::c_char = std::ptr::null();
                let asked = cu.cuGetErrorName(CUresult(code), &mut name);
                let text = if asked == CUresult::SUCCESS && !name.is_null() {
                    // SAFETY: the driver stored a static C string.
                    unsafe { std::ffi::CStr::from_ptr(name) }
                        .to_string_lossy()
                        .into_owned()
                } else {
                    short(asked)
                };
                t.see(&code.to_string(), text);
            }
        },
    )
    .fact(&[
        "0: CUDA_SUCCESS",
        "1: CUDA_ERROR_INVALID_VALUE",
        "2: CUDA_ERROR_OUT_OF_MEMORY",
        "201: CUDA_ERROR_INVALID_CONTEXT",
        "700: CUDA_ERROR_ILLEGAL_ADDRESS",
        "12345: INVALID_VALUE",
    ]),
    Behaviour::new(
        "fork.a_child_cannot_use_the_parents_driver",
        "After a fork the child has no driver, and the parent's memory is unharmed",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            cu.write(address, &pattern(4 * MIB, 1));
            let child = in_a_child(|| {
                let mut other = CUdeviceptr::NULL;
                i32::from(cu.cuMemAlloc_v2(&mut other, 64) == CUresult::SUCCESS)
            });
            t.see("child", child);
            t.see("bytes", compare(&cu.read(address, 4 * MIB), &pattern(4 * MIB, 1)));
            t.code("free", cu.cuMemFree_v2(address));
        },
    )
    .fact(&["child: 0", "bytes: right", "free: SUCCESS"]),
    Behaviour::new(
        "fork.a_child_that_does_nothing",
        "A child that only ends leaves the parent's memory as it is",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            cu.write(address, &pattern(4 * MIB, 2));
            for _ in 0..3 {
                t.see("child", in_a_child(|| 7));
            }
            t.see("bytes", compare(&cu.read(address, 4 * MIB), &pattern(4 * MIB, 2)));
        },
    )
    .fact(&["child: 7", "child: 7", "child: 7", "bytes: right"]),
    Behaviour::new(
        "fork.before_init_the_child_may_start",
        "A fork before cuInit leaves both free to start",
        |t, cu| {
            let child = in_a_child(|| {
                must("cuInit", cu.cuInit(0));
                cu.primary(0);
                let address = cu.alloc(MIB);
                cu.write(address, &[1]);
                i32::from(cu.read(address, 1)[0]) + 40
            });
            t.see("child", child);
            must("cuInit", cu.cuInit(0));
            cu.primary(0);
            let address = cu.alloc(MIB);
            t.code("free", cu.cuMemFree_v2(address));
        },
    )
    .raw()
    .fact(&["child: 41", "free: SUCCESS"]),
    Behaviour::new(
        "fork.a_started_program_is_its_own",
        "A program started by exec has nothing of its parent's",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            cu.write(address, &[3; 8]);
            let status = Command::new("/bin/true").status();
            t.see("child", status.map_or(-1, |status| status.code().unwrap_or(-2)));
            t.see("byte", cu.read(address, 1)[0]);
        },
    )
    .fact(&["child: 0", "byte: 3"]),
    Behaviour::new(
        "threads.allocate_at_once",
        "Eight threads allocate, write, check and free at once",
        |t, cu| {
            let wrong: usize = (0..8_u8)
                .map(|n| {
                    std::thread::spawn(move || {
                        cu.primary(0);
                        (0..6)
                            .filter(|round| {
                                let bytes = 4096 * (1 + usize::from(n)) + round;
                                let address = cu.alloc(bytes);
                                cu.write(address, &pattern(bytes, n));
                                let right = cu.read(address, bytes) == pattern(bytes, n);
                                cu.free(address);
                                !right
                            })
                            .count()
                    })
                })
                .collect::<Vec<_>>()
                .into_iter()
                .map(|thread| thread.join().unwrap_or(99))
                .sum();
            t.see("wrong", wrong);
        },
    )
    .fact(&["wrong: 0"]),
    Behaviour::new(
        "threads.free_what_another_allocated",
        "Memory goes through several threads",
        |t, cu| {
            let addresses: Vec<CUdeviceptr> = (0..16).map(|_| cu.alloc(64 * 1024)).collect();
            let codes: Vec<CUresult> = addresses
                .into_iter()
                .map(|address| {
                    std::thread::spawn(move || {
                        cu.primary(0);
                        cu.cuMemFree_v2(address)
                    })
                })
                .map(|thread| thread.join().expect("the thread ends"))
                .collect();
            t.see(
                "freed",
                codes.iter().filter(|code| **code == CUresult::SUCCESS).count(),
            );
        },
    )
    .fact(&["freed: 16"]),
    Behaviour::new(
        "threads.per_thread_streams_are_apart",
        "The per-thread default streams of two threads are two streams",
        |t, cu| {
            let address = cu.alloc(8192);
            let threads: Vec<_> = [0_usize, 1]
                .into_iter()
                .map(|n| {
                    std::thread::spawn(move || {
                        cu.primary(0);
                        let at = plus(address, n * 4096);
                        let set = cu.cuMemsetD8Async_ptsz(at, n as u8 + 1, 4096, NO_STREAM);
                        (set, cu.cuStreamSynchronize_ptsz(NO_STREAM))
                    })
                })
                .collect();
            for thread in threads {
                let (set, wait) = thread.join().expect("the thread ends");
                t.see("results", format!("{} {}", short(set), short(wait)));
            }
            t.see(
                "bytes",
                format!(
                    "{} {}",
                    cu.read(address, 1)[0],
                    cu.read(plus(address, 4096), 1)[0]
                ),
            );
        },
    )
    .fact(&[
        "results: SUCCESS SUCCESS",
        "results: SUCCESS SUCCESS",
        "bytes: 1 2",
    ]),
];
