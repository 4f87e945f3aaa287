//! The driver's own checkpoint: its states, what each call answers in each of them, and what stands in its way.

#![allow(non_snake_case, reason = "test code with the driver's names")]

mod common;

use std::ptr::null_mut;

use common::*;
use ebb_abi::*;

const ILLEGAL: CUresult = CUresult::ERROR_ILLEGAL_STATE;
const UNSUPPORTED: CUresult = CUresult::ERROR_NOT_SUPPORTED;

#[test]
fn the_states() {
    alone("the_states", &[], |cuda| {
        let pid = std::process::id() as i32;
        let lock = || cuda.cuCheckpointProcessLock(pid, null_mut());
        let out = || cuda.cuCheckpointProcessCheckpoint(pid, null_mut());
        let back = || cuda.cuCheckpointProcessRestore(pid, null_mut());
        let unlock = || cuda.cuCheckpointProcessUnlock(pid, null_mut());
        let state = || {
            let mut state = CUprocessState(9);
            ok(cuda.cuCheckpointProcessGetState(pid, &mut state));
            state
        };
        assert_eq!(state(), CU_PROCESS_STATE_RUNNING);
        assert_eq!([out(), back(), unlock()], [ILLEGAL; 3]);
        ok(lock());
        assert_eq!(state(), CU_PROCESS_STATE_LOCKED);
        assert_eq!([lock(), back()], [ILLEGAL; 2]);
        ok(out());
        assert_eq!(state(), CU_PROCESS_STATE_CHECKPOINTED);
        assert_eq!([lock(), out(), unlock()], [ILLEGAL; 3]);
        ok(back());
        assert_eq!(state(), CU_PROCESS_STATE_LOCKED);
        ok(unlock());
        assert_eq!(state(), CU_PROCESS_STATE_RUNNING);
        assert_eq!(
            cuda.cuCheckpointProcessLock(-4, null_mut()),
            CUresult::ERROR_INVALID_VALUE
        );
    });
}

#[test]
fn what_stands_in_its_way() {
    alone("what_stands_in_its_way", &[], |cuda| {
        let pid = std::process::id() as i32;
        let try_it = || {
            ok(cuda.cuCheckpointProcessLock(pid, null_mut()));
            let result = cuda.cuCheckpointProcessCheckpoint(pid, null_mut());
            if result == CUresult::SUCCESS {
                ok(cuda.cuCheckpointProcessRestore(pid, null_mut()));
            }
            ok(cuda.cuCheckpointProcessUnlock(pid, null_mut()));
            result
        };
        ok(try_it());
        let mut managed = CUdeviceptr::NULL;
        ok(cuda.cuMemAllocManaged(&mut managed, 100, CU_MEM_ATTACH_GLOBAL.0));
        assert_eq!(try_it(), UNSUPPORTED);
        ok(cuda.cuMemFree_v2(managed));
        ok(try_it());
        let shared = cuda.alloc(100);
        let mut name = CUipcMemHandle { reserved: [0; 64] };
        ok(cuda.cuIpcGetMemHandle(&mut name, shared));
        assert_eq!(try_it(), UNSUPPORTED);
        ok(cuda.cuMemFree_v2(shared));
        ok(try_it());
    });
}
