//! The packed files of a zip, which are unpacked to a temporary file on first read.
//!
//! Promises: each file is unpacked once and takes at most its stated length, however many threads
//! read it and however often its unpacking fails. A thread waits for the unpacking of the file that
//! it reads, and of no other.
//!
//! May break it: a temporary directory in memory (tmpfs), where unpacked files take memory.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ::zip::ZipArchive;

use crate::read_at::FileExt;

/// A file shared by several readers, each with its own position.
#[derive(Clone, Debug)]
pub(crate) struct PositionedFile {
    pub(crate) file: Arc<File>,
    pub(crate) at: u64,
}

impl Read for PositionedFile {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let len = self.file.read_at(out, self.at)?;
        self.at += len as u64;
        Ok(len)
    }
}

impl Seek for PositionedFile {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.file.metadata()?.len().checked_add_signed(by),
        };
        self.at = at.ok_or(std::io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// A zip whose files can be unpacked, into a temporary file that all of them share.
#[derive(Debug)]
pub(crate) struct PackedZip {
    zip: ZipArchive<PositionedFile>,
    temporary: Mutex<Option<TemporaryFile>>,
}

/// A file without a name, for unpacked files.
#[derive(Debug)]
struct TemporaryFile {
    file: Arc<File>,
    /// Bytes that are reserved, from its beginning.
    reserved: u64,
    /// The process that reserves. A child of a fork would reserve the same bytes, so it makes
    /// another file.
    process: u32,
}

/// A packed file, and its place in a temporary file.
#[derive(Debug)]
pub(crate) struct PackedFile {
    number: usize,
    len: u64,
    /// Reserved by the first attempt to unpack it. Later attempts use the same place.
    place: OnceLock<Place>,
    is_unpacked: AtomicBool,
    /// FileHold while it is unpacked.
    unpacking: Mutex<()>,
}

/// A part of a temporary file, with the length of the unpacked file.
#[derive(Debug)]
struct Place {
    file: Arc<File>,
    start: u64,
}

/// Writes to a place.
struct PlaceWriter<'a> {
    place: &'a Place,
    at: u64,
}

impl Write for PlaceWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let len = self.place.file.write_at(bytes, self.place.start + self.at)?;
        self.at += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl PackedFile {
    /// The file with this number in the zip, and its stated length.
    pub(crate) fn new(number: usize, len: u64) -> Self {
        let (place, is_unpacked) = (OnceLock::new(), AtomicBool::new(false));
        Self { number, len, place, is_unpacked, unpacking: Mutex::new(()) }
    }

    /// Its stated length.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    fn unpacked(&self) -> Option<&Place> {
        self.place.get().filter(|_| self.is_unpacked.load(Ordering::Acquire))
    }
}

impl PackedZip {
    pub(crate) fn new(zip: ZipArchive<PositionedFile>) -> Self {
        Self { zip, temporary: Mutex::new(None) }
    }

    /// Reads a part of a file, which the first read unpacks. A read of an unpacked file takes no
    /// lock.
    pub(crate) fn read(&self, file: &PackedFile, at: u64, out: &mut [u8]) -> Result<(), String> {
        let end = at.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > file.len) {
            return Err("it is shorter than its stated size".to_owned());
        }
        let place = match file.unpacked() {
            Some(place) => place,
            None => self.unpack(file)?,
        };
        place.file.read_exact_at(out, place.start + at).map_err(|error| error.to_string())
    }

    /// Unpacks a file, whose number of bytes must equal its stated length. Returns its place.
    fn unpack<'a>(&self, packed: &'a PackedFile) -> Result<&'a Place, String> {
        let _unpacking = packed.unpacking.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = packed.unpacked() {
            // Another thread has unpacked it during the wait for the lock.
            return Ok(place);
        }
        let failed = |error: std::io::Error| error.to_string();
        let place = match packed.place.get() {
            Some(place) => place,
            None => {
                let place = self.reserve(packed.len).map_err(failed)?;
                packed.place.get_or_init(|| place)
            }
        };
        let mut zip = self.zip.clone();
        let mut entry = zip.by_index(packed.number).map_err(|error| error.to_string())?;
        let mut writer = PlaceWriter { place, at: 0 };
        let len = std::io::copy(&mut (&mut entry).take(packed.len), &mut writer).map_err(failed)?;
        // The checksum is checked at the end, which this read reaches. A byte more would be
        // written to the place of another file.
        let more = std::io::copy(&mut entry.take(1), &mut std::io::sink()).map_err(failed)?;
        check_len(len + more, packed.len)?;
        packed.is_unpacked.store(true, Ordering::Release);
        Ok(place)
    }

    /// Reserves `len` bytes of the temporary file.
    fn reserve(&self, len: u64) -> std::io::Result<Place> {
        let process = std::process::id();
        let mut temporary = self.temporary.lock().unwrap_or_else(PoisonError::into_inner);
        if temporary.as_ref().is_none_or(|temporary| temporary.process != process) {
            let file = Arc::new(tempfile::tempfile()?);
            *temporary = Some(TemporaryFile { file, reserved: 0, process });
        }
        let temporary = temporary.as_mut().ok_or(std::io::ErrorKind::NotFound)?;
        let start = temporary.reserved;
        temporary.reserved = start.checked_add(len).ok_or(std::io::ErrorKind::FileTooLarge)?;
        Ok(Place { file: temporary.file.clone(), start })
    }
}

/// All bytes of a small file of a zip, whose number must equal `size`.
pub(crate) fn unpack_small(
    zip: &mut ZipArchive<PositionedFile>,
    number: usize,
    size: u64,
) -> Result<Vec<u8>, String> {
    let entry = zip.by_index(number).map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    entry.take(size + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    check_len(bytes.len() as u64, size)?;
    Ok(bytes)
}

fn check_len(len: u64, size: u64) -> Result<(), String> {
    match len == size {
        true => Ok(()),
        false => Err("a file in it has another length than stated".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use ::zip::ZipWriter;
    use ::zip::write::SimpleFileOptions;

    use super::*;

    /// A zip of deflated files, whose bytes `change` may damage.
    fn packed(files: &[&[u8]], change: impl FnOnce(&mut Vec<u8>)) -> (PackedZip, Vec<PackedFile>) {
        let mut zip = ZipWriter::new(std::io::Cursor::new(Vec::new()));
        for (number, bytes) in files.iter().enumerate() {
            let options = SimpleFileOptions::default();
            let options = options.compression_method(::zip::CompressionMethod::Deflated);
            zip.start_file(number.to_string(), options).unwrap();
            zip.write_all(bytes).unwrap();
        }
        let mut bytes = zip.finish().unwrap().into_inner();
        change(&mut bytes);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        let mut zip = ZipArchive::new(PositionedFile { file: Arc::new(file), at: 0 }).unwrap();
        let files = (0..zip.len()).map(|number| {
            let len = zip.by_index_raw(number).unwrap().size();
            PackedFile::new(number, len)
        });
        let files = files.collect();
        (PackedZip::new(zip), files)
    }

    fn whole(zip: &PackedZip, file: &PackedFile) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; file.len() as usize];
        zip.read(file, 0, &mut bytes).map(|()| bytes)
    }

    /// The length of the temporary file, and the part of it that is reserved.
    fn disk(zip: &PackedZip) -> (u64, u64) {
        let temporary = zip.temporary.lock().unwrap();
        let temporary = temporary.as_ref().unwrap();
        (temporary.file.metadata().unwrap().len(), temporary.reserved)
    }

    #[test]
    fn a_file_that_many_threads_read_is_unpacked_once() {
        let bytes: Vec<u8> = (0..1_u32 << 20).map(|at| (at / 7) as u8).collect();
        let (zip, files) = packed(&[&bytes, b"other"], |_| ());
        let start = Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    start.wait();
                    assert!(whole(&zip, &files[0]).unwrap() == bytes);
                });
            }
        });
        assert_eq!(disk(&zip), (1 << 20, 1 << 20));
        assert_eq!(whole(&zip, &files[1]).unwrap(), b"other");
        assert_eq!(disk(&zip), ((1 << 20) + 5, (1 << 20) + 5));
    }

    #[test]
    fn a_thread_that_waited_for_the_unpacking_does_not_unpack_again() {
        let (zip, files) = packed(&[b"bytes"], |_| ());
        assert_eq!(whole(&zip, &files[0]).unwrap(), b"bytes");
        // Nothing can be unpacked any more.
        let reader = zip.zip.clone().into_inner();
        reader.file.set_len(0).unwrap();
        assert!(zip.unpack(&files[0]).is_ok());
        assert_eq!(whole(&zip, &files[0]).unwrap(), b"bytes");
    }

    #[test]
    fn a_read_waits_for_no_other_file_that_is_being_unpacked() {
        let (zip, files) = packed(&[b"first", b"second", b"third"], |_| ());
        assert_eq!(whole(&zip, &files[0]).unwrap(), b"first");
        // Threads that unpack the second file hold this, and one that reserves also the other.
        let unpacking = files[1].unpacking.lock().unwrap();
        assert_eq!(whole(&zip, &files[2]).unwrap(), b"third");
        let reserving = zip.temporary.lock().unwrap();
        assert_eq!(whole(&zip, &files[0]).unwrap(), b"first");
        drop((unpacking, reserving));
        assert_eq!(whole(&zip, &files[1]).unwrap(), b"second");
    }

    #[test]
    fn a_damaged_file_takes_its_stated_length_once_and_leaves_others_whole() {
        let long = [7; 1000];
        let (zip, files) = packed(&[&long, b"whole"], |bytes| {
            // The stated size in both headers, which is less than that of the content.
            for at in 0..bytes.len() - 4 {
                if bytes[at..at + 4] == 1000_u32.to_le_bytes() {
                    bytes[at..at + 4].copy_from_slice(&10_u32.to_le_bytes());
                }
            }
        });
        assert_eq!(files[0].len(), 10);
        whole(&zip, &files[0]).unwrap_err();
        assert_eq!(whole(&zip, &files[1]).unwrap(), b"whole");
        for _ in 0..5 {
            whole(&zip, &files[0]).unwrap_err();
        }
        assert_eq!(disk(&zip), (15, 15));
        assert_eq!(whole(&zip, &files[1]).unwrap(), b"whole");
        // A part beyond the end is refused.
        assert!(zip.read(&files[1], 1, &mut [0; 5]).is_err());
        assert!(zip.read(&files[1], u64::MAX, &mut [0; 5]).is_err());
    }
}
