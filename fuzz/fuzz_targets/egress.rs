//! Any bytes as a guest's request to a proxied server: refused, or in a form that is read in one
//! way. Its head has bounded memory, and its path stays what it is when it is read again.
#![no_main]

#[path = "../../crates/egress/src/body.rs"]
#[allow(dead_code)]
mod body;
#[path = "../../crates/egress/src/path.rs"]
#[allow(dead_code)]
mod path;
#[path = "../../crates/egress/src/request_head.rs"]
#[allow(dead_code)]
mod request_head;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use body::BodyDecoder;
use libfuzzer_sys::fuzz_target;
use path::{PathPattern, RequestTarget};
use request_head::{BodyFraming, RequestHead};

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Memory for each byte of a head, and constant memory.
const EACH: usize = 256;
const ROOM: usize = 64 << 10;

fuzz_target!(|data: &[u8]| {
    let (parsed, _) = within(ROOM + EACH * data.len(), || RequestHead::parse(data));
    let Some(Some((head, len))) = accepted(parsed) else { return };
    assert!(len <= data.len() && data[..len].ends_with(b"\r\n\r\n"));
    assert!(!head.headers.iter().any(|(name, _)| {
        ["connection", "content-length", "host", "transfer-encoding", "upgrade"].contains(&&**name)
    }));
    let again = RequestTarget::parse(head.target.to_sent().as_bytes()).unwrap();
    assert_eq!(again, head.target);
    assert!(!head.target.path().split('/').any(|part| part == "." || part == ".."));
    assert!(PathPattern::try_from("/**".to_owned()).unwrap().matches(&head.target));
    assert!(head.framing != BodyFraming::UntilClose);
    let (mut decoder, mut content) = (BodyDecoder::of_request(head.framing), Vec::new());
    let body = &data[len..];
    if let Ok(taken) = decoder.decode(body, body.len(), &mut content) {
        assert!(taken <= body.len() && content.len() <= taken);
    }
});
