//! The simulated NVML as a program sees it, on a machine whose ledger another attachment of this process fills.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

use std::ffi::{CStr, c_char};
use std::process::Command;

use ebb_abi::nvml::*;
use ebb_simdev::{Config, Machine, device_uuid, uuid_text};
use libloading::Library;

fn load() -> Library {
    let exe = std::env::current_exe().unwrap();
    let deps = exe.parent().unwrap();
    let beside = deps.join("libsimnvml.so");
    let path = if beside.exists() {
        beside
    } else {
        deps.parent().unwrap().join("libsimnvml.so")
    };
    unsafe { Library::new(path) }.unwrap()
}

macro_rules! call {
    ($library:expr, $name:ident($($argument:expr => $ty:ty),*)) => {{
        type Call = unsafe extern "C" fn($($ty),*) -> nvmlReturn_t;
        unsafe {
            let call = $library.get::<Call>(concat!(stringify!($name), "\0").as_bytes()).unwrap();
            call($($argument),*)
        }
    }};
}

/// Runs in a process of its own, because the library reads the environment.
fn alone(test: &str, variables: &[(&str, &str)], body: impl FnOnce(&Library)) {
    if std::env::var_os("EBB_SIM_TEST_ROLE").is_some() {
        body(&load());
        return;
    }
    let dir = tempfile::Builder::new()
        .prefix("ebb-sim-test-")
        .tempdir_in("/dev/shm")
        .unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("EBB_SIM_TEST_ROLE", "alone")
        .env("EBB_SIM_DIR", dir.path())
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn nothing_before_init() {
    alone("nothing_before_init", &[], |nvml| {
        let mut count = 7_u32;
        let ask = |count: &mut u32| call!(nvml, nvmlDeviceGetCount_v2(count => *mut u32));
        assert_eq!(ask(&mut count), NVML_ERROR_UNINITIALIZED);
        assert_eq!(call!(nvml, nvmlInit_v2()), NVML_SUCCESS);
        assert_eq!(call!(nvml, nvmlInit_v2()), NVML_SUCCESS);
        assert_eq!(call!(nvml, nvmlShutdown()), NVML_SUCCESS);
        assert_eq!((ask(&mut count), count), (NVML_SUCCESS, 1));
        assert_eq!(call!(nvml, nvmlShutdown()), NVML_SUCCESS);
        assert_eq!(ask(&mut count), NVML_ERROR_UNINITIALIZED);
        assert_eq!(call!(nvml, nvmlShutdown()), NVML_ERROR_UNINITIALIZED);
    });
}

#[test]
fn devices_are_physical_and_in_order() {
    let variables = [("EBB_SIM_DEVICES", "3"), ("CUDA_VISIBLE_DEVICES", "2")];
    alone("devices_are_physical_and_in_order", &variables, |nvml| {
        assert_eq!(call!(nvml, nvmlInit_v2()), NVML_SUCCESS);
        let mut count = 0;
        assert_eq!(
            call!(nvml, nvmlDeviceGetCount_v2(&mut count => *mut u32)),
            NVML_SUCCESS
        );
        assert_eq!(count, 3);
        for index in 0..3 {
            let (mut device, mut back, mut number) = (nvmlDevice_t(0), nvmlDevice_t(0), 9);
            let place = &mut device;
            assert_eq!(
                call!(nvml, nvmlDeviceGetHandleByIndex_v2(index => u32, place => *mut nvmlDevice_t)),
                NVML_SUCCESS
            );
            let mut text: [c_char; 96] = [0; 96];
            let room = text.as_mut_ptr();
            let result =
                call!(nvml, nvmlDeviceGetUUID(device => nvmlDevice_t, room => *mut c_char, 96 => u32));
            assert_eq!(result, NVML_SUCCESS);
            let uuid = unsafe { CStr::from_ptr(text.as_ptr()) };
            assert_eq!(uuid.to_str().unwrap(), uuid_text(device_uuid(index)));
            let name = uuid.as_ptr();
            let place = &mut back;
            let result =
                call!(nvml, nvmlDeviceGetHandleByUUID(name => *const c_char, place => *mut nvmlDevice_t));
            assert_eq!((result, back), (NVML_SUCCESS, device));
            let place = &mut number;
            assert_eq!(
                call!(nvml, nvmlDeviceGetIndex(device => nvmlDevice_t, place => *mut u32)),
                NVML_SUCCESS
            );
            assert_eq!(number, index);
            let result =
                call!(nvml, nvmlDeviceGetUUID(device => nvmlDevice_t, room => *mut c_char, 5 => u32));
            assert_eq!(result, NVML_ERROR_INSUFFICIENT_SIZE);
            let mut pci = nvmlPciInfo_t::default();
            let place = &mut pci;
            let result =
                call!(nvml, nvmlDeviceGetPciInfo_v3(device => nvmlDevice_t, place => *mut nvmlPciInfo_t));
            assert_eq!(result, NVML_SUCCESS);
            let (bus, place) = (pci.busId.as_ptr(), &mut back);
            let result = call!(nvml, nvmlDeviceGetHandleByPciBusId_v2(bus => *const c_char, place => *mut nvmlDevice_t));
            assert_eq!((result, back), (NVML_SUCCESS, device));
            let (mut now, mut then) = (0, 0);
            let (a, b) = (&mut now, &mut then);
            let result =
                call!(nvml, nvmlDeviceGetMigMode(device => nvmlDevice_t, a => *mut u32, b => *mut u32));
            assert_eq!(result, NVML_ERROR_NOT_SUPPORTED);
        }
        let mut device = nvmlDevice_t(0);
        let place = &mut device;
        let result = call!(nvml, nvmlDeviceGetHandleByIndex_v2(3 => u32, place => *mut nvmlDevice_t));
        assert_eq!(result, NVML_ERROR_INVALID_ARGUMENT);
    });
}

#[test]
fn memory_and_processes_are_the_ledgers() {
    alone(
        "memory_and_processes_are_the_ledgers",
        &[("EBB_SIM_MEMORY", "256Mi")],
        |nvml| {
            let machine = Machine::open(Config::from_env().unwrap()).unwrap();
            machine.attach().unwrap();
            assert_eq!(call!(nvml, nvmlInit_v2()), NVML_SUCCESS);
            let mut device = nvmlDevice_t(0);
            let place = &mut device;
            assert_eq!(
                call!(nvml, nvmlDeviceGetHandleByIndex_v2(0 => u32, place => *mut nvmlDevice_t)),
                NVML_SUCCESS
            );
            let processes = |room: u32| {
                let mut list = [nvmlProcessInfo_v2_t::default(); 4];
                let mut count = room;
                let (number, start) = (&mut count, list.as_mut_ptr());
                let result = call!(nvml, nvmlDeviceGetComputeRunningProcesses_v3(
                device => nvmlDevice_t, number => *mut u32, start => *mut nvmlProcessInfo_v2_t));
                (result, count, list[0].pid, list[0].usedGpuMemory)
            };
            assert_eq!(processes(4), (NVML_SUCCESS, 0, 0, 0));
            assert!(machine.charge(0, 100 << 20));
            assert!(machine.charge_context(0, 16 << 20));
            assert!(!machine.charge(0, 141 << 20));
            assert_eq!(processes(4), (NVML_SUCCESS, 1, std::process::id(), 116 << 20));
            assert_eq!(processes(0).0, NVML_ERROR_INSUFFICIENT_SIZE);
            let mut memory = nvmlMemory_v2_t {
                version: nvmlMemory_v2,
                ..nvmlMemory_v2_t::default()
            };
            let place = &mut memory;
            let ask = |place: &mut nvmlMemory_v2_t| call!(nvml, nvmlDeviceGetMemoryInfo_v2(device => nvmlDevice_t, place => *mut nvmlMemory_v2_t));
            assert_eq!(ask(place), NVML_SUCCESS);
            assert_eq!(
                (memory.total, memory.used, memory.free),
                (256 << 20, 116 << 20, 140 << 20)
            );
            memory.version = 1;
            assert_eq!(ask(&mut memory), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
            let mut plain = nvmlMemory_t::default();
            let place = &mut plain;
            assert_eq!(
                call!(nvml, nvmlDeviceGetMemoryInfo(device => nvmlDevice_t, place => *mut nvmlMemory_t)),
                NVML_SUCCESS
            );
            assert_eq!((plain.used, plain.free), (116 << 20, 140 << 20));
            let mut name: [c_char; 8] = [1; 8];
            let (room, pid) = (name.as_mut_ptr(), std::process::id());
            let result = call!(nvml, nvmlSystemGetProcessName(pid => u32, room => *mut c_char, 8 => u32));
            assert_eq!((result, name[7]), (NVML_SUCCESS, 0));
        },
    );
}
