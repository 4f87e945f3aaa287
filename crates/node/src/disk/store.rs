//! Files of the disk tier: made without a name, and the room that they may take.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ebb_units::Bytes;
use rustix::fs::OFlags;

/// Names of files in the short time in which they have one.
const PREFIX: &str = "ebb-segment-";

/// The folder.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    dir: Arc<Path>,
    /// Bytes of the file system that stay free.
    reserve: Bytes,
}

/// A segment's file. It has no name: it is gone when the last one who has it open is.
#[derive(Clone, Debug)]
pub(crate) struct SegmentFile {
    /// To write and read, past the page cache where the file system can.
    pub ours: Arc<File>,
    /// To read, for the program that owns the bytes.
    pub theirs: Arc<File>,
}

impl Store {
    /// Takes a folder, makes it if need be, and removes files that a daemon left which died between making and
    /// unlinking one.
    pub(crate) fn open(dir: &Path, reserve: Bytes) -> io::Result<Self> {
        match std::fs::DirBuilder::new().mode(0o700).recursive(true).create(dir) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
        }
        let found = std::fs::metadata(dir)?;
        let us = rustix::process::geteuid().as_raw();
        if found.uid() != us || found.mode() & 0o022 != 0 {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the folder must be the daemon's own, and writable by nobody else",
            ));
        }
        for entry in std::fs::read_dir(dir)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(PREFIX) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
        let store = Self {
            dir: dir.into(),
            reserve,
        };
        // Better now than when memory is short.
        store.create()?;
        Ok(store)
    }

    /// A new file, readable and writable by the daemon's user alone, for a moment under a name that nobody knows.
    pub(crate) fn create(&self) -> io::Result<SegmentFile> {
        let name = RandomState::new().hash_one(std::process::id());
        let path: PathBuf = self.dir.join(format!("{PREFIX}{name:016x}"));
        let options = |flags: OFlags| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            options.custom_flags((flags | OFlags::NOFOLLOW).bits().cast_signed());
            options.open(&path)
        };
        let ours = match options(OFlags::DIRECT) {
            // Some file systems have no direct I/O; a few make the file before they find that out.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                let _ = std::fs::remove_file(&path);
                options(OFlags::empty())?
            }
            result => result?,
        };
        let theirs = File::open(&path);
        std::fs::remove_file(&path)?;
        Ok(SegmentFile {
            ours: Arc::new(ours),
            theirs: Arc::new(theirs?),
        })
    }

    /// Bytes that may be written before the reserve is touched.
    pub(crate) fn room(&self) -> io::Result<Bytes> {
        let free = rustix::fs::statvfs(&*self.dir)?;
        Ok(Bytes(free.f_bavail.saturating_mul(free.f_frsize)).saturating_sub(self.reserve))
    }

    /// Whether a file that a program hands over is one that a daemon made here: nothing else is read on its behalf.
    pub(crate) fn is_ours(&self, file: impl AsFd) -> bool {
        let (Ok(file), Ok(dir)) = (rustix::fs::fstat(&file), rustix::fs::stat(&*self.dir)) else {
            return false;
        };
        rustix::fs::FileType::from_raw_mode(file.st_mode) == rustix::fs::FileType::RegularFile
            && file.st_nlink == 0
            && file.st_dev == dir.st_dev
            && file.st_uid == rustix::process::geteuid().as_raw()
    }
}

/// Bytes that a file takes on the disk.
pub(crate) fn taken(file: impl AsFd) -> Bytes {
    rustix::fs::fstat(file).map_or(Bytes::ZERO, |stat| {
        Bytes(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn files_have_no_name_and_leftovers_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("a/b");
        let store = Store::open(&dir, Bytes::ZERO).unwrap();
        assert_eq!(
            std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777,
            0o700
        );
        let file = store.create().unwrap();
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        assert_eq!(file.ours.metadata().unwrap().mode() & 0o777, 0o600);
        assert!(store.is_ours(&file.ours) && store.is_ours(&file.theirs));
        // The program's cannot be written.
        assert_eq!(
            rustix::io::write(&*file.theirs, b"x"),
            Err(rustix::io::Errno::BADF)
        );
        // What a daemon left that was killed at the wrong moment, and what is somebody's.
        std::fs::write(dir.join("ebb-segment-1"), b"x").unwrap();
        std::fs::write(dir.join("other"), b"x").unwrap();
        Store::open(&dir, Bytes::ZERO).unwrap();
        let left: Vec<_> = std::fs::read_dir(&dir)
            .unwrap()
            .flatten()
            .map(|e| e.file_name())
            .collect();
        assert_eq!(left, ["other"]);
        assert!(
            !store.is_ours(File::open(dir.join("other")).unwrap()),
            "a file with a name"
        );
        assert!(!store.is_ours(File::open("/dev/null").unwrap()));
    }

    #[test]
    fn a_folder_that_others_may_write_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let refused = Store::open(dir.path(), Bytes::ZERO).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn the_reserve_is_not_given_away() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        assert!(Store::open(dir.path(), Bytes::ZERO).unwrap().room().unwrap() > Bytes::ZERO);
        assert_eq!(
            Store::open(dir.path(), Bytes::MAX).unwrap().room().unwrap(),
            Bytes::ZERO
        );
    }
}
