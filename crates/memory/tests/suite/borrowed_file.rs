//! Images of parts of borrowed files.

use std::sync::Arc;

use afresh_memory::{BorrowedFile, FileOwner, Image, ImageBuilder, Memfd, PAGE_SIZE, PageRange};

#[derive(Debug)]
struct Owner {
    file: Memfd,
    borrowed: BorrowedFile,
}

impl FileOwner for Owner {
    fn file(&self) -> &Memfd {
        &self.file
    }

    fn part(&self) -> PageRange {
        PageRange::new(3, 8)
    }
}

/// A file whose page `n` holds `n` everywhere, except for the last, which is zero.
fn owner() -> Arc<Owner> {
    let file = Memfd::new(c"borrowed").unwrap();
    file.set_len(11 * PAGE_SIZE).unwrap();
    for page in 0..10 {
        file.write_at(&[page as u8; PAGE_SIZE], page * PAGE_SIZE).unwrap();
    }
    Arc::new(Owner { file, borrowed: BorrowedFile::default() })
}

fn lend(owner: &Arc<Owner>, from: usize, len: usize) -> Image {
    let lender: Arc<dyn FileOwner> = owner.clone();
    // SAFETY: the file is not written any more.
    unsafe { owner.borrowed.image(&lender, PageRange::new(from, len)) }.unwrap()
}

/// The first byte of every page.
fn firsts(image: &Image) -> Vec<u8> {
    (0..image.pages()).map(|page| image.page(page).map_or(0, |bytes| bytes[7])).collect()
}

#[test]
fn lent_pages_are_shared_and_kept_while_an_image_maps_them() {
    let owner = owner();
    let image = lend(&owner, 2, 6);
    assert_eq!(firsts(&image), [5, 6, 7, 8, 9, 0]);
    let other = lend(&owner, 0, 3);
    // Nothing was copied, and both show the file through one view.
    let at = |image: &Image, page: usize| image.page(page).unwrap().as_ptr();
    assert_eq!(at(&image, 0), at(&other, 2));
    let copied = ImageBuilder::new(6).build().unwrap();
    assert!(image.differing(&image.clone()).is_empty() && !image.differing(&copied).is_empty());

    // As parts of another image, which is derived from and cut like any.
    let mut builder = ImageBuilder::new(10);
    builder.segment(0, &[1; 10 * PAGE_SIZE]).unwrap();
    let whole = builder.build().unwrap();
    let parts = [(1, image.clone()), (8, other)];
    let joined = whole.with_parts(12, &parts).unwrap();
    assert_eq!(firsts(&joined), [1, 5, 6, 7, 8, 9, 0, 1, 3, 4, 5, 0]);
    assert_eq!(firsts(&whole.with_parts(3, &[]).unwrap()), [1, 1, 1]);
    assert!(whole.with_parts(10, &parts).is_err(), "a part is not inside");
    assert!(whole.with_parts(12, &[parts[1].clone(), parts[0].clone()]).is_err());
    assert!(whole.with_parts(20, &[(1, image.clone()), (6, image.clone())]).is_err());
    let again = joined.with_parts(12, &[(2, Image::zero(2))]).unwrap();
    assert_eq!(firsts(&again), [1, 5, 0, 0, 8, 9, 0, 1, 3, 4, 5, 0]);
    assert_eq!(joined.digest(), joined.compact().unwrap().digest());

    let gone = Arc::downgrade(&owner);
    drop((owner, image, joined, whole, parts));
    assert!(gone.upgrade().is_some(), "an image shows it");
    assert_eq!(firsts(&again.slice(PageRange::new(4, 3))), [8, 9, 0]);
    drop(again);
    assert!(gone.upgrade().is_none());
}

#[test]
fn nothing_is_lent_that_is_not_in_the_part() {
    let owner = owner();
    let lender: Arc<dyn FileOwner> = owner.clone();
    for range in [PageRange::new(7, 2), PageRange::new(1 << 40, 2), PageRange::new(9, 0)] {
        // SAFETY: the file is not written.
        let refused = unsafe { owner.borrowed.image(&lender, range) };
        assert!(refused.is_err(), "{range:?}");
    }
    assert_eq!(lend(&owner, 8, 0).pages(), 0);
}

/// Pages of the part that are not borrowed yet may be borrowed later: no image contains them
/// before, even between two borrowed pages.
#[test]
fn pages_between_two_parts_are_in_no_image() {
    let owner = owner();
    let empty = Image::zero(6);
    let image = empty.with_parts(6, &[(0, lend(&owner, 0, 2)), (4, lend(&owner, 4, 2))]).unwrap();
    assert_eq!(firsts(&image), [3, 4, 0, 0, 7, 8]);
    assert_eq!(image.mapping_count(), 2, "no mapping goes over what is between them");
}
