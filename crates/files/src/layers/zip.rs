//! Zips. A stored file is read in place. A packed file is unpacked to a temporary file on first
//! read, and never to more than the size in its directory entry. Memory is charged before the
//! directory is read whole.

use std::path::Path;
use std::sync::Arc;

use ::zip::read::Config;
use ::zip::unstable::read::ZipIterable;
use ::zip::{CompressionMethod, ZipArchive};

use crate::error::LayerError;
use crate::layers::archive::{Archive, Counter, StoredFile, names_budget};
use crate::layers::item::{EntryKind, Item, LayerLimits};
use crate::layers::packed::{PackedFile, PackedZip, PositionedFile, unpack_small};
use crate::layers::regular_file::open_regular;
use crate::nodes::name::PATH;
use crate::nodes::node::Time;
use crate::read_at::FileExt;

fn read_error(path: &Path) -> impl Fn(std::io::Error) -> LayerError {
    let path = path.display().to_string();
    move |source| LayerError::Read { path: path.clone(), source }
}

/// Whether a file begins as a zip does.
pub(crate) fn is_zip(path: &Path) -> Result<bool, LayerError> {
    let mut start = [0; 4];
    let file = open_regular(path).map_err(read_error(path))?;
    let len = file.read_at(&mut start, 0).map_err(read_error(path))?;
    Ok(len == 4 && (start == *b"PK\x03\x04" || start == *b"PK\x05\x06"))
}

/// Memory for an entry in the directory of a `ZipArchive`, without its name and comment.
const ENTRY: usize = 512;

/// Counts the entries, one at a time. Of a directory that passes, `ZipArchive` reads the same
/// entries. It allocates for as many as the last record claims before it reads the first.
fn count_entries(
    reader: PositionedFile,
    counter: &mut Counter,
    bad: &impl Fn(String) -> LayerError,
) -> Result<(), LayerError> {
    let len = reader.file.metadata().map_err(|e| bad(e.to_string()))?.len();
    let mut directory =
        ZipIterable::try_new(reader, Config::default()).map_err(|e| bad(e.to_string()))?;
    let mut at = None;
    for entry in directory.files().map_err(|e| bad(e.to_string()))? {
        let entry = entry.map_err(|e| bad(e.to_string()))?;
        let start = entry.central_header_start();
        // `ZipArchive` tries another directory after a sum that is too large for it.
        if entry.header_start() > len || start > len {
            return Err(bad("an entry begins behind the end".to_owned()));
        }
        // Strings of the entry before, which are kept as they are and decoded.
        let before = start.saturating_sub(at.replace(start).unwrap_or(start)) as usize;
        let target = if entry.size() <= PATH as u64 { entry.size() as usize } else { 0 };
        let names = entry.name_raw().len() + target;
        counter.add(entry.size(), names + ENTRY + before.saturating_mul(2))?;
    }
    Ok(())
}

pub(crate) fn open(path: &Path, limits: &LayerLimits) -> Result<Archive, LayerError> {
    let name = path.display().to_string();
    let bad = |why: String| LayerError::Bad { path: name.clone(), why };
    let file = open_regular(path).map_err(read_error(path))?;
    let shared =
        PositionedFile { file: Arc::new(file.try_clone().map_err(read_error(path))?), at: 0 };
    let mut counter = Counter::new(&name, limits, &names_budget());
    count_entries(shared.clone(), &mut counter, &bad)?;
    let mut zip = ZipArchive::new(shared).map_err(|e| bad(e.to_string()))?;
    let (mut items, mut files) = (Vec::new(), Vec::new());
    for number in 0..zip.len() {
        let entry = zip.by_index_raw(number).map_err(|e| bad(e.to_string()))?;
        let (path, mode, size) = (entry.name_raw().to_vec(), entry.unix_mode(), entry.size());
        let said = String::from_utf8_lossy(&path).into_owned();
        if path.len() > PATH || entry.encrypted() {
            return Err(bad(format!("{said} is encrypted, or its name is too long")));
        }
        let is_link = mode.is_some_and(|mode| mode & 0o170_000 == 0o120_000);
        let what = if entry.is_dir() {
            EntryKind::Directory
        } else {
            let (method, start) = (entry.compression(), entry.data_start());
            files.push(match (method, start) {
                (CompressionMethod::Stored, Some(start)) => StoredFile::Plain(start, size),
                (CompressionMethod::Deflated, _) => {
                    StoredFile::Packed(PackedFile::new(number, size))
                }
                _ => {
                    return Err(bad(format!(
                        "{said} is packed as {method}, which is not supported"
                    )));
                }
            });
            EntryKind::File(files.len() as u32 - 1, size)
        };
        drop(entry);
        let usual = if matches!(what, EntryKind::Directory) { 0o755 } else { 0o644 };
        let mode = mode.map_or(usual, |mode| mode & 0o7777);
        let what = if is_link && size <= PATH as u64 {
            let target = unpack_small(&mut zip, number, size).map_err(&bad)?;
            EntryKind::Link(target)
        } else {
            what
        };
        items.push(Item { path, what, mode, time: Time::default() });
    }
    Ok(Archive::new(name, items, files, file, Some(PackedZip::new(zip)), counter))
}
