//! The mappings that show an image: copy-on-write at guest addresses, and read-only in a window for
//! the stub, as the source of copies. [`super::image_mapping`] makes them in a process.
//!
//! An image may still be on its way while a process is made that shows it
//! ([`super::pending_content`]). Everything else waits for all of it.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use afresh_memory::{Image, ImageError, ImageFile, PAGE_SIZE, PageRange};

use super::segments::{Segment, Segments};
use super::{PlatformError, boot, stub};

const PAGE: u64 = PAGE_SIZE as u64;

/// A mapping to be made: of a file, or of zeros.
#[derive(Clone, Debug)]
pub(super) struct FileMapping {
    start: u64,
    len: u64,
    protection: u64,
    pub(super) file: Option<ImageFile>,
}

impl FileMapping {
    /// Where it is.
    pub(super) fn range(&self) -> Range<u64> {
        self.start..self.start + self.len
    }

    /// Whether it is of one of `files`, or of none at all.
    pub(super) fn is_of(&self, files: &[&ImageFile]) -> bool {
        let sent = |file: &ImageFile| files.iter().any(|sent| sent.shares_file(file));
        self.file.as_ref().is_none_or(sent)
    }

    /// The call that makes it; `descriptor` is the file's in the process.
    pub(super) fn order(&self, descriptor: u64) -> [u64; 7] {
        let mut flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let (descriptor, offset) = match &self.file {
            Some(file) => (descriptor, file.first() as u64 * PAGE),
            None => {
                flags |= libc::MAP_ANONYMOUS;
                (u64::MAX, 0)
            }
        };
        let number = libc::SYS_mmap as u64;
        [number, self.start, self.len, self.protection, flags as u64, descriptor, offset]
    }
}

/// The error of an image whose content is unavailable.
pub(super) fn unread(error: &ImageError) -> PlatformError {
    PlatformError::kernel("reading the image", std::io::Error::other(error.to_string()))
}

/// An image to be shown: its files, looked up once.
#[derive(Clone, Debug)]
pub(crate) struct MappedImage {
    files: Vec<ImageFile>,
    /// The image, if content of it may be missing.
    coming: Option<Image>,
}

impl MappedImage {
    /// Waits for content that is still to come.
    pub(crate) fn new(image: &Image) -> Result<Self, PlatformError> {
        Ok(Self { files: image.files().map_err(|error| unread(&error))?, coming: None })
    }

    /// Content may still be to come where this host can put it in place under a guest that runs.
    pub(crate) fn ahead(image: &Image) -> Result<Self, PlatformError> {
        let files = image.unfilled_files().map_err(|error| unread(&error))?;
        // Checked afterwards: a complete image stays so.
        Ok(Self { files, coming: (!image.is_complete()).then(|| image.clone()) })
    }

    /// Whether it is `image`, and came before all content of that.
    pub(super) fn is_coming_of(&self, image: &Image) -> bool {
        self.coming.as_ref().is_some_and(|coming| coming.same(image))
    }

    /// Whether content of it may be missing.
    pub(super) fn is_coming(&self) -> bool {
        self.coming.as_ref().is_some_and(|image| !image.is_complete())
    }

    /// The parts of files that show `run`.
    pub(super) fn parts(&self, run: PageRange) -> impl Iterator<Item = ImageFile> + '_ {
        let first = self.files.partition_point(|file| file.pages().end() <= run.start);
        self.files[first..].iter().map_while(move |file| file.within(run))
    }

    /// The pieces that show `run` from `start` on.
    fn pieces_at(&self, start: u64, run: PageRange, protection: u64, out: &mut Vec<FileMapping>) {
        let mut at = run.start;
        let zeros = |from: usize, to: usize| FileMapping {
            start: start + (from - run.start) as u64 * PAGE,
            len: (to - from) as u64 * PAGE,
            protection,
            file: None,
        };
        for file in self.parts(run) {
            let pages = file.pages();
            if at < pages.start {
                out.push(zeros(at, pages.start));
            }
            at = pages.end();
            out.push(FileMapping { file: Some(file), ..zeros(pages.start, pages.end()) });
        }
        if at < run.end() {
            out.push(zeros(at, run.end()));
        }
    }

    /// The pieces of the window that show `run`.
    pub(super) fn window(&self, run: PageRange) -> Vec<FileMapping> {
        let mut pieces = Vec::new();
        let start = stub::IMAGE + run.start as u64 * PAGE;
        self.pieces_at(start, run, libc::PROT_READ as u64, &mut pieces);
        pieces
    }

    /// The pieces of a segment.
    pub(super) fn segment(&self, segment: &Segment, out: &mut Vec<FileMapping>) {
        if !segment.has_pages() {
            let &Segment { start, len, protection, .. } = segment;
            out.push(FileMapping { start, len, protection, file: None });
            return;
        }
        self.pieces_at(segment.start, segment.pages(), segment.protection, out);
    }

    /// The files that hold most of it: as many as a process is sent when it begins.
    pub(super) fn main(&self) -> Vec<&ImageFile> {
        let mut found: Vec<(&ImageFile, usize)> = Vec::new();
        for file in &self.files {
            let len = file.pages().len;
            match found.iter().position(|(other, _)| other.shares_file(file)) {
                Some(place) => found[place].1 += len,
                // A state that was saved turn by turn may be spread over many.
                None if found.len() < 64 => found.push((file, len)),
                None => {}
            }
        }
        found.sort_by_key(|(_, pages)| std::cmp::Reverse(*pages));
        found.into_iter().take(boot::FILES).map(|(file, _)| file).collect()
    }

    /// All pieces of a guest that starts, and the files that they are of; nothing if content may be
    /// missing, or there are more files than a process is sent when it begins.
    pub(super) fn pieces(
        &self,
        segments: &Segments,
    ) -> Option<(Vec<&ImageFile>, Vec<FileMapping>)> {
        if self.coming.is_some() {
            return None;
        }
        let main = self.main();
        let pieces = self.all(segments);
        pieces.iter().all(|piece| piece.is_of(&main)).then_some((main, pieces))
    }

    /// All pieces of a guest that starts: the window's, then those of its segments.
    pub(super) fn all(&self, segments: &Segments) -> Vec<FileMapping> {
        let mut pieces = self.window(PageRange::new(0, segments.pages()));
        segments.iter().for_each(|segment| self.segment(segment, &mut pieces));
        pieces
    }
}

/// The file of a part of an image, for a guest's process.
pub(super) fn reader(file: &ImageFile) -> Result<BorrowedFd<'_>, PlatformError> {
    let failed =
        |error| PlatformError::kernel("opening a file of an image", io::Error::other(error));
    file.file().map_err(failed)
}
