//! The files and memory that a benchmark restores from.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use afresh_sys::{Advice, Memfd, PAGE_SIZE, PageRange, Protection, Reservation, file};

/// A directory that is removed when dropped.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new(parent: &Path) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("afresh-bench-{}-{number}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Best effort: an error has no receiver here.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// xorshift64*: fast, and its output does not compress.
#[derive(Clone, Copy)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// The first word of page `page`, with which every touch is compared.
pub(super) fn word(page: usize) -> u64 {
    Random(page as u64 + 1).next() | 1
}

/// Fills `out` with pages from `first` on.
pub(super) fn pages_into(first: usize, out: &mut [u8]) {
    for (n, page) in out.chunks_exact_mut(PAGE_SIZE).enumerate() {
        let mut random = Random(word(first + n));
        for bytes in page.chunks_exact_mut(8) {
            bytes.copy_from_slice(&random.next().to_le_bytes());
        }
        page[..8].copy_from_slice(&word(first + n).to_le_bytes());
    }
}

/// `0 .. pages` in random order.
pub(super) fn shuffled(pages: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..pages as u32).collect();
    let mut random = Random(42);
    for n in (1..pages).rev() {
        order.swap(n, random.next() as usize % (n + 1));
    }
    order
}

/// Writes a file in pieces of `piece` pages; small pieces leave small folios in the page cache, and
/// large ones large folios where the file system has them.
pub(super) fn write_file(path: &Path, pages: usize, piece: usize) -> io::Result<File> {
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    let mut buffer = vec![0; piece * PAGE_SIZE];
    for first in (0..pages).step_by(piece) {
        let len = piece.min(pages - first) * PAGE_SIZE;
        pages_into(first, &mut buffer[..len]);
        file.write_all(&buffer[..len])?;
    }
    // Written back now, so that no write-back disturbs the measurement.
    file.sync_all()?;
    Ok(file)
}

/// Writes the compact copy of a working set.
pub(super) fn write_set(path: &Path, set: &[PageRange]) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    let mut at = 0;
    let mut buffer = Vec::new();
    for run in set {
        buffer.resize(run.byte_len(), 0);
        pages_into(run.start, &mut buffer);
        file.write_all_at(&buffer, at)?;
        at += buffer.len() as u64;
    }
    file.sync_all()?;
    Ok(file)
}

/// A memfd with the content of the file, in 2 MiB folios where the kernel collapses them.
pub(super) fn huge_memfd(pages: usize) -> anyhow::Result<Arc<Memfd>> {
    const PIECE: usize = 512;
    let held = Memfd::new(c"afresh-bench")?;
    let mut buffer = vec![0; PIECE * PAGE_SIZE];
    for first in (0..pages).step_by(PIECE) {
        let len = PIECE.min(pages - first) * PAGE_SIZE;
        pages_into(first, &mut buffer[..len]);
        held.write_at(&buffer[..len], first * PAGE_SIZE)?;
    }
    held.seal()?;
    let view = Reservation::aligned(pages, 2 << 20)?;
    let all = PageRange::new(0, pages);
    view.map_shared(all, Protection::Read, &held, 0)?;
    // Without huge folios it is only slower, and the folio histogram shows that.
    let _ = view.advise(all, Advice::Collapse);
    Ok(Arc::new(held))
}

/// Puts a file out of the page cache.
pub(super) fn evict(file: &File) -> anyhow::Result<()> {
    Ok(file::drop_cache(file.as_fd())?)
}
