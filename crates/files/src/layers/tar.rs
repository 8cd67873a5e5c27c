//! Tars, and the layers of images, which are tars with whiteouts.
//!
//! A compressed one is unpacked to a temporary file without a name, up to the limit, for its files
//! are read in any order. Long names and attributes of files are read here, for their lengths are
//! claims like all others.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use ::tar::{EntryType, PaxExtensions};
use afresh_budget::Budget;
use sha2::{Digest, Sha256};

use crate::error::LayerError;
use crate::layers::archive::{Archive, Counter, StoredFile, names_budget};
use crate::layers::item::{EntryKind, Item, LayerLimits};
use crate::layers::regular_file::open_regular;
use crate::nodes::name::PATH;
use crate::nodes::node::Time;

/// Bytes that headers may take for a file, above its content.
const HEADERS: u64 = 4096;
/// Bytes of zeros that end a tar, at most.
const PADDING: u64 = 1 << 20;
/// Bytes of attributes of one file, at most.
const ATTRIBUTES: u64 = 1 << 20;
/// The prefix of a whiteout: the rest of the name is removed.
const GONE: &[u8] = b".wh.";
/// An opaque whiteout: hides the layers below in its directory.
const EMPTY: &[u8] = b".wh..wh..opq";

pub(crate) fn open(path: &Path, limits: &LayerLimits) -> Result<Archive, LayerError> {
    read(path, limits, false)
}

/// Reads a tar; `marks` is whether it is a layer of an image.
pub(crate) fn read(path: &Path, limits: &LayerLimits, marks: bool) -> Result<Archive, LayerError> {
    let name = path.display().to_string();
    let failed = |source| LayerError::Read { path: name.clone(), source };
    let mut file = open_regular(path).map_err(failed)?;
    let start = Start::of(&mut file).map_err(failed)?;
    let file = match start.is_compressed() {
        true => unpack(start, file, &name, limits, u64::MAX)?,
        false => {
            file.seek(SeekFrom::Start(0)).map_err(failed)?;
            file
        }
    };
    archive_of(file, name, limits, &names_budget(), marks)
}

/// Room for all layers of an image together.
pub(crate) struct ImageRoom {
    /// Bytes of unpacked tars, with headers and padding.
    unpacked: u64,
    names: Budget,
}

impl ImageRoom {
    pub(crate) fn new(limits: &LayerLimits, layers: usize) -> Self {
        let padding = PADDING.saturating_mul(layers as u64);
        Self { unpacked: content(limits).saturating_add(padding), names: names_budget() }
    }
}

/// Maximum bytes of an unpacked tar without its padding.
fn content(limits: &LayerLimits) -> u64 {
    limits.bytes.saturating_add(limits.files.saturating_mul(HEADERS))
}

/// Reads the layer of an image. `check` gets the digest of the whole blob. The blob is copied as it
/// is hashed, so that later changes of it are not served.
pub(crate) fn read_blob(
    path: &Path,
    limits: &LayerLimits,
    room: &mut ImageRoom,
    check: impl FnOnce(&[u8]) -> Result<(), LayerError>,
) -> Result<Archive, LayerError> {
    let name = path.display().to_string();
    let failed = |source| LayerError::Read { path: name.clone(), source };
    let file = open_regular(path).map_err(failed)?;
    let mut blob = HashingReader { inner: file, hash: Sha256::new() };
    let start = Start::of(&mut blob).map_err(failed)?;
    let unpacked = unpack(start, &mut blob, &name, limits, room.unpacked);
    std::io::copy(&mut blob, &mut std::io::sink()).map_err(failed)?;
    // A wrong digest explains the other errors.
    check(&blob.hash.finalize())?;
    let unpacked = unpacked?;
    let bytes = unpacked.metadata().map_err(failed)?.len();
    room.unpacked = room.unpacked.saturating_sub(bytes);
    archive_of(unpacked, name, limits, &room.names, true)
}

fn archive_of(
    file: File,
    name: String,
    limits: &LayerLimits,
    names: &Budget,
    marks: bool,
) -> Result<Archive, LayerError> {
    let failed = |source| LayerError::Read { path: name.clone(), source };
    let mut counter = Counter::new(&name, limits, names);
    let reader = file.try_clone().map_err(failed)?;
    let (items, files) = list(reader, &name, &mut counter, marks)?;
    Ok(Archive::new(name, items, files, file, None, counter))
}

/// A reader that hashes its input.
struct HashingReader {
    inner: File,
    hash: Sha256,
}

impl Read for HashingReader {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let len = self.inner.read(out)?;
        self.hash.update(&out[..len]);
        Ok(len)
    }
}

/// The first bytes of a file. They show its compression.
struct Start {
    bytes: [u8; 4],
    len: usize,
}

impl Start {
    fn of(source: &mut impl Read) -> std::io::Result<Self> {
        let (mut bytes, mut len) = ([0; 4], 0);
        while len < bytes.len() {
            match source.read(&mut bytes[len..]) {
                Ok(0) => break,
                Ok(more) => len += more,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self { bytes, len })
    }

    fn is_gzip(&self) -> bool {
        self.bytes.starts_with(&[0x1f, 0x8b])
    }

    fn is_zstd(&self) -> bool {
        self.bytes == [0x28, 0xb5, 0x2f, 0xfd]
    }

    fn is_compressed(&self) -> bool {
        self.is_gzip() || self.is_zstd()
    }
}

/// Writes a tar, decompressed if necessary, to a temporary file without a name. `source` has the
/// bytes after `start`. It has at most `room` bytes.
fn unpack(
    start: Start,
    source: impl Read,
    name: &str,
    limits: &LayerLimits,
    room: u64,
) -> Result<File, LayerError> {
    let failed = |source| LayerError::Read { path: name.to_owned(), source };
    let whole = (&start.bytes[..start.len]).chain(source);
    let mut unpacked: Box<dyn Read + '_> = if start.is_gzip() {
        Box::new(flate2::read::MultiGzDecoder::new(whole))
    } else if start.is_zstd() {
        Box::new(zstd::Decoder::new(whole).map_err(failed)?)
    } else {
        Box::new(whole)
    };
    let most = content(limits).saturating_add(PADDING).min(room);
    let mut out = tempfile::tempfile().map_err(failed)?;
    let copied = std::io::copy(&mut (&mut unpacked).take(most.saturating_add(1)), &mut out);
    if copied.map_err(failed)? > most {
        return Err(LayerError::Limit { path: name.to_owned(), what: "bytes", most: limits.bytes });
    }
    out.flush().map_err(failed)?;
    out.seek(SeekFrom::Start(0)).map_err(failed)?;
    Ok(out)
}

/// Fields of a file that earlier headers replace.
#[derive(Default)]
struct ExtendedHeader {
    path: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    size: Option<u64>,
    time: Option<Time>,
}

impl ExtendedHeader {
    /// Takes the attributes of a PAX header.
    fn attributes(&mut self, bytes: &[u8]) -> Result<(), String> {
        for attribute in PaxExtensions::new(bytes) {
            let attribute = attribute.map_err(|e| e.to_string())?;
            let value = attribute.value_bytes();
            match attribute.key_bytes() {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.target = Some(value.to_vec()),
                b"size" => {
                    let text = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
                    self.size = Some(text.ok_or("a size is not a number")?);
                }
                b"mtime" => {
                    let text = String::from_utf8_lossy(value);
                    let (whole, part) = text.split_once('.').unwrap_or((&text, ""));
                    let seconds = whole.parse().map_err(|_| "a time is not a number")?;
                    let nanos = format!("{part:0<9}").get(..9).and_then(|p| p.parse().ok());
                    self.time = Some(Time { seconds, nanos: nanos.unwrap_or(0) });
                }
                key if key.starts_with(b"GNU.sparse") => {
                    return Err("it has sparse files, which are not read here".to_owned());
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn list(
    reader: File,
    name: &str,
    counter: &mut Counter,
    marks: bool,
) -> Result<(Vec<Item>, Vec<StoredFile>), LayerError> {
    let bad = |why: &str| LayerError::Bad { path: name.to_owned(), why: why.to_owned() };
    let broken = |error: std::io::Error| bad(&error.to_string());
    let length = reader.metadata().map_err(broken)?.len();
    let mut archive = ::tar::Archive::new(reader);
    let (mut items, mut files) = (Vec::new(), Vec::new());
    let mut said = ExtendedHeader::default();
    for entry in archive.entries_with_seek().map_err(broken)?.raw(true) {
        let mut entry = entry.map_err(broken)?;
        let kind = entry.header().entry_type();
        let size = entry.header().entry_size().map_err(broken)?;
        let extra = match kind {
            EntryType::GNULongName | EntryType::GNULongLink => Some(PATH as u64 + 1),
            EntryType::XHeader => Some(ATTRIBUTES),
            EntryType::XGlobalHeader => continue,
            _ => None,
        };
        if let Some(most) = extra {
            if size > most {
                return Err(bad("a name or an attribute in it is too long"));
            }
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).map_err(broken)?;
            let text = || bytes.split(|b| *b == 0).next().unwrap_or_default().to_vec();
            match kind {
                EntryType::GNULongName => said.path = Some(text()),
                EntryType::GNULongLink => said.target = Some(text()),
                _ => said.attributes(&bytes).map_err(|why| bad(&why))?,
            }
            continue;
        }
        let said = std::mem::take(&mut said);
        let header = entry.header();
        if said.size.is_some_and(|size| size != header.entry_size().unwrap_or(0)) {
            return Err(bad("a file in it is larger than its header can hold"));
        }
        let path = said.path.unwrap_or_else(|| header.path_bytes().into_owned());
        let target = said.target.or_else(|| header.link_name_bytes().map(|t| t.into_owned()));
        let target = target.unwrap_or_default();
        if path.len() > PATH || target.len() > PATH {
            return Err(bad("a name in it is too long"));
        }
        let mode = header.mode().unwrap_or(0o644);
        let seconds = header.mtime().unwrap_or(0);
        let time = said.time.unwrap_or(Time { seconds: seconds.min(1 << 40) as i64, nanos: 0 });
        let what = match kind {
            EntryType::Regular | EntryType::Continuous => {
                let from = entry.raw_file_position();
                if from.checked_add(size).is_none_or(|end| end > length) {
                    return Err(bad("it ends in the middle of a file"));
                }
                counter.add(size, path.len())?;
                files.push(StoredFile::Plain(from, size));
                EntryKind::File(files.len() as u32 - 1, size)
            }
            EntryType::Directory => EntryKind::Directory,
            EntryType::Symlink => EntryKind::Link(target),
            EntryType::Link => EntryKind::Same(target),
            EntryType::GNUSparse => {
                return Err(bad("it has sparse files, which are not read here"));
            }
            EntryType::Char | EntryType::Block | EntryType::Fifo => EntryKind::Skipped,
            _ => continue,
        };
        if !matches!(what, EntryKind::File(..)) {
            let target =
                if let EntryKind::Link(to) | EntryKind::Same(to) = &what { to.len() } else { 0 };
            counter.add(0, path.len() + target)?;
        }
        items.push(marked(path, what, mode, time, marks));
    }
    Ok((items, files))
}

/// The meaning of an entry in a layer of an image.
fn marked(path: Vec<u8>, what: EntryKind, mode: u32, time: Time, marks: bool) -> Item {
    let split = path.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1);
    let (above, last) = path.split_at(split);
    if marks && last == EMPTY {
        return Item { path: above.to_vec(), what: EntryKind::Empty, mode, time };
    }
    match last.strip_prefix(GONE) {
        Some(rest) if marks && !rest.is_empty() => {
            Item { path: [above, rest].concat(), what: EntryKind::Gone, mode, time }
        }
        _ => Item { path, what, mode, time },
    }
}
