//! Images in sealed files, which processes share.
//!
//! The file of an image has its stored pages in the order of [`BackingLayout`], which follows from
//! the runs of pages alone. So the receiver of a file computes the place of each page itself, and
//! the file needs no header.
//!
//! Promises: a file of [`SealedImageFile::build`] holds each page at the place where
//! [`Image::from_sealed`] reads it, and zeros elsewhere. The builder checks this in the sealed
//! file, because a process of the same user can write to the file before it is sealed. The content
//! cannot change under an image. May break it: a process that changes the memory of the builder, or
//! a sender whose file has other pages. The receiver checks its seals and its length alone.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use afresh_sys::file::next_data;
use afresh_sys::{Advice, HUGE_PAGES, HUGE_SIZE, PAGE_SIZE, SealedMemfd};
use afresh_sys::{Call, Memfd, PageRange, Protection, Reservation, SysError};

use super::Image;
use super::backing::Backing;
use super::build::{BATCH_PAGES, check_sorted, read_batches};
use super::is_zero;
use super::layout::BackingLayout;
use crate::ImageError;

/// The place of each run of stored pages in a sealed file.
#[derive(Debug)]
pub struct SealedImageFile {
    pages: usize,
    stored: Vec<PageRange>,
    file_pages: usize,
}

impl SealedImageFile {
    /// The layout for an image of `pages` pages. Those outside of `stored` are zero.
    ///
    /// # Errors
    /// [`ImageError::OutOfBounds`] for runs that are not sorted, disjoint and inside.
    pub fn new(pages: usize, stored: &[PageRange]) -> Result<Self, ImageError> {
        check_sorted(stored, pages)?;
        let stored: Vec<PageRange> = stored.iter().copied().filter(|run| !run.is_empty()).collect();
        let layout = BackingLayout::new(&stored, |_| true);
        let file_pages = layout.places().last().map_or(0, |place| place.end());
        Ok(Self { pages, stored, file_pages })
    }

    /// Length of the file in pages. A mapping of the file can fill its holes, so this is also the
    /// memory that it can take.
    #[must_use]
    pub fn file_pages(&self) -> usize {
        self.file_pages
    }

    /// Makes the file. `read` puts the pages of a few runs one after the other into bytes.
    ///
    /// # Errors
    /// [`ImageError`] when memory or descriptors ran out, [`ImageError::Altered`] where another
    /// process has written to the file, and any error of `read`.
    pub fn build<E: From<ImageError>>(
        &self,
        mut read: impl FnMut(&[PageRange], &mut [u8]) -> Result<(), E>,
    ) -> Result<SealedMemfd, E> {
        let system = |error: SysError| E::from(ImageError::from(error));
        let file = Memfd::new(c"afresh-shared-image").map_err(system)?;
        file.set_len(self.file_pages * PAGE_SIZE).map_err(system)?;
        let layout = BackingLayout::new(&self.stored, |_| true);
        let mut hasher = blake3::Hasher::new();
        let read = |runs: &[PageRange], bytes: &mut [u8]| {
            read(runs, bytes)?;
            hasher.update(bytes);
            Ok(())
        };
        read_batches(&self.stored, read, |runs, bytes| {
            layout.write(&file, 0, runs, bytes).map_err(system)
        })?;
        collapse(&file, layout.places());
        let sealed = SealedMemfd::new(file).map_err(system)?;
        check(&sealed, layout.places(), &hasher.finalize())?;
        Ok(sealed)
    }
}

/// Checks that `file` has the bytes of `digest` at `places`, and zeros elsewhere.
fn check(
    file: &SealedMemfd,
    places: &[PageRange],
    digest: &blake3::Hash,
) -> Result<(), ImageError> {
    let io = |error: std::io::Error| SysError::new(Call::Read, error.raw_os_error().unwrap_or(0));
    let reader = File::from(file.as_fd().try_clone_to_owned().map_err(io)?);
    let mut buffer = vec![0; BATCH_PAGES * PAGE_SIZE];
    let mut each = |bytes: std::ops::Range<usize>, check: &mut dyn FnMut(&[u8]) -> bool| {
        let mut at = bytes.start;
        while at < bytes.end {
            let part = &mut buffer[..(bytes.end - at).min(BATCH_PAGES * PAGE_SIZE)];
            reader.read_exact_at(part, at as u64).map_err(io)?;
            if !check(part) {
                return Err(ImageError::Altered);
            }
            at += part.len();
        }
        Ok(())
    };
    let mut hasher = blake3::Hasher::new();
    for place in places {
        each(place.byte_start()..place.byte_start() + place.byte_len(), &mut |bytes| {
            hasher.update(bytes);
            true
        })?;
    }
    if hasher.finalize() != *digest {
        return Err(ImageError::Altered);
    }
    for pair in places.windows(2) {
        let (mut at, end) = (pair[0].end() * PAGE_SIZE, pair[1].byte_start());
        // The kernel can have placed zeros in a hole.
        while at < end
            && let Some(data) = next_data(file.as_fd(), at as u64)?
        {
            let data = usize::try_from(data.start).unwrap_or(end)
                ..usize::try_from(data.end).unwrap_or(end).min(end);
            each(data.clone(), &mut is_zero)?;
            at = data.end.max(at + 1);
        }
    }
    Ok(())
}

/// The ranges of whole huge pages in which `places` leave no hole.
fn whole_huge_pages(places: &[PageRange]) -> Vec<PageRange> {
    let mut runs: Vec<PageRange> = Vec::new();
    for place in places {
        match runs.last_mut() {
            Some(last) if last.end() == place.start => last.len += place.len,
            _ => runs.push(*place),
        }
    }
    let whole = |run: &PageRange| {
        let start = run.start.next_multiple_of(HUGE_PAGES);
        let end = run.end() / HUGE_PAGES * HUGE_PAGES;
        (start < end).then(|| PageRange::new(start, end - start))
    };
    runs.iter().filter_map(whole).collect()
}

/// Moves pages to folios of 2 MiB, where the kernel has them: a mapping then takes fewer faults.
/// Ranges with a hole stay, because the folio would fill it.
fn collapse(file: &Memfd, places: &[PageRange]) {
    for whole in whole_huge_pages(places) {
        let Ok(view) = Reservation::aligned(whole.len, HUGE_SIZE) else { return };
        let range = PageRange::new(0, whole.len);
        if view.map_shared(range, Protection::Read, file, whole.start).is_err() {
            return;
        }
        for number in 0..whole.len / HUGE_PAGES {
            let pages = PageRange::new(number * HUGE_PAGES, HUGE_PAGES);
            // The pages stay as they are after an error.
            let _ = view.advise(pages, Advice::Collapse);
        }
    }
}

impl Image {
    /// The image in a sealed file with this layout. `None` where this process has as many images
    /// with separate files as it may.
    ///
    /// # Errors
    /// [`ImageError::System`]: `EINVAL` for a file of another length, and `ENOMEM`.
    pub fn from_sealed(
        layout: &SealedImageFile,
        file: SealedMemfd,
    ) -> Result<Option<Image>, ImageError> {
        let places = BackingLayout::new(&layout.stored, |_| true);
        if layout.file_pages == 0 {
            return Ok(Some(Image::zero(layout.pages)));
        }
        let backing = Backing::from_sealed(file, layout.file_pages, places.places().to_vec())?;
        Ok(backing.map(|backing| Image::from_extents(layout.pages, places.extents(&backing))))
    }

    /// Whether [`Image::from_sealed`] would find room for a file now.
    #[must_use]
    pub fn has_room_for_sealed() -> bool {
        Backing::has_room_for_file()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// Pages of the file that [`layout`] describes. No other test has files of this length.
    const FILE_PAGES: usize = 4 * HUGE_PAGES + 37;

    /// Runs with short gaps, which are holes of the file, and one of two whole huge pages.
    fn layout() -> SealedImageFile {
        let stored = [
            PageRange::new(9, 100),
            PageRange::new(115, 200),
            PageRange::new(320, FILE_PAGES - 311),
        ];
        let layout = SealedImageFile::new(FILE_PAGES + 100, &stored).unwrap();
        assert_eq!(layout.file_pages(), FILE_PAGES);
        layout
    }

    fn fill(runs: &[PageRange], bytes: &mut [u8]) {
        let pages = runs.iter().flat_map(|run| run.start..run.end());
        for (page, bytes) in pages.zip(bytes.chunks_exact_mut(PAGE_SIZE)) {
            bytes.fill(page as u8 | 1);
        }
    }

    /// Another process of the same user: writes to the file by its name in `/proc`.
    fn write_through_proc(at: usize) {
        let is_file = |file: &File| {
            file.metadata().is_ok_and(|found| found.size() == (FILE_PAGES * PAGE_SIZE) as u64)
        };
        let open = |entry: io::Result<std::fs::DirEntry>| {
            File::options().read(true).write(true).open(entry.ok()?.path()).ok()
        };
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
        let names = descriptors.filter(|entry| {
            let name = entry.as_ref().ok().and_then(|entry| std::fs::read_link(entry.path()).ok());
            name.is_some_and(|name| name.to_string_lossy().contains("afresh-shared-image"))
        });
        let files: Vec<File> = names.filter_map(open).filter(is_file).collect();
        assert!(!files.is_empty());
        files.iter().for_each(|file| file.write_all_at(&[0xee], at as u64).unwrap());
    }

    // One test, because the files of another one would be written to as well.
    #[test]
    fn a_file_has_the_pages_that_were_read_and_no_others() {
        let layout = layout();
        let build = |written: Option<usize>| {
            let mut batches = 0;
            layout.build::<ImageError>(|runs, bytes| {
                fill(runs, bytes);
                batches += 1;
                if let Some(at) = written.filter(|_| batches == 3) {
                    write_through_proc(at);
                }
                Ok(())
            })
        };
        // Two pages that are complete by then, and two holes.
        for at in [7, 99 * PAGE_SIZE, 102 * PAGE_SIZE, 308 * PAGE_SIZE + 5] {
            let error = build(Some(at)).unwrap_err();
            assert!(matches!(error, ImageError::Altered), "{at}: {error}");
        }
        // This page is written afterwards.
        for written in [None, Some((FILE_PAGES - 1) * PAGE_SIZE)] {
            let file = build(written).unwrap();
            let image = Image::from_sealed(&layout, file).unwrap().unwrap();
            let mut expected = vec![0; (FILE_PAGES + 100) * PAGE_SIZE];
            for run in &layout.stored {
                let bytes = run.byte_start()..run.byte_start() + run.byte_len();
                fill(&[*run], &mut expected[bytes]);
            }
            let mut bytes = vec![1; expected.len()];
            image.read(0, &mut bytes);
            assert!(bytes == expected);
        }
    }

    #[test]
    fn holes_of_a_file_take_no_memory() {
        let stored: Vec<_> = (0..200).map(|n| PageRange::new(n * 12, 8)).collect();
        let layout = SealedImageFile::new(2400, &stored).unwrap();
        let file = layout.build::<ImageError>(|runs, bytes| {
            fill(runs, bytes);
            Ok(())
        });
        // Where all memory files have huge pages, those of this one are in them from the start.
        let plain = Memfd::new(c"plain").unwrap();
        plain.set_len(layout.file_pages() * PAGE_SIZE).unwrap();
        for run in &stored {
            plain.write_at(&vec![1; run.byte_len()], run.byte_start()).unwrap();
        }
        assert_eq!(file.unwrap().file().resident_bytes(), plain.resident_bytes());
    }

    #[test]
    fn huge_pages_are_whole_where_no_hole_is_in_them() {
        let range = PageRange::new;
        let places = [range(0, 500), range(500, 600), range(1101, 1000), range(2101, 1000)];
        assert_eq!(whole_huge_pages(&places), [range(0, 1024), range(1536, 1536)]);
        assert_eq!(whole_huge_pages(&[range(1, 1000)]), []);
    }
}
