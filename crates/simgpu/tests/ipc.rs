//! Legacy interprocess handles by the driver's rules: what has one, who opens it, how often, and what closing does.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use common::*;
use ebb_abi::*;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
const SMALL: &[(&str, &str)] = &[("EBB_SIM_MEMORY", "256Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")];

fn handle(cuda: &Cuda, address: CUdeviceptr) -> Result<CUipcMemHandle, CUresult> {
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    cuda.cuIpcGetMemHandle(&mut handle, address).ok().map(|()| handle)
}

#[test]
fn what_has_a_handle() {
    alone("what_has_a_handle", SMALL, |cuda| {
        let a = cuda.alloc(4 * MIB);
        let first = handle(cuda, a).unwrap();
        assert_eq!(
            handle(cuda, a).unwrap().reserved,
            first.reserved,
            "the same each time"
        );
        assert_eq!(
            handle(cuda, plus(a, 77)).unwrap().reserved,
            first.reserved,
            "of the allocation"
        );
        // New memory at the old address has another.
        ok(cuda.cuMemFree_v2(a));
        let again = cuda.alloc(4 * MIB);
        assert_eq!(again, a);
        assert_ne!(handle(cuda, again).unwrap().reserved, first.reserved);
        let mapped = cuda.reserve(2 * MIB);
        cuda.map(mapped, 2 * MIB, cuda.create(2 * MIB));
        let mut other = CUdeviceptr::NULL;
        ok(cuda.cuMemAllocManaged(&mut other, 100, 1));
        let mut piece = CUdeviceptr::NULL;
        ok(cuda.cuMemAllocAsync(&mut piece, 100, NO_STREAM));
        for address in [mapped, other, piece, CUdeviceptr(4096)] {
            assert_eq!(handle(cuda, address).err(), Some(INVALID));
        }
        let mut name = CUipcEventHandle { reserved: [0; 64] };
        let plain = cuda.event();
        assert_eq!(
            cuda.cuIpcGetEventHandle(&mut name, plain),
            CUresult::ERROR_INVALID_HANDLE
        );
        let mut event = CUevent::NULL;
        assert_eq!(
            cuda.cuEventCreate(&mut event, CU_EVENT_INTERPROCESS.0),
            INVALID,
            "with timing"
        );
        ok(cuda.cuEventCreate(&mut event, CU_EVENT_INTERPROCESS.0 | CU_EVENT_DISABLE_TIMING.0));
        ok(cuda.cuIpcGetEventHandle(&mut name, event));
        assert_eq!(
            cuda.cuIpcOpenEventHandle(&mut event, name),
            CUresult::ERROR_INVALID_CONTEXT,
            "its own"
        );
        let own = handle(cuda, again).unwrap();
        assert_eq!(
            cuda.cuIpcOpenMemHandle_v2(&mut other, own, 1),
            CUresult::ERROR_INVALID_CONTEXT,
            "its own"
        );
        assert_eq!(cuda.cuIpcCloseMemHandle(again), INVALID, "not opened");
    });
}

#[test]
fn opened_twice_and_closed_twice() {
    if plays("owner") {
        let cuda = Cuda::start();
        cuda.alloc(1000);
        let (a, b) = (cuda.alloc(1000), cuda.alloc(6 * MIB));
        cuda.write(a, b"small");
        cuda.write(b, b"large");
        for address in [a, b] {
            say(&hex(&handle(&cuda, address).unwrap().reserved));
        }
        hear();
        assert_eq!(cuda.read(a, 5), b"SMALL");
        say("seen");
        hear();
        return;
    }
    if plays("guest") {
        let cuda = Cuda::start();
        let mut place = CUdeviceptr::NULL;
        let [a, b] = [hear(), hear()].map(|text| CUipcMemHandle {
            reserved: unhex(&text),
        });
        assert_eq!(cuda.cuIpcOpenMemHandle_v2(&mut place, a, 0), INVALID, "flags");
        let mut wrong = a;
        wrong.reserved[0] ^= 1;
        assert_eq!(cuda.cuIpcOpenMemHandle_v2(&mut place, wrong, 1), INVALID);
        let open = |handle| {
            let mut address = CUdeviceptr::NULL;
            ok(cuda.cuIpcOpenMemHandle_v2(&mut address, handle, 1));
            address
        };
        let (small, large) = (open(a), open(b));
        assert_eq!(cuda.read(small, 5), b"small");
        assert_eq!(cuda.read(large, 5), b"large");
        assert_eq!(open(a), small, "the same pointer again");
        assert_eq!(handle(&cuda, large).err(), Some(INVALID), "not passed on");
        assert_eq!(cuda.cuMemFree_v2(large), INVALID);
        assert_eq!(cuda.cuMemFreeAsync(large, NO_STREAM), INVALID);
        ok(cuda.cuIpcCloseMemHandle(small));
        cuda.write(small, b"SMALL");
        ok(cuda.cuIpcCloseMemHandle(small));
        assert_eq!(cuda.cuIpcCloseMemHandle(small), INVALID);
        assert_eq!(cuda.read(large, 5), b"large");
        assert_eq!(
            cuda.free_bytes(),
            248 * MIB,
            "the owner's two blocks and nothing else"
        );
        say("done");
        // The context's end closes what is still open.
        ok(cuda.cuDevicePrimaryCtxReset_v2(CUdevice(0)));
        hear();
        // The owner is gone: its handle opens nothing.
        let mut context = CUcontext::NULL;
        ok(cuda.cuDevicePrimaryCtxRetain(&mut context, CUdevice(0)));
        ok(cuda.cuCtxSetCurrent(context));
        assert_eq!(
            cuda.cuIpcOpenMemHandle_v2(&mut place, b, 1),
            CUresult::ERROR_INVALID_HANDLE
        );
        say("end");
        return;
    }
    let dir = state_dir();
    let test = "opened_twice_and_closed_twice";
    let mut owner = Actor::start(command(test, "owner", dir.path(), SMALL));
    let handles = [owner.hear(), owner.hear()];
    let mut guest = Actor::start(command(test, "guest", dir.path(), SMALL));
    handles.iter().for_each(|handle| guest.tell(handle));
    assert_eq!(guest.hear(), "done");
    owner.tell("look");
    assert_eq!(owner.hear(), "seen");
    owner.kill();
    guest.tell("go on");
    assert_eq!(guest.hear(), "end");
}
