//! Any bytes as a VMM's mappings: refused, or inside the source and apart from each other. And as a
//! control request. Either takes memory in proportion to its bytes. And as messages about shared
//! images, which are the only bytes of their content.
#![no_main]

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use afresh_pager::images::{ImageAnswer, ImageRequest};
use afresh_pager::vmm::{Request, parse_mappings, parse_request};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Bytes of memory for a byte of JSON: `{}` in a list is a mapping.
const EACH: usize = 256;
/// Memory for messages.
const ROOM: usize = 64 << 10;

fuzz_target!(|data: &[u8]| {
    const PAGES: usize = 1 << 20;
    if let Some(request) = ImageRequest::decode(data) {
        assert_eq!(request.encode()[..], *data);
    }
    if let Some(answer) = ImageAnswer::decode(data) {
        assert_eq!(answer.encode()[..], *data);
    }
    let most = data.len() * EACH + ROOM;
    let (request, _) = within(most, || parse_request(data).1);
    if let Ok(Request::Prefetch { pages: Some(pages), .. }) = request {
        assert!(pages.iter().all(|run| run.start.checked_add(run.len).is_some()));
    }
    let (mappings, _) = within(most, || parse_mappings(data, PAGES));
    let Some(mappings) = accepted(mappings) else { return };
    let mut end = 0;
    for mapping in mappings {
        assert!(mapping.base >= end && mapping.pages > 0);
        assert!(mapping.offset + mapping.pages <= PAGES);
        assert_eq!(mapping.pages % mapping.unit, 0);
        end = mapping.base + mapping.pages * 4096;
    }
});
