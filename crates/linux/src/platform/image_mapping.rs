//! Maps parts of an image in a guest process, while the stub waits for orders.
//!
//! The process gets the image's files while it maps them, and keeps none: a file may also contain
//! other images.

use afresh_memory::{ImageFile, PageRange};

use super::PlatformError;
use super::commands::{Continuation, StubCommands};
use super::mapped_image::{FileMapping, MappedImage, reader};
use super::process::Process;
use super::segments::Segment;

/// Maximum files that are lent at the same time.
const MAX_LENT: usize = 32;

impl Process {
    /// Makes mappings of an image, while the stub waits for orders.
    pub(super) fn map_pieces(&mut self, pieces: &[FileMapping]) -> Result<(), PlatformError> {
        let mut calls = Vec::new();
        let mut lent: Vec<(&ImageFile, u64)> = Vec::new();
        let close = |&(_, descriptor): &(&ImageFile, u64)| {
            [libc::SYS_close as u64, descriptor, 0, 0, 0, 0, 0]
        };
        for piece in pieces {
            let descriptor = match &piece.file {
                None => u64::MAX,
                Some(file) => match lent.iter().find(|(other, _)| other.shares_file(file)) {
                    Some((_, descriptor)) => *descriptor,
                    None => {
                        if lent.len() == MAX_LENT {
                            calls.extend(lent.iter().map(close));
                            lent.clear();
                            let calls = std::mem::take(&mut calls);
                            self.execute(
                                &StubCommands { calls, ..StubCommands::default() },
                                Continuation::Ask,
                            )?;
                        }
                        // The stub maps it privately and closes it before the guest runs again.
                        let descriptor = self.lend(reader(file)?)?;
                        lent.push((file, descriptor));
                        descriptor
                    }
                },
            };
            calls.push(piece.order(descriptor));
        }
        calls.extend(lent.iter().map(close));
        self.execute(&StubCommands { calls, ..StubCommands::default() }, Continuation::Ask)
    }

    /// Maps `segments`, which are parts of the image, over the present mappings, and watches the
    /// writable ones.
    pub(crate) fn show(
        &mut self,
        image: &MappedImage,
        segments: &[Segment],
    ) -> Result<(), PlatformError> {
        let mut pieces = Vec::new();
        segments.iter().for_each(|segment| image.segment(segment, &mut pieces));
        self.map_pieces(&pieces)?;
        if image.is_coming()
            && let Some(track) = &mut self.track
        {
            let files = pieces.iter().filter(|piece| piece.file.is_some());
            track.await_content(files.map(FileMapping::range))?;
        }
        let writable = segments.iter().filter(|segment| segment.allows(libc::PROT_WRITE));
        writable.into_iter().try_for_each(|segment| self.watch(segment.range()))
    }

    /// Shows another image in the window, of `pages` pages, which differs from the one it shows in
    /// `runs`.
    pub(crate) fn show_window(
        &mut self,
        image: &MappedImage,
        runs: &[PageRange],
        pages: usize,
    ) -> Result<(), PlatformError> {
        // Pages beyond an image count as zero pages in it, and so are in none of the runs, but not
        // in the window.
        let longer = PageRange::new(self.window, pages.saturating_sub(self.window));
        let runs = runs.iter().chain((longer.len > 0).then_some(&longer));
        let pieces: Vec<_> = runs.flat_map(|run| image.window(*run)).collect();
        self.window = self.window.max(pages);
        self.map_pieces(&pieces)
    }
}
