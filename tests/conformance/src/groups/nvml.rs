//! NVML in small: what monitoring inside a program is told about memory.

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;

use ebb_abi::nvml::*;
use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::driver::Driver;
use crate::helpers::*;
use crate::observe::Test;

/// NVML's symbol by `dlopen` and `dlsym`; the behaviour is skipped if there is none.
fn symbol(t: &Test, name: &std::ffi::CStr) -> *mut c_void {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        // SAFETY: a C string; loading the library is what a monitoring program does.
        unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW) as usize }
    });
    if library == 0 {
        t.skip("there is no NVML");
    }
    // SAFETY: an open handle and a C string.
    let at = unsafe { libc::dlsym(library as *mut c_void, name.as_ptr()) };
    if at.is_null() {
        t.skip(format!("NVML has no {}", name.to_string_lossy()));
    }
    at
}

macro_rules! nvml {
    ($t:expr, $name:literal ( $($argument:expr => $ty:ty),* )) => {{
        // SAFETY: NVML's function of this name, with these parameters.
        let function = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> nvmlReturn_t>(symbol($t, $name))
        };
        // SAFETY: every pointer is to a live value of the type that the function fills.
        unsafe { function($($argument),*) }
    }};
}

fn device(t: &Test) -> nvmlDevice_t {
    let started = nvml!(t, c"nvmlInit_v2"());
    assert!(started.is_success(), "nvmlInit failed: {}", started.0);
    let mut device = nvmlDevice_t(0);
    let found = nvml!(t, c"nvmlDeviceGetHandleByIndex_v2"(0 => u32, &mut device => *mut nvmlDevice_t));
    assert!(
        found.is_success(),
        "nvmlDeviceGetHandleByIndex failed: {}",
        found.0
    );
    device
}

fn memory(t: &Test, device: nvmlDevice_t) -> nvmlMemory_t {
    let mut memory = nvmlMemory_t::default();
    let asked =
        nvml!(t, c"nvmlDeviceGetMemoryInfo"(device => nvmlDevice_t, &mut memory => *mut nvmlMemory_t));
    assert!(asked.is_success(), "nvmlDeviceGetMemoryInfo failed: {}", asked.0);
    memory
}

fn info(cu: Driver) -> (u64, u64) {
    let (mut free, mut total) = (0, 0);
    must("cuMemGetInfo", cu.cuMemGetInfo_v2(&mut free, &mut total));
    (free as u64, total as u64)
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "nvml.memory_adds_up",
        "Used and free are together the total",
        |t, _| {
            let device = device(t);
            let memory = memory(t, device);
            t.see("adds up", memory.used + memory.free == memory.total);
            t.see("something is free", memory.free > 0);
        },
    ),
    Behaviour::new(
        "nvml.second_form",
        "The second form of memory tells the same total, and wants its version",
        |t, _| {
            let device = device(t);
            let first = memory(t, device);
            let mut second = nvmlMemory_v2_t {
                version: nvmlMemory_v2,
                ..nvmlMemory_v2_t::default()
            };
            let asked =
                nvml!(t, c"nvmlDeviceGetMemoryInfo_v2"(device => nvmlDevice_t, &mut second => *mut nvmlMemory_v2_t));
            t.see("ask", asked.0);
            t.see("total", second.total == first.total);
            second.version = 7;
            let asked =
                nvml!(t, c"nvmlDeviceGetMemoryInfo_v2"(device => nvmlDevice_t, &mut second => *mut nvmlMemory_v2_t));
            t.see("version 7", asked.0);
        },
    ),
    Behaviour::new(
        "nvml.total_is_near_the_drivers",
        "NVML's total is the driver's, but for what the driver keeps",
        |t, cu| {
            let device = device(t);
            let (_, total) = info(cu);
            let told = memory(t, device).total;
            t.see("within a twentieth", told >= total && told - total <= told / 20);
        },
    ),
    Behaviour::new(
        "nvml.used_rises_with_an_allocation",
        "An allocation shows in what is used",
        |t, cu| {
            let device = device(t);
            let before = memory(t, device);
            let address = cu.alloc(64 * MIB);
            let during = memory(t, device);
            cu.free(address);
            t.see(
                "taken MiB",
                during.used.saturating_sub(before.used) / MIB as u64,
            );
            t.see("total stays", before.total == during.total);
        },
    )
    .alone()
    .fact(&["taken MiB: 64", "total stays: true"]),
    Behaviour::new(
        "nvml.the_process_is_listed",
        "A process with a context is in the list of computing processes, once",
        |t, _| {
            let device = device(t);
            let mut rows = vec![nvmlProcessInfo_v2_t::default(); 256];
            let mut count = 256_u32;
            let asked = nvml!(t, c"nvmlDeviceGetComputeRunningProcesses_v3"(
                device => nvmlDevice_t, &mut count => *mut u32, rows.as_mut_ptr() => *mut nvmlProcessInfo_v2_t));
            t.see("ask", asked.0);
            let mine = rows
                .iter()
                .take(count as usize)
                .filter(|row| row.pid == std::process::id())
                .count();
            t.see("listed", mine);
        },
    ),
    Behaviour::new(
        "nvml.a_short_list_is_refused",
        "A list without room answers how much it needs",
        |t, _| {
            let device = device(t);
            let mut count = 0_u32;
            let asked = nvml!(t, c"nvmlDeviceGetComputeRunningProcesses_v3"(
                device => nvmlDevice_t, &mut count => *mut u32, std::ptr::null_mut() => *mut nvmlProcessInfo_v2_t));
            t.see("ask", asked.0);
            t.see("needs some", count >= 1);
        },
    )
    .fact(&["ask: 7", "needs some: true"]),
    Behaviour::new(
        "nvml.uuid_is_the_drivers",
        "NVML and the driver name the first device alike",
        |t, cu| {
            let mut uuid = CUuuid::default();
            must("cuDeviceGetUuid", cu.cuDeviceGetUuid_v2(&mut uuid, CUdevice(0)));
            let _started = device(t);
            let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
            let text = std::ffi::CString::new(format!(
                "GPU-{}-{}-{}-{}-{}",
                &hex[..8],
                &hex[8..12],
                &hex[12..16],
                &hex[16..20],
                &hex[20..]
            ))
            .expect("no zero byte in it");
            let mut found = nvmlDevice_t(0);
            let asked = nvml!(t, c"nvmlDeviceGetHandleByUUID"(
                text.as_ptr() => *const c_char, &mut found => *mut nvmlDevice_t));
            t.see("found", asked.0);
        },
    )
    .fact(&["found: 0"]),
    Behaviour::new(
        "nvml.misuse",
        "No place, no device",
        |t, _| {
            let device = device(t);
            let none: *mut nvmlMemory_t = std::ptr::null_mut();
            let asked = nvml!(t, c"nvmlDeviceGetMemoryInfo"(device => nvmlDevice_t, none => *mut nvmlMemory_t));
            t.see("no place", asked.0);
            let mut found = nvmlDevice_t(0);
            let asked = nvml!(t, c"nvmlDeviceGetHandleByIndex_v2"(999 => u32, &mut found => *mut nvmlDevice_t));
            t.see("index 999", asked.0);
        },
    )
    .fact(&["no place: 2", "index 999: 2"]),
];
