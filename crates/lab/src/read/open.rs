//! Opening a trace file, packed or not, told by its content.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};

/// A trace that cannot be opened. It is the caller's file: trying again does not help.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}", path = path.display())]
pub struct OpenError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub source: std::io::Error,
}

/// The content of a file, unpacked if its first two bytes are those of gzip, whatever its name.
///
/// # Errors
/// What the system says to opening or reading the first bytes.
pub fn open(path: &Path) -> Result<Box<dyn Read>, OpenError> {
    let wrap = |source| OpenError {
        path: path.to_owned(),
        source,
    };
    let mut file = File::open(path).map_err(wrap)?;
    let mut magic = Vec::with_capacity(2);
    file.by_ref().take(2).read_to_end(&mut magic).map_err(wrap)?;
    file.rewind().map_err(wrap)?;
    Ok(if magic == [0x1f, 0x8b] {
        Box::new(flate2::read::MultiGzDecoder::new(BufReader::new(file)))
    } else {
        Box::new(BufReader::new(file))
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn content(path: &Path) -> String {
        let mut text = String::new();
        open(path).unwrap().read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn packed_and_plain_are_told_by_their_content() {
        let dir = tempfile::tempdir().unwrap();
        let (packed, plain, one) = (
            dir.path().join("a.csv"),
            dir.path().join("b.csv.gz"),
            dir.path().join("c"),
        );
        let mut gz =
            flate2::write::GzEncoder::new(File::create(&packed).unwrap(), flate2::Compression::fast());
        gz.write_all(b"packed").unwrap();
        gz.finish().unwrap();
        std::fs::write(&plain, "plain").unwrap();
        std::fs::write(&one, "1").unwrap();
        assert_eq!(content(&packed), "packed");
        assert_eq!(content(&plain), "plain");
        assert_eq!(content(&one), "1");
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = open(Path::new("nothing/here.csv")).err().unwrap();
        assert!(error.to_string().starts_with("nothing/here.csv: "), "{error}");
    }
}
