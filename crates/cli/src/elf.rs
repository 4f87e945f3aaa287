//! What an ELF file says about itself: enough to know whether the loader will take it, and whether the loader is used
//! at all.
//!
//! The loader ignores a preloaded library that it cannot read, with a warning at best, and the program then runs
//! unmanaged. So `ebb run` looks before it starts anything.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const SECTION_HEADER: usize = 64;
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const TYPE_SHARED: u16 = 3;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_INTERPRETER: u32 = 3;

/// The machine that this program was built for, as ELF numbers it.
const OWN_MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// Why a file is not a library that the loader would take into a program of this machine.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ElfError {
    #[error("it cannot be read: {0}")]
    Unreadable(String),
    #[error("it is empty")]
    Empty,
    #[error("it is no ELF file")]
    NotElf,
    #[error("it is for {0} programs, and this machine runs {own}", own = machine_name(OWN_MACHINE))]
    OtherMachine(String),
    #[error("it is a program, not a library")]
    NotLibrary,
    #[error("it is truncated: {needed} bytes are promised, {present} are there")]
    Truncated { needed: u64, present: u64 },
}

/// What matters of a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Elf {
    /// A shared object (libraries, and programs built position independent).
    pub shared: bool,
    /// Names a loader; without one, no library is preloaded.
    pub interpreter: bool,
}

/// Reads a file of this machine whole enough to know that no part that it promises is missing.
pub(crate) fn inspect(path: &Path) -> Result<Elf, ElfError> {
    let unreadable = |error: std::io::Error| ElfError::Unreadable(error.to_string());
    let mut file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(ElfError::Unreadable("it is not a regular file".into()));
    }
    let present = metadata.len();
    if present == 0 {
        return Err(ElfError::Empty);
    }
    let mut header = Vec::with_capacity(HEADER);
    Read::by_ref(&mut file)
        .take(HEADER as u64)
        .read_to_end(&mut header)
        .map_err(unreadable)?;
    if !header.starts_with(b"\x7fELF") {
        return Err(ElfError::NotElf);
    }
    let whole = |needed: u64| {
        if needed <= present {
            Ok(())
        } else {
            Err(ElfError::Truncated { needed, present })
        }
    };
    whole(HEADER as u64)?;
    let machine = u16_at(&header, 18);
    if header[4] != CLASS_64 {
        return Err(ElfError::OtherMachine("32-bit".into()));
    }
    if header[5] != LITTLE_ENDIAN || machine != OWN_MACHINE {
        return Err(ElfError::OtherMachine(machine_name(machine)));
    }
    let segments = table(
        &file,
        u64_at(&header, 32),
        u16_at(&header, 56),
        PROGRAM_HEADER,
        present,
    )?;
    let sections = table(
        &file,
        u64_at(&header, 40),
        u16_at(&header, 60),
        SECTION_HEADER,
        present,
    )?;
    let mut interpreter = false;
    for segment in segments.chunks_exact(PROGRAM_HEADER) {
        let kind = u32_at(segment, 0);
        interpreter |= kind == SEGMENT_INTERPRETER;
        if kind == SEGMENT_LOAD {
            whole(u64_at(segment, 8).saturating_add(u64_at(segment, 32)))?;
        }
    }
    for section in sections.chunks_exact(SECTION_HEADER) {
        // Sections of kind 8 (.bss) have a size but no bytes in the file; 0 is the empty first entry.
        if !matches!(u32_at(section, 4), 0 | 8) {
            whole(u64_at(section, 24).saturating_add(u64_at(section, 32)))?;
        }
    }
    Ok(Elf {
        shared: u16_at(&header, 16) == TYPE_SHARED,
        interpreter,
    })
}

/// The bytes of a section of a library that [`check_library`] accepts; `None` if it has no section of that name.
pub(crate) fn section(path: &Path, name: &str) -> Option<Vec<u8>> {
    /// No section that is read here comes near this.
    const MOST: u64 = 16 << 20;
    let file = File::open(path).ok()?;
    let present = file.metadata().ok()?.len();
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0).ok()?;
    let sections = table(
        &file,
        u64_at(&header, 40),
        u16_at(&header, 60),
        SECTION_HEADER,
        present,
    )
    .ok()?;
    let content = |section: &[u8]| {
        let (at, size) = (u64_at(section, 24), u64_at(section, 32));
        let mut bytes = vec![0; usize::try_from(size.min(MOST)).ok()?];
        file.read_exact_at(&mut bytes, at).ok()?;
        Some(bytes)
    };
    let names = usize::from(u16_at(&header, 62));
    let names = content(sections.chunks_exact(SECTION_HEADER).nth(names)?)?;
    let wanted = sections.chunks_exact(SECTION_HEADER).find(|section| {
        let at = usize::try_from(u32_at(section, 0)).unwrap_or(usize::MAX);
        names
            .get(at..)
            .is_some_and(|rest| rest.split(|byte| *byte == 0).next() == Some(name.as_bytes()))
    })?;
    content(wanted)
}

/// Checks that the loader would take `path` as a preloaded library.
pub(crate) fn check_library(path: &Path) -> Result<(), ElfError> {
    if inspect(path)?.shared {
        Ok(())
    } else {
        Err(ElfError::NotLibrary)
    }
}

fn table(file: &File, at: u64, entries: u16, entry: usize, present: u64) -> Result<Vec<u8>, ElfError> {
    if at == 0 || entries == 0 {
        return Ok(Vec::new());
    }
    let mut bytes = vec![0; usize::from(entries) * entry];
    let needed = at.saturating_add(bytes.len() as u64);
    if needed > present {
        return Err(ElfError::Truncated { needed, present });
    }
    file.read_exact_at(&mut bytes, at)
        .map_err(|error| ElfError::Unreadable(error.to_string()))?;
    Ok(bytes)
}

fn machine_name(machine: u16) -> String {
    match machine {
        3 => "32-bit x86".into(),
        62 => "x86-64".into(),
        183 => "aarch64".into(),
        21 => "ppc64".into(),
        other => format!("other (ELF machine {other})"),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A library that is certainly there: the C library that this test runs with.
    fn some_library() -> PathBuf {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps
            .lines()
            .find(|line| line.contains("libc.so"))
            .expect("tests are linked to a C library");
        PathBuf::from(line.split_whitespace().last().unwrap())
    }

    fn changed(name: &str, change: impl FnOnce(&mut Vec<u8>)) -> Result<(), ElfError> {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = std::fs::read(some_library()).unwrap();
        change(&mut bytes);
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        check_library(&path)
    }

    #[test]
    fn a_library_is_taken_whole() {
        assert_eq!(check_library(&some_library()), Ok(()));
        assert_eq!(changed("same.so", |_| ()), Ok(()));
    }

    #[test]
    fn bug_007_a_library_that_the_loader_would_ignore_is_refused() {
        assert_eq!(changed("empty.so", Vec::clear), Err(ElfError::Empty));
        assert_eq!(
            changed("text.so", |b| *b = b"#!/bin/sh\n".to_vec()),
            Err(ElfError::NotElf)
        );
        for part in [1, 2, 3, 10, 63] {
            let cut = changed("cut.so", |b| b.truncate(b.len() * part / 64));
            assert!(
                matches!(cut, Err(ElfError::Truncated { .. })),
                "{part}/64: {cut:?}"
            );
        }
        let last_byte = changed("cut.so", |b| b.truncate(b.len() - 1));
        assert!(
            matches!(last_byte, Err(ElfError::Truncated { .. })),
            "{last_byte:?}"
        );
        assert!(matches!(
            changed("32.so", |b| b[4] = 1),
            Err(ElfError::OtherMachine(_))
        ));
        assert!(matches!(
            changed("ppc.so", |b| b[18] = 21),
            Err(ElfError::OtherMachine(_))
        ));
        assert_eq!(changed("program", |b| b[16] = 2), Err(ElfError::NotLibrary));
        assert!(matches!(
            check_library(Path::new("/nonexistent.so")),
            Err(ElfError::Unreadable(_))
        ));
        assert!(matches!(
            check_library(Path::new("/")),
            Err(ElfError::Unreadable(_))
        ));
    }

    #[test]
    fn no_bytes_panic() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("any.so");
        let library = std::fs::read(some_library()).unwrap();
        for at in 0..HEADER {
            for value in [0u8, 1, 0x7f, 0xff] {
                let mut bytes = library.clone();
                bytes[at] = value;
                std::fs::write(&path, bytes).unwrap();
                let _ = check_library(&path);
                let _ = section(&path, ".text");
            }
        }
    }

    #[test]
    fn a_section_is_found_by_its_name() {
        let text = section(&some_library(), ".interp")
            .or_else(|| section(&some_library(), ".dynstr"))
            .unwrap();
        assert!(!text.is_empty());
        assert_eq!(section(&some_library(), ".no.such"), None);
        assert_eq!(section(Path::new("/dev/null"), ".text"), None);
    }

    #[test]
    fn this_test_needs_a_loader() {
        let own = inspect(&std::env::current_exe().unwrap()).unwrap();
        assert!(own.interpreter);
    }
}
