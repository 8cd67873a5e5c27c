//! Any bytes as a VMM's mappings: refused, or inside the source and apart from each other. And as a
//! control request.
#![no_main]

use afresh_fuzz::accepted;
use afresh_pager::vmm::{Request, parse_mappings, parse_request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    const PAGES: usize = 1 << 20;
    if let Ok(Request::Prefetch { pages: Some(pages), .. }) = parse_request(data).1 {
        assert!(pages.iter().all(|run| run.start.checked_add(run.len).is_some()));
    }
    let Some(mappings) = accepted(parse_mappings(data, PAGES)) else { return };
    let mut end = 0;
    for mapping in mappings {
        assert!(mapping.base >= end && mapping.pages > 0);
        assert!(mapping.offset + mapping.pages <= PAGES);
        assert_eq!(mapping.pages % mapping.unit, 0);
        end = mapping.base + mapping.pages * 4096;
    }
});
