//! NVML, as far as the daemon asks it: which cards there are, what is used, and by whom.
//!
//! Every function is looked up by itself, so that an old or odd library costs only what it lacks. Values from newer
//! drivers are plain integers.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_uint};
use std::path::{Path, PathBuf};

use ebb_abi::nvml::{
    NVML_DEVICE_NAME_V2_BUFFER_SIZE, NVML_DEVICE_UUID_V2_BUFFER_SIZE, NVML_ERROR_INSUFFICIENT_SIZE,
    NVML_VALUE_NOT_AVAILABLE, nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2, nvmlMemory_v2_t,
    nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t, nvmlReturn_t,
};
use ebb_units::{Bytes, DeviceUuid};

use crate::suspect::Facts;

/// What NVML says about one card at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Card {
    pub uuid: DeviceUuid,
    pub index: u32,
    pub name: String,
    pub total: Bytes,
    pub free: Bytes,
    /// The driver's own part, where the library tells it.
    pub reserved: Bytes,
    /// Bytes by process, of whatever kind of work; `None` where the library cannot tell.
    pub processes: Option<Vec<(u32, Bytes)>>,
    /// What else is known of these processes.
    pub facts: BTreeMap<u32, Facts>,
}

/// Why NVML is of no use. May pass: a driver can be loaded later.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NvmlError {
    #[error("{} cannot be loaded: {why}", path.display())]
    Load { path: PathBuf, why: String },
    #[error("NVML lacks {0}")]
    Missing(&'static str),
    #[error("{call} failed: {text} ({code})")]
    Call {
        call: &'static str,
        code: u32,
        text: String,
    },
}

type Init = unsafe extern "C" fn() -> nvmlReturn_t;
type Count = unsafe extern "C" fn(*mut c_uint) -> nvmlReturn_t;
type ByIndex = unsafe extern "C" fn(c_uint, *mut nvmlDevice_t) -> nvmlReturn_t;
/// Of a card: whether it is cut into devices (MIG), now and after the next reset.
type Mode = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut c_uint) -> nvmlReturn_t;
type Number = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint) -> nvmlReturn_t;
type Slice = unsafe extern "C" fn(nvmlDevice_t, c_uint, *mut nvmlDevice_t) -> nvmlReturn_t;
type Text = unsafe extern "C" fn(nvmlDevice_t, *mut c_char, c_uint) -> nvmlReturn_t;
type Memory1 = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlMemory_t) -> nvmlReturn_t;
type Memory2 = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlMemory_v2_t) -> nvmlReturn_t;
type Processes<T> = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t;

/// An initialised NVML.
#[derive(Debug)]
pub(crate) struct Nvml {
    shutdown: Option<Init>,
    count: Count,
    by_index: ByIndex,
    /// How a card is cut: its mode, how many slices it can have, and each of them.
    slices: Option<(Mode, Number, Slice)>,
    uuid: Text,
    name: Text,
    memory1: Option<Memory1>,
    memory2: Option<Memory2>,
    // In the order of preference: version 3, version 2 (one layout), version 1.
    processes: [Option<Processes<nvmlProcessInfo_v2_t>>; 2],
    processes1: Option<Processes<nvmlProcessInfo_v1_t>>,
    /// Who is on a card by other ways than a compute context of its own (Vulkan, OpenGL; clients of MPS): newest form first.
    others: [[Option<Processes<nvmlProcessInfo_v2_t>>; 2]; 2],
    /// What holds the functions above in memory; dropped last.
    _library: libloading::Library,
}

fn check(call: &'static str, result: nvmlReturn_t) -> Result<(), NvmlError> {
    result.ok().map_err(|e| NvmlError::Call {
        call,
        code: e.0,
        text: e.c_text().to_string_lossy().into_owned(),
    })
}

impl Nvml {
    pub(crate) fn load(path: &Path) -> Result<Self, NvmlError> {
        // SAFETY: loading runs the library's constructors. The path comes from the daemon's own settings, and NVML's
        // (like the simulated one's) do nothing that breaks this process.
        let library = unsafe { libloading::Library::new(path) }.map_err(|e| NvmlError::Load {
            path: path.into(),
            why: e.to_string(),
        })?;
        /// A function of the library, as a pointer that is valid while the library stays loaded.
        fn find<T: Copy>(library: &libloading::Library, name: &str) -> Option<T> {
            // SAFETY: each caller names the type that NVML documents for this function; the struct below keeps the
            // library loaded for as long as the pointer can be called.
            unsafe { library.get::<T>(name.as_bytes()) }
                .ok()
                .map(|symbol| *symbol)
        }
        let need = |name: &'static str| move |found: Option<_>| found.ok_or(NvmlError::Missing(name));
        let init: Init = find(&library, "nvmlInit_v2").ok_or(NvmlError::Missing("nvmlInit_v2"))?;
        let nvml = Self {
            shutdown: find(&library, "nvmlShutdown"),
            count: need("nvmlDeviceGetCount_v2")(find(&library, "nvmlDeviceGetCount_v2"))?,
            by_index: find(&library, "nvmlDeviceGetHandleByIndex_v2")
                .ok_or(NvmlError::Missing("nvmlDeviceGetHandleByIndex_v2"))?,
            slices: (|| {
                Some((
                    find(&library, "nvmlDeviceGetMigMode")?,
                    find(&library, "nvmlDeviceGetMaxMigDeviceCount")?,
                    find(&library, "nvmlDeviceGetMigDeviceHandleByIndex")?,
                ))
            })(),
            uuid: find(&library, "nvmlDeviceGetUUID").ok_or(NvmlError::Missing("nvmlDeviceGetUUID"))?,
            name: find(&library, "nvmlDeviceGetName").ok_or(NvmlError::Missing("nvmlDeviceGetName"))?,
            memory1: find(&library, "nvmlDeviceGetMemoryInfo"),
            memory2: find(&library, "nvmlDeviceGetMemoryInfo_v2"),
            processes: [
                find(&library, "nvmlDeviceGetComputeRunningProcesses_v3"),
                find(&library, "nvmlDeviceGetComputeRunningProcesses_v2"),
            ],
            processes1: find(&library, "nvmlDeviceGetComputeRunningProcesses"),
            others: [
                [
                    find(&library, "nvmlDeviceGetGraphicsRunningProcesses_v3"),
                    find(&library, "nvmlDeviceGetGraphicsRunningProcesses_v2"),
                ],
                [
                    find(&library, "nvmlDeviceGetMPSComputeRunningProcesses_v3"),
                    find(&library, "nvmlDeviceGetMPSComputeRunningProcesses_v2"),
                ],
            ],
            _library: library,
        };
        // SAFETY: `nvmlInit_v2` takes nothing and may be called at any time.
        check("nvmlInit_v2", unsafe { init() })?;
        Ok(nvml)
    }

    /// All cards that can be read. A card that fails (lost, resetting) is left out of this sample.
    pub(crate) fn sample(&self) -> Result<Vec<Card>, NvmlError> {
        let mut count = 0;
        // SAFETY: NVML is initialised; the pointer is to a writable integer.
        check("nvmlDeviceGetCount", unsafe { (self.count)(&raw mut count) })?;
        Ok((0..count.min(256))
            .flat_map(|index| self.cards(index).unwrap_or_default())
            .collect())
    }

    /// The card with this number; or, where it is cut into devices, each of them: these are what programs allocate on, and the whole has
    /// no memory of its own to promise.
    fn cards(&self, index: u32) -> Result<Vec<Card>, NvmlError> {
        let mut device = nvmlDevice_t(0);
        // SAFETY: NVML is initialised; the pointer is to a writable handle.
        check("nvmlDeviceGetHandleByIndex", unsafe {
            (self.by_index)(index, &raw mut device)
        })?;
        match self.slices_of(device) {
            None => self.card(index, device).map(|card| vec![card]),
            Some(slices) => Ok(slices
                .into_iter()
                .filter_map(|slice| self.card(index, slice).ok())
                .collect()),
        }
    }

    /// What a card is cut into; `None` if it is not.
    fn slices_of(&self, device: nvmlDevice_t) -> Option<Vec<nvmlDevice_t>> {
        let (mode, most, slice) = self.slices?;
        let (mut cut, mut pending, mut count) = (0, 0, 0);
        // SAFETY: a handle from this library, and writable integers.
        let known = unsafe { mode(device, &raw mut cut, &raw mut pending) }.is_success();
        if !known || cut == 0 {
            return None;
        }
        // SAFETY: as above.
        if !unsafe { most(device, &raw mut count) }.is_success() {
            return None;
        }
        let mut found = Vec::new();
        for index in 0..count.min(64) {
            let mut handle = nvmlDevice_t(0);
            // SAFETY: a handle from this library, and a place for another. Places may be empty.
            if unsafe { slice(device, index, &raw mut handle) }.is_success() {
                found.push(handle);
            }
        }
        Some(found)
    }

    fn card(&self, index: u32, device: nvmlDevice_t) -> Result<Card, NvmlError> {
        let uuid = text::<NVML_DEVICE_UUID_V2_BUFFER_SIZE>("nvmlDeviceGetUUID", self.uuid, device)?;
        let uuid = uuid
            .strip_prefix("MIG-")
            .unwrap_or(&uuid)
            .parse()
            .map_err(|_| NvmlError::Missing("a UUID that can be read"))?;
        let name = text::<NVML_DEVICE_NAME_V2_BUFFER_SIZE>("nvmlDeviceGetName", self.name, device)
            .unwrap_or_else(|_| "GPU".into());
        let (total, free, reserved) = self.memory(device)?;
        Ok(Card {
            uuid,
            index,
            name,
            total,
            free,
            reserved,
            processes: self.processes(device),
            facts: BTreeMap::new(),
        })
    }

    fn memory(&self, device: nvmlDevice_t) -> Result<(Bytes, Bytes, Bytes), NvmlError> {
        if let Some(call) = self.memory2 {
            let mut memory = nvmlMemory_v2_t {
                version: nvmlMemory_v2,
                ..<nvmlMemory_v2_t as ebb_abi::Zero>::ZERO
            };
            // SAFETY: a handle from this library, and a writable structure of the version that it names.
            if unsafe { call(device, &raw mut memory) }.is_success() {
                return Ok((Bytes(memory.total), Bytes(memory.free), Bytes(memory.reserved)));
            }
        }
        let call = self
            .memory1
            .ok_or(NvmlError::Missing("nvmlDeviceGetMemoryInfo"))?;
        let mut memory = <nvmlMemory_t as ebb_abi::Zero>::ZERO;
        // SAFETY: a handle from this library, and a writable structure of the only version.
        check("nvmlDeviceGetMemoryInfo", unsafe {
            call(device, &raw mut memory)
        })?;
        Ok((Bytes(memory.total), Bytes(memory.free), Bytes::ZERO))
    }

    fn processes(&self, device: nvmlDevice_t) -> Option<Vec<(u32, Bytes)>> {
        let mut all: BTreeMap<u32, Bytes> = self.compute_processes(device)?.into_iter().collect();
        for forms in &self.others {
            let listed = forms.iter().flatten().find_map(|call| list(*call, device));
            for process in listed.unwrap_or_default() {
                // A process that computes and draws stands in both lists, with all that it has in each.
                if process.usedGpuMemory != NVML_VALUE_NOT_AVAILABLE {
                    let known = all.entry(process.pid).or_default();
                    *known = (*known).max(Bytes(process.usedGpuMemory));
                }
            }
        }
        Some(all.into_iter().collect())
    }

    fn compute_processes(&self, device: nvmlDevice_t) -> Option<Vec<(u32, Bytes)>> {
        for call in self.processes.into_iter().flatten() {
            if let Some(list) = list(call, device) {
                return known(list.iter().map(|p| (p.pid, p.usedGpuMemory)));
            }
        }
        let list = list(self.processes1?, device)?;
        known(list.iter().map(|p| (p.pid, p.usedGpuMemory)))
    }
}

/// The list, unless the figure of a process is not available.
fn known(list: impl Iterator<Item = (u32, u64)>) -> Option<Vec<(u32, Bytes)>> {
    list.map(|(pid, used)| (used != NVML_VALUE_NOT_AVAILABLE).then_some((pid, Bytes(used))))
        .collect()
}

fn list<T: ebb_abi::Zero + Copy>(call: Processes<T>, device: nvmlDevice_t) -> Option<Vec<T>> {
    let mut room = 64;
    // The list may grow between two calls.
    for _ in 0..8 {
        let mut list = vec![T::ZERO; room];
        let mut count = c_uint::try_from(room).ok()?;
        // SAFETY: a handle from this library; `count` says how many writable structures `list` has.
        let result = unsafe { call(device, &raw mut count, list.as_mut_ptr()) };
        if result.is_success() {
            list.truncate(count as usize);
            return Some(list);
        }
        if result != NVML_ERROR_INSUFFICIENT_SIZE {
            return None;
        }
        room = (count as usize).max(room).checked_mul(2)?.min(1 << 16);
    }
    None
}

fn text<const N: usize>(
    call: &'static str,
    function: Text,
    device: nvmlDevice_t,
) -> Result<String, NvmlError> {
    let mut buffer = [0_u8; N];
    let length = c_uint::try_from(N - 1).unwrap_or(0);
    // SAFETY: a handle from this library; the buffer has room for `length` characters and one more zero.
    check(call, unsafe {
        function(device, buffer.as_mut_ptr().cast(), length)
    })?;
    Ok(CStr::from_bytes_until_nul(&buffer)
        .map(|t| t.to_string_lossy().into_owned())
        .unwrap_or_default())
}

impl Drop for Nvml {
    fn drop(&mut self) {
        if let Some(shutdown) = self.shutdown {
            // SAFETY: initialised in `load`, shut down only here.
            let _ = unsafe { shutdown() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_foreign_library_is_an_error_and_no_more() {
        assert!(matches!(
            Nvml::load(Path::new("/nonexistent.so")).unwrap_err(),
            NvmlError::Load { .. }
        ));
        // A library without a single one of the functions.
        assert!(matches!(
            Nvml::load(Path::new("libc.so.6")).unwrap_err(),
            NvmlError::Missing(_)
        ));
    }

    #[test]
    fn a_figure_that_is_not_available_makes_the_list_unknown() {
        assert_eq!(
            known([(1, 5), (2, 6)].into_iter()),
            Some(vec![(1, Bytes(5)), (2, Bytes(6))])
        );
        assert_eq!(known([(1, 5), (2, NVML_VALUE_NOT_AVAILABLE)].into_iter()), None);
    }
}
