//! The simulated driver behaves as the real one was seen to behave, seen from a program: devices, contexts, look-ups, faults.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use std::ptr::null_mut;

use common::*;
use ebb_abi::*;

#[test]
fn exports_every_symbol_of_the_interface() {
    let cuda = Cuda::load();
    for name in ALL_NAMES {
        let symbol = format!("{name}\0");
        assert!(
            unsafe { cuda.library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_ok(),
            "{name}"
        );
    }
    assert_eq!(ALL_NAMES.len(), 685);
}

#[test]
fn nothing_works_before_cuInit() {
    alone_raw("nothing_works_before_cuInit", &[], || {
        let cuda = Cuda::load();
        let mut count = 0;
        assert_eq!(cuda.cuDeviceGetCount(&mut count), CUresult::ERROR_NOT_INITIALIZED);
        ok(cuda.cuDriverGetVersion(&mut count));
        assert!(count >= 12000);
        assert_eq!(cuda.cuInit(1), CUresult::ERROR_INVALID_VALUE);
        ok(cuda.cuInit(0));
        ok(cuda.cuInit(0));
        ok(cuda.cuDeviceGetCount(&mut count));
        assert_eq!(count, 1);
    });
}

#[test]
fn unknown_features_say_so() {
    alone("unknown_features_say_so", &[], |cuda| {
        let mut reference = CUtexref::NULL;
        assert_eq!(cuda.cuTexRefCreate(&mut reference), CUresult::ERROR_NOT_SUPPORTED);
    });
}

#[test]
fn error_names() {
    let cuda = Cuda::load();
    let mut text = std::ptr::null();
    ok(cuda.cuGetErrorName(CUresult::ERROR_OUT_OF_MEMORY, &mut text));
    assert_eq!(
        unsafe { std::ffi::CStr::from_ptr(text) },
        c"CUDA_ERROR_OUT_OF_MEMORY"
    );
    assert_eq!(
        cuda.cuGetErrorName(CUresult(123_456), &mut text),
        CUresult::ERROR_INVALID_VALUE
    );
    assert!(text.is_null());
}

#[test]
fn devices_and_visibility() {
    let variables = [
        ("EBB_SIM_DEVICES", "3"),
        ("CUDA_VISIBLE_DEVICES", "2,0"),
        ("EBB_SIM_MEMORY", "256Mi"),
    ];
    alone("devices_and_visibility", &variables, |cuda| {
        let (mut count, mut bytes) = (0, 0);
        ok(cuda.cuDeviceGetCount(&mut count));
        assert_eq!(count, 2);
        ok(cuda.cuDeviceTotalMem_v2(&mut bytes, CUdevice(0)));
        assert_eq!(bytes, 256 * MIB);
        let mut uuid = CUuuid::default();
        ok(cuda.cuDeviceGetUuid_v2(&mut uuid, CUdevice(0)));
        let wanted = ebb_simdev::device_uuid(2).0;
        assert_eq!(uuid.bytes.map(|byte| byte as u8), wanted);
        let mut device = CUdevice(9);
        assert_eq!(cuda.cuDeviceGet(&mut device, 2), CUresult::ERROR_INVALID_DEVICE);
        let mut bus = [0; 20];
        ok(cuda.cuDeviceGetPCIBusId(bus.as_mut_ptr(), 20, CUdevice(1)));
        assert_eq!(c_bytes(&bus), "0000:17:00.0");
        ok(cuda.cuDeviceGetByPCIBusId(&mut device, bus.as_ptr()));
        assert_eq!(device, CUdevice(1));
        let mut value = 0;
        ok(cuda.cuDeviceGetAttribute(
            &mut value,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
            CUdevice(0),
        ));
        assert_eq!(value, 1);
    });
}

#[test]
fn no_visible_device() {
    alone_raw("no_visible_device", &[("CUDA_VISIBLE_DEVICES", "")], || {
        assert_eq!(Cuda::load().cuInit(0), CUresult::ERROR_NO_DEVICE);
    });
}

#[test]
fn contexts_cost_and_nest() {
    alone_raw(
        "contexts_cost_and_nest",
        &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "16Mi")],
        || {
            let cuda = Cuda::load();
            ok(cuda.cuInit(0));
            let mut free = 0;
            assert_eq!(
                cuda.cuMemGetInfo_v2(&mut free, null_mut()),
                CUresult::ERROR_INVALID_CONTEXT
            );
            let (mut a, mut b, mut top) = (CUcontext::NULL, CUcontext::NULL, CUcontext::NULL);
            ok(cuda.cuCtxCreate_v2(&mut a, 0, CUdevice(0)));
            assert_eq!(cuda.free_bytes(), 48 * MIB);
            ok(cuda.cuCtxCreate_v4(&mut b, null_mut(), 0, CUdevice(0)));
            assert_eq!(cuda.free_bytes(), 32 * MIB);
            let inside = cuda.alloc(4 * MIB);
            ok(cuda.cuCtxPopCurrent_v2(&mut top));
            assert_eq!(top, b);
            ok(cuda.cuCtxGetCurrent(&mut top));
            assert_eq!(top, a);
            // What lives in a context dies with it.
            ok(cuda.cuCtxDestroy_v2(b));
            assert_eq!(cuda.free_bytes(), 48 * MIB);
            assert_eq!(cuda.cuMemFree_v2(inside), CUresult::ERROR_INVALID_VALUE);
            ok(cuda.cuCtxDestroy_v2(a));
            ok(cuda.cuCtxGetCurrent(&mut top));
            assert!(top.is_null());
            assert_eq!(cuda.cuCtxSynchronize(), CUresult::ERROR_INVALID_CONTEXT);
            // The third one does not fit any more.
            for _ in 0..4 {
                ok(cuda.cuCtxCreate_v2(&mut a, 0, CUdevice(0)));
            }
            assert_eq!(
                cuda.cuCtxCreate_v2(&mut a, 0, CUdevice(0)),
                CUresult::ERROR_OUT_OF_MEMORY
            );
        },
    );
}

#[test]
fn primary_contexts_are_counted() {
    alone_raw("primary_contexts_are_counted", &[], || {
        let cuda = Cuda::load();
        ok(cuda.cuInit(0));
        let device = CUdevice(0);
        let (mut first, mut second, mut flags, mut active) = (CUcontext::NULL, CUcontext::NULL, 0, 9);
        ok(cuda.cuDevicePrimaryCtxRetain(&mut first, device));
        ok(cuda.cuDevicePrimaryCtxRetain(&mut second, device));
        assert_eq!(first, second);
        ok(cuda.cuDevicePrimaryCtxRelease_v2(device));
        ok(cuda.cuDevicePrimaryCtxGetState(device, &mut flags, &mut active));
        assert_eq!(active, 1);
        ok(cuda.cuDevicePrimaryCtxRelease_v2(device));
        ok(cuda.cuDevicePrimaryCtxGetState(device, &mut flags, &mut active));
        assert_eq!(active, 0);
        assert_eq!(
            cuda.cuDevicePrimaryCtxRelease_v2(device),
            CUresult::ERROR_INVALID_CONTEXT
        );
        ok(cuda.cuDevicePrimaryCtxRetain(&mut second, device));
        assert_eq!(first, second);
    });
}

#[test]
fn proc_addresses_by_version() {
    let cuda = Cuda::load();
    let find = |name: &std::ffi::CStr, version: i32, flags: u64| {
        let mut address = null_mut();
        let mut status = CUdriverProcAddressQueryResult(9);
        let result = cuda.cuGetProcAddress_v2(name.as_ptr(), &mut address, version, flags, &mut status);
        (result.0, address as usize, status.0)
    };
    let symbol = |name: &str| unsafe {
        let symbol = cuda
            .library
            .get::<unsafe extern "C" fn()>(format!("{name}\0").as_bytes())
            .unwrap();
        *symbol as *const () as usize
    };
    assert_eq!(find(c"cuMemAlloc", 13000, 0), (0, symbol("cuMemAlloc_v2"), 0));
    assert_eq!(find(c"cuMemAlloc", 2000, 0), (0, symbol("cuMemAlloc"), 0));
    assert_eq!(
        find(c"cuMemcpyHtoD", 13000, 2),
        (0, symbol("cuMemcpyHtoD_v2_ptds"), 0)
    );
    assert_eq!(find(c"cuMemcpyHtoD", 13000, 1), (0, symbol("cuMemcpyHtoD_v2"), 0));
    assert_eq!(
        find(c"cuGetProcAddress", 12000, 0),
        (0, symbol("cuGetProcAddress_v2"), 0)
    );
    assert_eq!(
        find(c"cuGetProcAddress", 11030, 0),
        (0, symbol("cuGetProcAddress"), 0)
    );
    assert_eq!(find(c"cuMemAllocAsync", 11010, 0), (0, 0, 2));
    assert_eq!(find(c"cuNoSuchThing", 13000, 0), (0, 0, 1));
    let mut address = null_mut();
    let old = cuda.cuGetProcAddress(c"cuNoSuchThing".as_ptr(), &mut address, 13000, 0);
    assert_eq!(old, CUresult::ERROR_NOT_FOUND);
}

#[test]
fn calls_fail_when_told() {
    let variables = [("EBB_SIM_FAULT", "cuMemCreate:2:2,cuMemMap:*:999")];
    alone("calls_fail_when_told", &variables, |cuda| {
        let properties = cuda.device_properties();
        assert!(cuda.try_create(2 * MIB, &properties).is_ok());
        assert_eq!(
            cuda.try_create(2 * MIB, &properties),
            Err(CUresult::ERROR_OUT_OF_MEMORY)
        );
        let handle = cuda.create(2 * MIB);
        let address = cuda.reserve(2 * MIB);
        for _ in 0..3 {
            assert_eq!(
                cuda.cuMemMap(address, 2 * MIB, 0, handle, 0),
                CUresult::ERROR_UNKNOWN
            );
        }
        assert_eq!(cuda.free_bytes(), (1024 - 16 - 4) * MIB);
    });
}

#[test]
fn calls_are_traced() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    alone("calls_are_traced", &[("EBB_SIM_TRACE", path)], |cuda| {
        cuda.alloc(8);
    });
    if is_main() {
        let text = std::fs::read_to_string(path).unwrap();
        let calls: Vec<&str> = text.lines().collect();
        assert_eq!(
            calls,
            [
                "cuInit",
                "cuDevicePrimaryCtxRetain",
                "cuCtxSetCurrent",
                "cuMemAlloc_v2"
            ]
        );
    }
}

#[test]
fn a_forked_child_has_no_device() {
    alone("a_forked_child_has_no_device", &[], |cuda| {
        cuda.alloc(2 * MIB);
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let codes = [
                cuda.cuInit(0),
                cuda.cuCtxSynchronize(),
                cuda.cuMemFree_v2(CUdeviceptr(1)),
            ];
            let right = codes.iter().all(|code| *code == CUresult::ERROR_NOT_INITIALIZED);
            unsafe { libc::_exit(if right { 0 } else { 1 }) };
        }
        let mut status = 0;
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(status, 0);
        cuda.alloc(2 * MIB);
    });
}
