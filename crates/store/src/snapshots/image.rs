//! Images in memory, to and from snapshots.

use std::io;

use afresh_memory::{Image, ImageBuilder};
use afresh_sys::{PAGE_SIZE, PageRange};

use crate::{OpenError, Origin, Pages, Snapshot};

/// Pages read at a time.
const BATCH: usize = 256;

impl Pages for Image {
    fn pages(&self) -> usize {
        Image::pages(self)
    }

    fn occupied(&self) -> Vec<PageRange> {
        self.stored().collect()
    }

    fn read(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        self.resolve(PageRange::new(first, out.len() / PAGE_SIZE)).map_err(io::Error::other)?;
        Image::read(self, first * PAGE_SIZE, out);
        Ok(())
    }
}

impl Snapshot {
    /// Reads the whole snapshot into an image, checking every page on the way. Zero pages take no
    /// memory.
    ///
    /// # Errors
    /// [`OpenError::Layer`] when pages are damaged, [`OpenError::Image`] when memory ran out.
    pub fn to_image(&self) -> Result<Image, OpenError> {
        let mut builder = ImageBuilder::new(self.pages());
        let mut buffer = vec![0; BATCH * PAGE_SIZE];
        for run in self.map().runs().iter().filter(|run| run.origin != Origin::Zero) {
            for first in (run.pages.start..run.pages.end()).step_by(BATCH) {
                let pages = BATCH.min(run.pages.end() - first);
                let part = &mut buffer[..pages * PAGE_SIZE];
                self.read(first, part)?;
                builder.segment(first * PAGE_SIZE, part)?;
            }
        }
        Ok(builder.build()?)
    }
}
