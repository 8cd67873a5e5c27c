//! Images that are filled while slots use them: never wrong content, and a clear end when content
//! does not come.
#![cfg(not(miri))]

use crate::common;

use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{lazy_image, occupied};
use afresh_memory::{
    Feature, Features, Filler, HostAccess, Image, PAGE_SIZE, PageRange, Slot, SlotConfig, Strategy,
    TrackError, Tracker, TrackerKind,
};
use afresh_sys::inject;
use afresh_sys::planted::{self, Bug};

pub(crate) const PAGES: usize = 400;

/// Some runs of content, small gaps between some of them, large ones between others.
pub(crate) fn content() -> Vec<u8> {
    let mut bytes = vec![0u8; PAGES * PAGE_SIZE];
    for page in (3..60).chain(70..75).chain(200..260).chain(390..400) {
        let fill = page as u8 | 1;
        bytes[page * PAGE_SIZE..(page + 1) * PAGE_SIZE].fill(fill);
    }
    bytes
}

pub(crate) fn uffd_missing() -> bool {
    let missing = !Features::host().has(Feature::UffdSigbus);
    if missing {
        println!("SKIPPED: userfaultfd in SIGBUS mode is unavailable here");
    }
    missing
}

#[test]
fn only_what_is_touched_is_fetched_and_it_is_right() {
    if uffd_missing() {
        return;
    }
    let content = content();
    let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let filler = filler.unwrap();
    let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
    assert_eq!(filler.present(), 0);
    let mut byte = [0];
    for page in [5, 72, 250, 0, 150, 399] {
        slot.read(page * PAGE_SIZE + 9, &mut byte).unwrap();
        assert_eq!(byte[0], content[page * PAGE_SIZE + 9], "page {page}");
    }
    assert!(filler.present() <= 6, "{} pages were fetched for 6 touches", filler.present());
    for run in 0..3 {
        slot.write(210 * PAGE_SIZE, &[run, 1, 2]).unwrap();
        slot.write(150 * PAGE_SIZE, &[3; 8]).unwrap();
        slot.reset().unwrap();
        for page in [210, 150] {
            slot.read(page * PAGE_SIZE, &mut byte).unwrap();
            assert_eq!(byte[0], content[page * PAGE_SIZE]);
        }
    }
    assert!(!image.is_complete());
    assert_eq!(slot.verify().unwrap(), []);
    assert!(image.is_complete(), "a comparison needs everything");
}

#[test]
fn slots_of_one_image_share_what_has_arrived() {
    if uffd_missing() {
        return;
    }
    let content = content();
    let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let filler = filler.unwrap();
    let slots: Vec<_> = (0..3).map(|_| Slot::new(&image, SlotConfig::default()).unwrap()).collect();
    for slot in &slots {
        // SAFETY: a page of a slot that nothing writes.
        let byte = unsafe { slot.base().add(30 * PAGE_SIZE).read_volatile() };
        assert_eq!(byte, content[30 * PAGE_SIZE]);
    }
    assert_eq!(filler.faults.load(Ordering::Relaxed), 1);
}

#[test]
fn threads_that_touch_and_a_stream_agree_on_every_byte() {
    if uffd_missing() {
        return;
    }
    let content = content();
    let (image, filler) = lazy_image(&content, &occupied(&content), Duration::from_micros(20));
    let filler = filler.unwrap();
    let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| filler.stream());
        for seed in 1..4usize {
            let (base, content) = (slot.base() as usize, &content);
            scope.spawn(move || {
                for step in 0..PAGES {
                    let page = (step * 37 * seed + seed) % PAGES;
                    let mut bytes = vec![0; PAGE_SIZE];
                    let from = (base + page * PAGE_SIZE) as *const u8;
                    // SAFETY: the page is inside the slot, which outlives the scope; it is not
                    // written.
                    unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), PAGE_SIZE) };
                    assert!(bytes == content[page * PAGE_SIZE..][..PAGE_SIZE], "page {page}");
                }
            });
        }
    });
    assert!(image.is_complete());
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
}

#[test]
fn the_first_reset_learns_the_written_pages_of_a_lazy_image_and_no_others() {
    if uffd_missing() {
        return;
    }
    let content = content();
    let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    assert!(filler.unwrap().fill(PageRange::new(200, 30)));
    let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
    let mut byte = [0];
    // Pages that are in place, a missing one, pages of zeros, and pages that are only read.
    for page in [201, 220] {
        slot.read(page * PAGE_SIZE, &mut byte).unwrap();
    }
    let written = [100, 150, 201, 202, 250, 399];
    for page in written {
        slot.write(page * PAGE_SIZE + 7, b"dirt").unwrap();
    }
    assert_eq!(slot.reset().unwrap().learned, written.len());
    let learned: Vec<usize> = slot.write_set().iter().flat_map(|r| r.start..r.end()).collect();
    assert_eq!(learned, written);
    // From now on a write is noticed when it happens.
    slot.write(221 * PAGE_SIZE, b"dirt").unwrap();
    slot.write(251 * PAGE_SIZE, b"dirt").unwrap();
    assert_eq!(slot.differing().unwrap(), [PageRange::new(221, 1), PageRange::new(251, 1)]);
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
}

#[test]
fn a_slot_of_a_lazy_image_is_frozen_and_opened_before_its_first_reset() {
    if uffd_missing() {
        return;
    }
    let content = content();
    let (image, _filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
    slot.write(205 * PAGE_SIZE, b"before").unwrap();
    slot.open_range(210 * PAGE_SIZE, PAGE_SIZE).unwrap();
    // SAFETY: inside the slot, and opened.
    unsafe { slot.base().add(210 * PAGE_SIZE).write_volatile(77) };
    slot.write(206 * PAGE_SIZE, b"after").unwrap();
    let changed = slot.differing().unwrap();
    assert_eq!(changed, [PageRange::new(205, 2), PageRange::new(210, 1)]);
    assert!(!image.is_complete(), "a freeze waits for the written pages alone");
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
}

#[test]
fn a_strategy_that_cannot_wait_for_pages_has_them_all_first() {
    let content = content();
    let poorer = Features::host().without(Feature::UffdSigbus);
    for strategy in [Strategy::FullCopy, Strategy::Discard, Strategy::Auto] {
        let (image, _) = lazy_image(&content, &occupied(&content), Duration::ZERO);
        let config =
            SlotConfig { strategy, features: Some(poorer.clone()), ..SlotConfig::default() };
        let mut slot = Slot::new(&image, config).unwrap();
        assert!(image.is_complete(), "{strategy}");
        let reason = &slot.choice().reason;
        assert!(reason.contains("read whole first"), "{reason}");
        slot.write(5 * PAGE_SIZE, b"dirt").unwrap();
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
    }
    let (image, _) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let config = SlotConfig { host_access: HostAccess::Syscalls, ..SlotConfig::default() };
    if Slot::new(&image, config).is_ok() {
        assert!(image.is_complete(), "the kernel cannot wait either");
    }
}

/// An image whose pages the kernel refuses to fill one by one.
fn without_a_door(content: &[u8]) -> (Image, std::sync::Arc<common::VecFiller>) {
    let call = Some(afresh_sys::Call::UffdRegister);
    let plan = inject::Plan { call, after: 0, times: usize::MAX, errno: libc::EINVAL };
    let ((image, filler), _) =
        inject::with(plan, || lazy_image(content, &occupied(content), Duration::ZERO));
    (image, filler.unwrap())
}

#[test]
fn where_pages_cannot_come_under_running_guests_they_all_come_first_and_the_slot_says_so() {
    let content = content();
    let (image, filler) = without_a_door(&content);
    assert!(image.fills_first());
    // The host itself may look at single pages all the same.
    assert_eq!(image.page(5).unwrap()[9], content[5 * PAGE_SIZE + 9]);
    assert_eq!(filler.present(), 1);
    let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
    assert!(image.is_complete() && !image.fills_first());
    let reason = &slot.choice().reason;
    assert!(reason.contains("read whole first"), "{reason}");
    slot.write(210 * PAGE_SIZE, b"dirt").unwrap();
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
    let (image, filler) = without_a_door(&content);
    filler.dead.store(true, Ordering::Release);
    let refusal = Slot::new(&image, SlotConfig::default()).unwrap_err().to_string();
    assert!(refusal.contains("the source is dead"), "{refusal}");
}

#[test]
fn a_page_is_put_in_place_once_and_only_where_there_is_a_place() {
    for refused in [false, true] {
        let content = content();
        let (image, filler) = match refused {
            true => without_a_door(&content),
            false => {
                let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
                (image, filler.unwrap())
            }
        };
        image.resolve(PageRange::new(5, 1)).unwrap();
        let inserter = filler.inserter();
        let errno = |first, bytes: &[u8]| inserter.put(first, bytes).unwrap_err().errno;
        assert_eq!(errno(5, &[1; PAGE_SIZE]), libc::EEXIST);
        assert_eq!(errno(4, &[1; 2 * PAGE_SIZE][..PAGE_SIZE + 1]), libc::EINVAL);
        assert_eq!(errno(inserter.pages() - 1, &[1; 2 * PAGE_SIZE]), libc::EINVAL);
        assert_eq!(errno(usize::MAX, &[1; PAGE_SIZE]), libc::EINVAL);
        assert_eq!(image.page(5).unwrap()[..], content[5 * PAGE_SIZE..6 * PAGE_SIZE]);
    }
}

#[test]
fn a_dead_source_is_an_error_with_its_cause_and_never_zeros() {
    if uffd_missing() {
        return;
    }
    let content = content();
    let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let filler = filler.unwrap();
    let mut slot = Slot::new(&image, SlotConfig::default()).unwrap();
    let mut byte = [0];
    slot.read(30 * PAGE_SIZE, &mut byte).unwrap();
    filler.dead.store(true, Ordering::Release);
    let refusals = [
        slot.read(31 * PAGE_SIZE, &mut byte).unwrap_err().to_string(),
        slot.write(31 * PAGE_SIZE, b"x").unwrap_err().to_string(),
        image.resolve(PageRange::new(31, 1)).unwrap_err().to_string(),
        slot.freeze().unwrap_err().to_string(),
        slot.reset().unwrap_err().to_string(),
        Slot::new(&image, SlotConfig { strategy: Strategy::Discard, ..SlotConfig::default() })
            .unwrap_err()
            .to_string(),
    ];
    for refusal in refusals {
        assert!(refusal.contains("the source is dead"), "{refusal}");
    }
    assert!(slot.quarantined().is_some());
}

/// Run in a separate process, which the fault ends.
#[test]
fn touching_a_page_that_never_comes_raises_sigsegv() {
    const CHILD: &str = "AFRESH_TEST_TOUCH";
    if uffd_missing() {
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        let status =
            afresh_sys::test_command("lazy::touching_a_page_that_never_comes_raises_sigsegv")
                .env(CHILD, "1")
                .status()
                .unwrap();
        assert_eq!(status.signal(), Some(libc::SIGSEGV), "{status}");
        return;
    }
    let content = content();
    let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let slot = Slot::new(&image, SlotConfig::default()).unwrap();
    filler.unwrap().dead.store(true, Ordering::Release);
    // SAFETY: the page is inside the slot; that reading it faults is the point.
    let read = unsafe { slot.base().add(31 * PAGE_SIZE).read_volatile() };
    println!("read {read} where nothing must be read");
}

/// A guest adapter's tracker that reports every page as written.
#[derive(Default)]
struct PageRanges(Vec<PageRange>);

// SAFETY: reports every watched page as written, and protects none.
unsafe impl Tracker for PageRanges {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Other("own")
    }

    fn watch(&mut self, range: PageRange) -> Result<(), TrackError> {
        self.0.push(range);
        Ok(())
    }

    fn drain(&mut self, written: &mut Vec<PageRange>) -> Result<(), TrackError> {
        written.extend_from_slice(&self.0);
        Ok(())
    }

    fn arm(&mut self, _: &[PageRange]) -> Result<(), TrackError> {
        Ok(())
    }

    fn open(&mut self, _: &[PageRange]) -> Result<(), TrackError> {
        Ok(())
    }
}

fn own_slot(image: &Image, features: Option<Features>) -> Slot {
    let config = SlotConfig { features, ..SlotConfig::default() };
    Slot::with_tracker(image, config, |_, _| Ok(Box::<PageRanges>::default())).unwrap()
}

/// Has the kernel read a byte of the slot, as KVM would.
fn kernel_reads(slot: &Slot, at: usize) -> Result<u8, std::io::Error> {
    let mut pipe = [0; 2];
    // SAFETY: the array has room for two descriptors.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    // SAFETY: the byte is inside the slot; the kernel reports whether it can be read.
    let sent = unsafe { libc::write(pipe[1], slot.base().add(at).cast(), 1) };
    let error = std::io::Error::last_os_error();
    let mut byte = 0_u8;
    if sent == 1 {
        // SAFETY: room for the one byte that the pipe holds.
        assert_eq!(unsafe { libc::read(pipe[0], (&raw mut byte).cast(), 1) }, 1);
    }
    // SAFETY: both are ours.
    pipe.iter().for_each(|fd| assert_eq!(unsafe { libc::close(*fd) }, 0));
    if sent == 1 { Ok(byte) } else { Err(error) }
}

#[test]
fn a_slot_with_a_tracker_of_the_callers_is_filled_when_the_kernel_touches_it() {
    if !Features::host().has(Feature::UffdKernel) {
        println!("SKIPPED: no userfaultfd for faults of the kernel here");
        return;
    }
    let content = content();
    let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let filler = filler.unwrap();
    let mut slots: Vec<_> = (0..3).map(|_| own_slot(&image, None)).collect();
    for slot in &slots {
        for page in [5, 72, 250, 0, 150, 399] {
            let at = page * PAGE_SIZE + 9;
            assert_eq!(kernel_reads(slot, at).unwrap(), content[at], "page {page}");
        }
    }
    assert!(filler.present() <= 6, "{} pages were fetched for 6 touches", filler.present());
    // Threads touch it too, from their own mode.
    std::thread::scope(|scope| {
        for (seed, slot) in slots.iter_mut().enumerate() {
            let content = &content;
            scope.spawn(move || {
                for step in 0..PAGES {
                    let at = (step * 37 * (seed + 1) + seed) % PAGES * PAGE_SIZE + 1;
                    let mut byte = [0];
                    slot.read(at, &mut byte).unwrap();
                    assert_eq!(byte[0], content[at]);
                }
            });
        }
    });
    assert!(image.is_complete());
    for mut slot in slots {
        slot.write(5 * PAGE_SIZE, b"dirt").unwrap();
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), []);
    }
    // Another image in the same slot, while the first one's source dies.
    let (one, dying) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let (other, _) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let mut slot = own_slot(&one, None);
    assert_eq!(kernel_reads(&slot, 5 * PAGE_SIZE).unwrap(), content[5 * PAGE_SIZE]);
    slot.set_image(&other, &[]).unwrap();
    dying.unwrap().dead.store(true, Ordering::Release);
    assert_eq!(kernel_reads(&slot, 230 * PAGE_SIZE).unwrap(), content[230 * PAGE_SIZE]);
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
}

#[test]
fn a_page_that_never_comes_is_an_error_for_the_kernel_too() {
    if !Features::host().has(Feature::UffdKernel) {
        println!("SKIPPED: no userfaultfd for faults of the kernel here");
        return;
    }
    let content = content();
    let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let filler = filler.unwrap();
    let mut slot = own_slot(&image, None);
    let bystander = own_slot(&image, None);
    let at = 31 * PAGE_SIZE;
    assert_eq!(kernel_reads(&slot, at).unwrap(), content[at]);
    filler.dead.store(true, Ordering::Release);
    let error = kernel_reads(&slot, 32 * PAGE_SIZE).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    assert_eq!(kernel_reads(&slot, at).unwrap_err().raw_os_error(), Some(libc::EFAULT), "closed");
    assert_eq!(kernel_reads(&bystander, at).unwrap(), content[at], "what is there may be read");
    for refusal in
        [slot.fetch(at, 1).unwrap_err().to_string(), slot.reset().unwrap_err().to_string()]
    {
        assert!(refusal.contains("the source is dead"), "{refusal}");
    }
}

#[test]
fn a_forked_child_that_drops_a_slot_does_not_end_the_filling_of_its_parent() {
    if !Features::host().has(Feature::UffdKernel) {
        println!("SKIPPED: no userfaultfd for faults of the kernel here");
        return;
    }
    let content = content();
    let (image, _) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let slot = own_slot(&image, None);
    // SAFETY: the child drops its inherited values and ends at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(slot);
        // SAFETY: ends the child without running anything else.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    let at = 31 * PAGE_SIZE;
    assert_eq!(kernel_reads(&slot, at).unwrap(), content[at]);
}

#[test]
fn without_a_userfaultfd_for_the_kernel_a_slot_with_a_tracker_waits_for_everything() {
    let content = content();
    let (image, _) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let poorer = Features::host().without(Feature::UffdKernel);
    let slot = own_slot(&image, Some(poorer));
    assert!(image.is_complete());
    assert_eq!(kernel_reads(&slot, 5 * PAGE_SIZE).unwrap(), content[5 * PAGE_SIZE]);
}

#[test]
fn joined_and_sliced_images_read_like_their_parts() {
    let content = content();
    let (lazy, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
    let joined = Image::join(&[Image::zero(7), lazy.clone(), lazy]);
    assert_eq!(joined.pages(), 7 + 2 * PAGES);
    let part = joined.slice(PageRange::new(7 + PAGES - 10, 20));
    for page in 0..20 {
        let expected = (PAGES - 10 + page) % PAGES;
        let mut bytes = vec![1; PAGE_SIZE];
        part.read(page * PAGE_SIZE, &mut bytes);
        assert!(bytes == content[expected * PAGE_SIZE..][..PAGE_SIZE], "page {page}");
    }
    assert!(filler.unwrap().present() <= 20);
    let mut slot = Slot::new(&part, SlotConfig::default()).unwrap();
    slot.write(3 * PAGE_SIZE, b"dirt").unwrap();
    let frozen = slot.freeze().unwrap();
    slot.reset().unwrap();
    assert_eq!(slot.verify().unwrap(), []);
    let mut bytes = [0; 5];
    frozen.read(3 * PAGE_SIZE, &mut bytes);
    assert_eq!(&bytes, &[b'd', b'i', b'r', b't', content[(PAGES - 7) * PAGE_SIZE]]);
}

#[test]
fn a_planted_bug_that_loses_a_page_is_caught() {
    if uffd_missing() {
        return;
    }
    planted::must_be_caught(
        &[Bug::Lazy],
        &["lazy::only_what_is_touched_is_fetched_and_it_is_right"],
    );
    planted::must_be_caught(&[Bug::Lazy], &["lazy::slots_of_one_image_share_what_has_arrived"]);
    if Features::host().has(Feature::PagemapScan) {
        let test = "lazy::the_first_reset_learns_the_written_pages_of_a_lazy_image_and_no_others";
        planted::must_be_caught(&[Bug::Private], &[test]);
        let test = "unprotected::writes_after_resets_that_found_none_are_restored";
        planted::must_be_caught(&[Bug::Private], &[test]);
    }
}

/// Run in a separate process: where it fails, a fault ends it.
#[test]
fn code_that_checks_for_a_loss_gets_zeros_in_place_of_pages_that_never_come() {
    const NAME: &str =
        "lazy::code_that_checks_for_a_loss_gets_zeros_in_place_of_pages_that_never_come";
    if uffd_missing() {
        return;
    }
    afresh_sys::run_isolated(NAME, || {
        let content = content();
        let (image, filler) = lazy_image(&content, &occupied(&content), Duration::ZERO);
        let filler = filler.unwrap();
        let config = || SlotConfig { checks_loss: true, ..SlotConfig::default() };
        let mut slot = Slot::new(&image, config()).unwrap();
        let mut other = Slot::new(&image, config()).unwrap();
        let loss = slot.loss();
        // SAFETY: pages of slots that nothing else uses.
        let read =
            |slot: &Slot, page: usize| unsafe { slot.base().add(page * PAGE_SIZE).read_volatile() };
        assert_eq!(read(&slot, 30), content[30 * PAGE_SIZE]);
        assert_eq!(read(&other, 30), content[30 * PAGE_SIZE]);
        filler.dead.store(true, Ordering::Release);
        assert!(!loss.is_known());
        assert_eq!(read(&slot, 31), 0);
        assert_eq!(loss.page(), Some(31));
        // A page that was there is closed as well: the access gets zeros, and none faults forever.
        assert_eq!(read(&slot, 30), 0);
        for page in 0..PAGES {
            // SAFETY: as above.
            unsafe { slot.base().add(page * PAGE_SIZE).write_volatile(7) };
        }
        assert_eq!(loss.page(), Some(31), "the first one is named");
        let refused = slot.fetch(30 * PAGE_SIZE, 1).unwrap_err().to_string();
        assert!(refused.contains("page 31 is lost: the source is dead"), "{refused}");
        let refusals = [
            slot.freeze().unwrap_err().to_string(),
            slot.verify().unwrap_err().to_string(),
            slot.reset().unwrap_err().to_string(),
        ];
        for refusal in refusals {
            assert!(refusal.contains("the source is dead"), "{refusal}");
        }
        // The other slot keeps what it has.
        assert!(!other.loss().is_known());
        assert_eq!(read(&other, 30), content[30 * PAGE_SIZE]);
        other.fetch(30 * PAGE_SIZE, 1).unwrap();
        other.fetch(31 * PAGE_SIZE, 1).unwrap_err();
        other.reset().unwrap_err();
    });
}
