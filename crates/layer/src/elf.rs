//! Loaded objects, read from the loader's own list.
//!
//! We export `dlsym` and `dlvsym`, so inside this library those names are our own hooks, and asking the loader for "the next
//! `dlsym`" needs the very function that is looked for. The C library's is found in its symbol table instead.

use core::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A loaded object: where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Object {
    /// First address.
    pub(crate) low: usize,
    /// First address after it.
    pub(crate) high: usize,
    /// Its path as the loader knows it; empty for the main program. Lives while the object is loaded.
    pub(crate) path: *const core::ffi::c_char,
}

impl Object {
    /// Whether an address lies in it.
    pub(crate) fn contains(&self, address: usize) -> bool {
        (self.low..self.high).contains(&address)
    }

    /// Its path, empty for the main program.
    fn path(&self) -> &[u8] {
        if self.path.is_null() {
            return b"";
        }
        // SAFETY: the loader's strings end with a zero byte and live while the object is loaded. Objects that are asked for
        // their name hold an address that somebody is about to call, and drivers are never unloaded under their callers.
        unsafe { CStr::from_ptr(self.path) }.to_bytes()
    }

    /// The last part of its path.
    pub(crate) fn file_name(&self) -> &[u8] {
        let path = self.path();
        path.rsplit(|&byte| byte == b'/').next().unwrap_or(path)
    }
}

/// The object that an address lies in. Takes the loader's own (recursive) lock, allocates nothing.
pub(crate) fn object_of(address: usize) -> Option<Object> {
    let mut search = (address, None);
    each(&mut |object, _| {
        if object.contains(search.0) {
            search.1 = Some(object);
        }
        search.1.is_some()
    });
    search.1
}

/// Whether any loaded object's path satisfies `test`, which must not panic.
pub(crate) fn any_path(test: impl Fn(&[u8]) -> bool) -> bool {
    let mut any = false;
    each(&mut |object, _| {
        any = any || test(object.path());
        any
    });
    any
}

/// The object that this library is.
pub(crate) fn ourselves() -> Option<Object> {
    object_of(ourselves as *const () as usize)
}

/// The C library's own `dlsym`, found once.
pub(crate) fn real_dlsym() -> usize {
    static FOUND: AtomicUsize = AtomicUsize::new(0);
    find_once(&FOUND, c"dlsym")
}

/// The C library's own `dlvsym`, found once.
pub(crate) fn real_dlvsym() -> usize {
    static FOUND: AtomicUsize = AtomicUsize::new(0);
    find_once(&FOUND, c"dlvsym")
}

/// Threads may race: they find the same. No lock, because the caller may hold the loader's.
fn find_once(place: &AtomicUsize, name: &CStr) -> usize {
    let known = place.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let mut found = 0;
    each(&mut |object, header| {
        // Up to glibc 2.33 it is in libdl, afterwards in libc.
        if matches!(object.file_name(), b"libc.so.6" | b"libdl.so.2") {
            found = defined_function(header, name).unwrap_or(0);
        }
        found != 0
    });
    place.store(found, Ordering::Relaxed);
    found
}

/// Shows every loaded object until `visit` answers true.
fn each(visit: &mut dyn FnMut(Object, &libc::dl_phdr_info) -> bool) {
    type Visit<'a> = &'a mut dyn FnMut(Object, &libc::dl_phdr_info) -> bool;

    unsafe extern "C" fn one(info: *mut libc::dl_phdr_info, _: libc::size_t, data: *mut c_void) -> c_int {
        // SAFETY: the loader gives a valid record for the time of this call.
        let info = unsafe { &*info };
        // SAFETY: `data` is the address of `visit` below, which outlives `dl_iterate_phdr`, and nobody else uses it meanwhile.
        let visit = unsafe { &mut *data.cast::<Visit<'_>>() };
        c_int::from(visit(extent(info), info))
    }

    let mut visit: Visit<'_> = visit;
    // SAFETY: the callback has the right signature, does not unwind (the closures of this file only compare and store), and
    // gets a pointer that is valid during the call.
    unsafe { libc::dl_iterate_phdr(Some(one), (&raw mut visit).cast()) };
}

fn headers(info: &libc::dl_phdr_info) -> &[ProgramHeader] {
    if info.dlpi_phdr.is_null() {
        return &[];
    }
    // SAFETY: the loader's record says where the program headers are and how many.
    unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) }
}

type ProgramHeader = libc::Elf64_Phdr;

fn extent(info: &libc::dl_phdr_info) -> Object {
    let base = info.dlpi_addr as usize;
    let (mut low, mut high) = (usize::MAX, 0);
    for header in headers(info).iter().filter(|h| h.p_type == libc::PT_LOAD) {
        let start = base.wrapping_add(header.p_vaddr as usize);
        low = low.min(start);
        high = high.max(start.wrapping_add(header.p_memsz as usize));
    }
    Object {
        low,
        high,
        path: info.dlpi_name,
    }
}

/// One entry of a dynamic section.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const STT_FUNC: u8 = 2;

/// The address of a function that an object defines, by its GNU hash table (which every glibc since 2.5 has).
fn defined_function(info: &libc::dl_phdr_info, name: &CStr) -> Option<usize> {
    let base = info.dlpi_addr as usize;
    let dynamic = headers(info).iter().find(|h| h.p_type == libc::PT_DYNAMIC)?;
    let (mut strings, mut symbols, mut hash) = (0usize, 0usize, 0usize);
    let mut entry = base.wrapping_add(dynamic.p_vaddr as usize) as *const Dynamic;
    loop {
        // SAFETY: the dynamic section of a loaded object is mapped, aligned, and ends with a null entry.
        let Dynamic { tag, value } = unsafe { entry.read() };
        // Most loaders have added the base to these values, some have not.
        let address = |value: u64| {
            if (value as usize) < base {
                base.wrapping_add(value as usize)
            } else {
                value as usize
            }
        };
        match tag {
            DT_NULL => break,
            DT_STRTAB => strings = address(value),
            DT_SYMTAB => symbols = address(value),
            DT_GNU_HASH => hash = address(value),
            _ => {}
        }
        // SAFETY: not yet at the null entry, so the next one is still in the section.
        entry = unsafe { entry.add(1) };
    }
    if strings == 0 || symbols == 0 || hash == 0 {
        return None;
    }
    let wanted = gnu_hash(name.to_bytes());
    // SAFETY: (all reads below) the table's layout is fixed: 4 words of header, `bloom` machine words, `buckets` words, then one word per
    // symbol from `first` on. Indices come from the table itself, which the loader uses in the same way.
    unsafe {
        let header = hash as *const u32;
        let (buckets, first, bloom) = (header.read(), header.add(1).read(), header.add(2).read());
        if buckets == 0 {
            return None;
        }
        let bucket = header.add(4 + 2 * bloom as usize);
        let chain = bucket.add(buckets as usize);
        let mut index = bucket.add((wanted % buckets) as usize).read();
        if index < first {
            return None;
        }
        loop {
            let word = chain.add((index - first) as usize).read();
            if word | 1 == wanted | 1 {
                let symbol = (symbols as *const libc::Elf64_Sym).add(index as usize).read();
                let text = CStr::from_ptr((strings + symbol.st_name as usize) as *const core::ffi::c_char);
                if text == name && symbol.st_shndx != 0 && symbol.st_info & 0xf == STT_FUNC {
                    return Some(base.wrapping_add(symbol.st_value as usize));
                }
            }
            if word & 1 != 0 {
                return None;
            }
            index += 1;
        }
    }
}

fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381, |hash: u32, &byte| {
        hash.wrapping_mul(33).wrapping_add(byte.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_librarys_functions_are_found() {
        assert!(real_dlsym() != 0 && real_dlvsym() != 0);
        let object = object_of(real_dlsym()).unwrap();
        assert!(object.file_name().starts_with(b"lib"), "{:?}", object.file_name());
        assert_ne!(object_of(real_dlsym()), ourselves());
    }

    #[test]
    fn an_address_of_nobody_has_no_object() {
        assert_eq!(object_of(8), None);
        assert!(ourselves().unwrap().contains(ourselves as *const () as usize));
    }

    #[test]
    fn the_hash_is_the_loaders() {
        assert_eq!(gnu_hash(b""), 0x1505);
        assert_eq!(gnu_hash(b"printf"), 0x156b_2bb8);
    }
}
