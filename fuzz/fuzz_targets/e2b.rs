//! Any bytes as the body of a request in E2B's shape, or as a form with files: refused, or decoded.
//! It takes memory in proportion to its bytes.
#![no_main]

#[path = "../../crates/serve/src/sandbox/bodies/form.rs"]
mod form;
#[path = "../../crates/serve/src/sandbox/bodies/network_rules.rs"]
#[allow(dead_code, reason = "the fields are read by the server")]
mod network_rules;
#[path = "../../crates/serve/src/sandbox/bodies/requests.rs"]
#[allow(dead_code, reason = "the fields are read by the server")]
mod requests;
#[path = "../../crates/serve/src/sandbox/bodies/unknown_fields.rs"]
#[allow(dead_code, reason = "the fields are read by the server")]
mod unknown_fields;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use libfuzzer_sys::fuzz_target;
use requests::{
    ConnectMessages, ContextRequest, CreateRequest, ExecuteRequest, FilesystemRequest,
    NetworkUpdate, Part, ProcessRequest, StartRequest, TimeoutRequest, WatchRequest,
};
use serde::de::DeserializeOwned;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Bytes of memory for a byte of JSON: a list grows by doubling, and an empty text takes 24 bytes.
const EACH: usize = 64;
/// Memory for messages, and for the first node of a map.
const ROOM: usize = 64 << 10;

fn body<T: DeserializeOwned>(text: &[u8]) -> Result<(), String> {
    serde_json::from_slice::<T>(text).map(drop).map_err(|error| error.to_string())
}

fn stream<T: DeserializeOwned>(body: &[u8]) -> Result<(), String> {
    let mut all: Vec<T> = Vec::new();
    for message in ConnectMessages(body) {
        all.push(serde_json::from_slice(message?).map_err(|error| error.to_string())?);
    }
    Ok(())
}

/// The first line is the boundary, as a content-type names it.
fn files(text: &[u8]) -> Result<(), String> {
    let end = text.iter().position(|byte| *byte == b'\n').ok_or("no line")?;
    let kind = std::str::from_utf8(&text[..end]).map_err(|error| error.to_string())?;
    let boundary = form::boundary(kind).map_err(|error| error.to_string())?;
    let body = &text[end + 1..];
    let files = form::files(body, &boundary).map_err(|error| error.to_string())?;
    assert!(files.len() <= form::MAX_FILES);
    let mut at = 0;
    for file in files {
        assert!(at <= file.content.start);
        at = file.content.start + body[file.content].len();
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, text)) = data.split_first() else { return };
    let parse = match kind {
        b'c' => body::<CreateRequest>,
        b't' => body::<TimeoutRequest>,
        b'e' => body::<ExecuteRequest>,
        b'f' => body::<FilesystemRequest>,
        b'n' => body::<ContextRequest>,
        b'u' => body::<NetworkUpdate>,
        b'w' => body::<WatchRequest>,
        b'p' => body::<ProcessRequest>,
        b'm' => files,
        b's' => stream::<StartRequest>,
        _ => stream::<Part>,
    };
    let (parsed, _) = within(text.len() * EACH + ROOM, || parse(text));
    let _ = accepted(parsed);
});
