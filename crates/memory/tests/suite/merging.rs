//! Merging of equal pages by the kernel (KSM) must not let a write pass unnoticed. A process of its own, because
//! it has all of its memory merged.
#![cfg(not(miri))]

use std::fs;
use std::time::{Duration, Instant};

use afresh_memory::{ImageBuilder, PAGE_SIZE, Slot, SlotConfig, Strategy, TrackerKind};

const KSM: &str = "/sys/kernel/mm/ksm";
const PAGES: usize = 16;

/// The host's settings, put back at the end.
struct Settings(Vec<(&'static str, String)>);

impl Settings {
    fn change(wanted: &[(&'static str, &str)]) -> std::io::Result<Self> {
        let mut this = Self(Vec::new());
        for (name, value) in wanted {
            let before = fs::read_to_string(format!("{KSM}/{name}"))?;
            fs::write(format!("{KSM}/{name}"), value)?;
            this.0.push((name, before));
        }
        Ok(this)
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        for (name, before) in &self.0 {
            if let Err(error) = fs::write(format!("{KSM}/{name}"), before.trim()) {
                println!("{KSM}/{name} stays changed: {error}");
            }
        }
    }
}

fn counter(name: &str) -> u64 {
    fs::read_to_string(format!("{KSM}/{name}")).unwrap().trim().parse().unwrap()
}

#[test]
fn a_write_to_a_page_that_was_equal_to_others_is_undone() {
    const PR_SET_MEMORY_MERGE: i32 = 67;
    // SAFETY: changes a setting of this process, which runs this test alone.
    if unsafe { libc::prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) } != 0 {
        println!("SKIPPED: memory of a process cannot be merged here");
        return;
    }
    let wanted = [("run", "1"), ("sleep_millisecs", "1"), ("pages_to_scan", "20000")];
    let settings = match Settings::change(&wanted) {
        Ok(settings) => settings,
        Err(error) => {
            println!("SKIPPED: {KSM} cannot be set here: {error}");
            return;
        }
    };
    let mut builder = ImageBuilder::new(PAGES);
    for page in 0..PAGES {
        builder.segment(page * PAGE_SIZE, &[0x5a; PAGE_SIZE]).unwrap();
    }
    let image = builder.build().unwrap();
    let strategy = Strategy::WriteSet(Some(TrackerKind::UffdSigbus));
    let make = || Slot::new(&image, SlotConfig { strategy, ..SlotConfig::default() });
    let Ok(mut slots) = (0..4).map(|_| make()).collect::<Result<Vec<_>, _>>() else {
        println!("SKIPPED: userfaultfd in SIGBUS mode is not to be had here");
        return;
    };
    for slot in &mut slots {
        for page in 0..PAGES {
            slot.write(page * PAGE_SIZE + 7, b"dirt").unwrap();
        }
        // Until all of it was shed: the pages are protected copies, equal to one another.
        for _ in 0..100_000 {
            slot.reset().unwrap();
            if slot.write_set_len() == 0 {
                break;
            }
        }
        assert_eq!(slot.write_set_len(), 0, "nothing was shed");
    }
    // Other memory of the process shows when the kernel has been through it: equal pages, twice.
    let control = vec![0x77_u8; 64 * PAGE_SIZE];
    let (scans, started) = (counter("full_scans"), Instant::now());
    while counter("full_scans") < scans + 4 && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("{} pages shared, {} sharing", counter("pages_shared"), counter("pages_sharing"));
    for slot in &mut slots {
        for page in 0..PAGES {
            slot.write(page * PAGE_SIZE + 9, b"secret").unwrap();
        }
        slot.reset().unwrap();
        assert_eq!(slot.verify().unwrap(), [], "a write to a merged page went unnoticed");
    }
    drop((control, settings));
}
