//! Images survive a trip through a store.

use crate::support::{options, page, store};
use afresh_memory::{ImageBuilder, Slot, SlotConfig};
use afresh_store::Encoding;

#[test]
fn an_image_saved_and_opened_again_is_the_same_image() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut builder = ImageBuilder::new(900);
    builder.segment(5000, b"not on a page boundary").unwrap();
    for seed in 1..40 {
        builder.segment(seed * 4096 * 20, &page(seed as u8)).unwrap();
    }
    let image = builder.build().unwrap();
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        let mut save = options();
        save.options.encoding = encoding;
        store.save("a", &image, &save).unwrap();
        let again = store.load("a").unwrap().to_image().unwrap();
        assert_eq!(again.digest(), image.digest());
        assert_eq!(again.stored_pages(), image.stored_pages());
    }
}

#[test]
fn a_guest_that_ran_saves_only_what_it_changed() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(dir.path());
    let mut builder = ImageBuilder::new(300);
    (0..300).for_each(|n| {
        builder.segment(n * 4096, &page(n as u8 | 1)).unwrap();
    });
    let warm = builder.build().unwrap();
    store.save("warm", &warm, &options()).unwrap();
    let mut slot = Slot::new(&warm, SlotConfig::default()).unwrap();
    slot.write(4096 * 7 + 5, b"dirt").unwrap();
    slot.write(4096 * 200, b"dirt").unwrap();
    let after = slot.freeze().unwrap();
    let mut save = options();
    save.options.parent = Some(store.load("warm").unwrap());
    store.save("after", &after, &save).unwrap();
    let snapshot = store.load("after").unwrap();
    assert_eq!(snapshot.inspect().layers[1].stored, 2);
    assert_eq!(snapshot.to_image().unwrap().digest(), after.digest());
}
