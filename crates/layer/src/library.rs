//! [`Library`]: one driver library, what of it we hook, and how its pointers are routed to the hooks.
//!
//! A program reaches a driver function in four ways: linked by the loader, by `dlsym`, by `cuGetProcAddress`, and by
//! `cudaGetDriverEntryPoint` (which is the third). The first finds our exported symbol. For the others we ask the real
//! one and look at *the pointer that it returned*: versions, per-thread forms and status are then the driver's own.
//!
//! The table from pointers to hooks is made once a library is met. Whoever meets it first may be inside the loader's lock, so threads do
//! not wait for each other here: each builds a table, one is published, the others are dropped.

use core::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use crate::elf::{self, Object};
use crate::{barrier, loader};

/// A driver library as the program loaded it.
#[derive(Debug)]
pub(crate) struct Bound {
    object: Object,
    handle: usize,
    /// Address and index of every function that we know, by address.
    by_pointer: Box<[(usize, u16)]>,
}

/// A hook's address, or none.
pub(crate) struct Hook(pub(crate) *const ());

// SAFETY: an address of code, never read as data.
unsafe impl Sync for Hook {}

/// One driver library, what of it we hook, and the real functions.
pub(crate) struct Library {
    /// How its file name begins. Another preloaded shim that exports the same names is not it.
    prefix: &'static [u8],
    soname: &'static CStr,
    /// Every function that we know, sorted.
    names: &'static [&'static CStr],
    /// Our function for each name; null if it passes.
    hooks: &'static [Hook],
    /// The real function of each name: 0 not looked for yet.
    real: &'static [AtomicUsize],
    bound: AtomicPtr<Bound>,
    /// Pointers of the driver that stood in no table and were routed by name and version.
    pub(crate) by_name: AtomicU64,
    /// Look-ups that were answered with a hook.
    pub(crate) routed: AtomicU64,
}

pub(crate) static CUDA: Library = Library::new(
    b"libcuda.so",
    c"libcuda.so.1",
    crate::symbols::NAMES,
    crate::symbols::HOOKS,
    crate::symbols::REAL,
);

pub(crate) static NVML: Library = Library::new(
    b"libnvidia-ml.so",
    c"libnvidia-ml.so.1",
    crate::hooks::nvml::NAMES,
    crate::hooks::nvml::HOOKS,
    crate::hooks::nvml::REAL,
);

impl Library {
    const fn new(
        prefix: &'static [u8],
        soname: &'static CStr,
        names: &'static [&'static CStr],
        hooks: &'static [Hook],
        real: &'static [AtomicUsize],
    ) -> Self {
        assert!(names.len() == hooks.len() && names.len() == real.len());
        let (by_name, routed) = (AtomicU64::new(0), AtomicU64::new(0));
        Self {
            prefix,
            soname,
            names,
            hooks,
            real,
            bound: AtomicPtr::new(core::ptr::null_mut()),
            by_name,
            routed,
        }
    }

    /// Our function for a name.
    fn hook(&self, index: usize) -> Option<usize> {
        let hook = self.hooks.get(index)?.0;
        (!hook.is_null()).then(|| hook.expose_provenance())
    }

    /// The number of a name.
    pub(crate) fn index(&self, name: &CStr) -> Option<usize> {
        self.names.binary_search_by(|known| (*known).cmp(name)).ok()
    }

    /// What a look-up through the loader gets: `None` if it should take its ordinary way.
    ///
    /// `ask` is the real look-up; `caller` the address that called.
    pub(crate) fn route_look_up(
        &self,
        name: &CStr,
        handle: usize,
        caller: usize,
        ask: &dyn Fn(usize) -> usize,
    ) -> Option<usize> {
        let index = self.index(name)?;
        let hook = self.hook(index)?;
        if barrier::is_off() {
            // Only our own symbols in the global scope must not be found.
            let found = ask(handle);
            let ours = found != 0 && elf::ourselves().is_some_and(|us| us.contains(found));
            return ours.then(|| match self.real(index) {
                0 => loader::next(name),
                real => real,
            });
        }
        if self.is_interposer(index, caller) {
            return None;
        }
        let found = ask(handle);
        if found == 0 {
            return Some(0);
        }
        if elf::ourselves().is_some_and(|us| us.contains(found)) {
            // The global scope holds our symbols whether or not there is a driver.
            if self.real(index) != 0 {
                return Some(found);
            }
            // Asked again for the error text that `dlerror` gives.
            return Some(loader::next(name));
        }
        let bound = self.bind(found)?;
        if !bound.object.contains(found) {
            return None;
        }
        self.routed.fetch_add(1, Ordering::Relaxed);
        Some(hook)
    }

    /// Whether the caller is another interposer, whose own function of that name stands behind ours: it looks for the real one.
    fn is_interposer(&self, index: usize, caller: usize) -> bool {
        let next = loader::next(self.names[index]);
        if next == 0 {
            return false;
        }
        elf::object_of(next).is_some_and(|object| object.contains(caller))
    }

    /// What the program gets for a pointer that the driver's own look-up returned.
    ///
    /// `expected` is the symbol that the driver's tables give for the name and version, if we know that version.
    pub(crate) fn route_pointer(&self, pointer: usize, expected: Option<&CStr>) -> usize {
        if pointer == 0 || barrier::is_off() {
            return pointer;
        }
        let Some(bound) = self.bind(pointer) else {
            return pointer;
        };
        if !bound.object.contains(pointer) {
            return pointer;
        }
        let at = bound.by_pointer.partition_point(|&(known, _)| known < pointer);
        let index = match bound.by_pointer.get(at) {
            Some(&(known, index)) if known == pointer => Some(usize::from(index)),
            // Not an exported address: a driver may hand out inner entries. Its name and version say which function it is.
            _ => expected.and_then(|name| self.index(name)).inspect(|_| {
                self.by_name.fetch_add(1, Ordering::Relaxed);
            }),
        };
        match index.and_then(|index| self.hook(index)) {
            Some(hook) => {
                self.routed.fetch_add(1, Ordering::Relaxed);
                hook
            }
            None => pointer,
        }
    }

    /// The real function of a name, 0 if there is none.
    #[inline(always)]
    pub(crate) fn real(&self, index: usize) -> usize {
        match self.real[index].load(Ordering::Relaxed) {
            0 => self.find_real(index),
            known => known,
        }
    }

    /// The next definition in the loader's order: another interposer's if one stands behind us, else the driver's.
    /// If the driver was loaded for somebody alone, by the handle of the library that was met or that is loaded.
    #[cold]
    fn find_real(&self, index: usize) -> usize {
        let find = || {
            let name = self.names[index];
            let next = loader::next(name);
            if next != 0 {
                return next;
            }
            self.bound_or_loaded()
                .map_or(0, |bound| loader::in_object(bound.handle, name))
        };
        let found = barrier::catch(core::panic::AssertUnwindSafe(find)).unwrap_or(0);
        self.real[index].store(found, Ordering::Relaxed);
        found
    }

    fn bound(&self) -> Option<&'static Bound> {
        // SAFETY: null, or a leaked box that `publish` stored once and that never changes.
        unsafe { self.bound.load(Ordering::Acquire).as_ref() }
    }

    fn bound_or_loaded(&self) -> Option<&'static Bound> {
        self.bound().or_else(|| {
            let handle = open_loaded(self.soname.as_ptr())?;
            self.names
                .iter()
                .map(|name| loader::in_object(handle, name))
                .find(|&address| address != 0)
                .and_then(|address| self.bind(address))
        })
    }

    /// The library that is bound, after binding the one that `address` lies in if none is yet.
    fn bind(&self, address: usize) -> Option<&'static Bound> {
        if let Some(bound) = self.bound() {
            return Some(bound);
        }
        let object = elf::object_of(address)?;
        if !object.file_name().starts_with(self.prefix) {
            return None;
        }
        let handle = open_loaded(object.path)?;
        let mut by_pointer: Vec<(usize, u16)> = (0u16..)
            .zip(self.names)
            .map(|(index, name)| (loader::in_object(handle, name), index))
            .filter(|&(pointer, _)| object.contains(pointer))
            .collect();
        by_pointer.sort_unstable();
        // Two names for one address: prefer the one that has a hook.
        by_pointer.dedup_by(|later, kept| {
            let same = later.0 == kept.0;
            if same && self.hook(kept.1.into()).is_none() {
                kept.1 = later.1;
            }
            same
        });
        self.publish(Bound {
            object,
            handle,
            by_pointer: by_pointer.into(),
        })
    }

    fn publish(&self, bound: Bound) -> Option<&'static Bound> {
        let mine = Box::into_raw(Box::new(bound));
        match self
            .bound
            .compare_exchange(core::ptr::null_mut(), mine, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => {}
            // SAFETY: made by `into_raw` above and not published.
            Err(_) => drop(unsafe { Box::from_raw(mine) }),
        }
        self.bound()
    }

    /// How many functions of the bound library we know, for the report.
    pub(crate) fn known(&self) -> usize {
        self.bound().map_or(0, |bound| bound.by_pointer.len())
    }
}

/// A handle of a library that is loaded already. Never closed: the library must not go away under its hooks.
fn open_loaded(path: *const c_char) -> Option<usize> {
    // SAFETY: a string of the loader's or a literal. Nothing is loaded and no constructor runs with `RTLD_NOLOAD`.
    let handle = unsafe { libc::dlopen(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    (!handle.is_null()).then(|| handle.cast::<c_void>().expose_provenance())
}
