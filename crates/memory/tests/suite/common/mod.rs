//! A filler for tests: copies from a byte vector, at once, slowly, or not at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use afresh_memory::{Filler, Image, ImageError, Inserter, PAGE_SIZE, PageRange};

const MISSING: u8 = 0;
const FILLING: u8 = 1;
const PRESENT: u8 = 2;

pub(crate) struct VecFiller {
    content: Vec<u8>,
    inserter: Inserter,
    states: Vec<AtomicU8>,
    left: AtomicUsize,
    /// Pages delivered on demand from a fault handler.
    pub faults: AtomicUsize,
    /// Set to deliver nothing more.
    pub dead: AtomicBool,
    /// Set to fail calls, though pages can still come.
    pub fails: AtomicBool,
    pub delay: Duration,
}

impl VecFiller {
    /// Puts one page in place; a second caller waits.
    fn deliver(&self, page: usize) -> bool {
        let state = &self.states[page];
        loop {
            match state.compare_exchange(MISSING, FILLING, Ordering::AcqRel, Ordering::Acquire) {
                Err(PRESENT) => return true,
                Err(_) => std::thread::yield_now(),
                Ok(_) if self.dead.load(Ordering::Acquire) => {
                    state.store(MISSING, Ordering::Release);
                    return false;
                }
                Ok(_) => break,
            }
        }
        if !self.delay.is_zero() {
            std::thread::sleep(self.delay);
        }
        let at = page * PAGE_SIZE;
        let end = self.content.len().min(at + PAGE_SIZE);
        let mut bytes = [0; PAGE_SIZE];
        bytes[..end - at.min(end)].copy_from_slice(&self.content[at.min(end)..end]);
        self.inserter.put(page, &bytes).unwrap();
        state.store(PRESENT, Ordering::Release);
        self.left.fetch_sub(1, Ordering::AcqRel);
        true
    }

    pub(crate) fn inserter(&self) -> &Inserter {
        &self.inserter
    }

    /// Pages that are in place.
    pub(crate) fn present(&self) -> usize {
        self.states.iter().filter(|s| s.load(Ordering::Acquire) == PRESENT).count()
    }

    /// Delivers everything, as a streaming thread does.
    pub(crate) fn stream(&self) {
        self.inserter.filled().iter().flat_map(|run| run.start..run.end()).for_each(|page| {
            self.deliver(page);
        });
    }
}

impl Filler for VecFiller {
    fn fill_in_handler(&self, page: usize) -> bool {
        self.faults.fetch_add(1, Ordering::Relaxed);
        self.deliver(page)
    }

    fn fill(&self, pages: PageRange) -> bool {
        !self.fails.load(Ordering::Acquire)
            && (pages.start..pages.end()).all(|page| self.deliver(page))
    }

    fn failure(&self) -> Option<String> {
        let dead = self.dead.load(Ordering::Acquire) && self.left.load(Ordering::Acquire) > 0;
        dead.then(|| "the source is dead".to_owned())
    }
}

/// An image of `content` that is filled when its pages are needed; `stored` is as in `Image::lazy`.
pub(crate) fn lazy_image(
    content: &[u8],
    stored: &[PageRange],
    delay: Duration,
) -> (Image, Option<Arc<VecFiller>>) {
    let mut made = None;
    let image = Image::lazy::<ImageError>(content.len() / PAGE_SIZE, stored, |inserter| {
        let filler = Arc::new(VecFiller {
            content: content.to_vec(),
            states: (0..inserter.pages()).map(|_| AtomicU8::new(MISSING)).collect(),
            left: AtomicUsize::new(inserter.filled().iter().map(|run| run.len).sum()),
            inserter,
            faults: AtomicUsize::new(0),
            dead: AtomicBool::new(false),
            fails: AtomicBool::new(false),
            delay,
        });
        made = Some(filler.clone());
        Ok(filler)
    })
    .unwrap();
    (image, made)
}

/// The pages of `content` that are not zero.
pub(crate) fn occupied(content: &[u8]) -> Vec<PageRange> {
    let mut runs: Vec<PageRange> = Vec::new();
    for (page, bytes) in content.chunks(PAGE_SIZE).enumerate() {
        if bytes.iter().all(|b| *b == 0) {
            continue;
        }
        match runs.last_mut() {
            Some(last) if last.end() == page => last.len += 1,
            _ => runs.push(PageRange::new(page, 1)),
        }
    }
    runs
}

/// Memory of the files that hold `image`, in pages.
#[cfg(not(any(miri, afresh_portable)))]
pub(crate) fn resident_pages(image: &Image) -> u64 {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    let files = image.files().unwrap();
    let mut seen: Vec<usize> = Vec::new();
    for (index, file) in files.iter().enumerate() {
        if !seen.iter().any(|other| files[*other].shares_file(file)) {
            seen.push(index);
        }
    }
    let blocks = |index: usize| {
        let file = File::from(files[index].file().unwrap().try_clone_to_owned().unwrap());
        file.metadata().unwrap().blocks() * 512 / PAGE_SIZE as u64
    };
    seen.into_iter().map(blocks).sum()
}
