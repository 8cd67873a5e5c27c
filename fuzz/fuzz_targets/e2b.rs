//! Any bytes as the body of a request in E2B's shape, or as a form with files: refused, or decoded.
//! With its bytes it takes no more memory than the server charges.
#![no_main]

#[path = "../../crates/serve/src/sandbox/request_body/checkpoint_requests.rs"]
#[allow(dead_code, reason = "the fields are read by the server")]
mod checkpoint_requests;
#[path = "../../crates/serve/src/sandbox/request_body/multipart.rs"]
mod multipart;
#[path = "../../crates/serve/src/sandbox/request_body/network_rules.rs"]
#[allow(dead_code, reason = "the fields are read by the server")]
mod network_rules;
#[path = "../../crates/serve/src/sandbox/request_body/requests.rs"]
#[allow(dead_code, reason = "the fields are read by the server")]
mod requests;
#[path = "../../crates/serve/src/sandbox/request_body/template_requests.rs"]
#[allow(dead_code, reason = "the fields are read by the server")]
mod template_requests;
#[path = "../../crates/serve/src/sandbox/request_body/unknown_fields.rs"]
#[allow(dead_code, reason = "the fields are read by the server")]
mod unknown_fields;
#[path = "../../crates/serve/src/sandbox/request_body/weight.rs"]
mod weight;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use checkpoint_requests::{CheckpointName, RollbackTarget};
use libfuzzer_sys::fuzz_target;
use requests::{
    ConnectMessages, ContextRequest, CreateRequest, ExecuteRequest, FilesystemRequest,
    NetworkUpdate, Part, ProcessRequest, StartRequest, TimeoutRequest, WatchRequest,
};
use serde::de::DeserializeOwned;
use template_requests::{BuildPlan, NewTemplate, TagRequest};
use weight::{FILE_WEIGHT, JSON_WEIGHT, code_weight};

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Memory for messages, and for the first node of a map.
const ROOM: usize = 64 << 10;
/// Memory for a form: a list of its files that grows, and their names.
const FORM_ROOM: usize =
    3 * multipart::MAX_FILES * size_of::<multipart::FormFile>() + multipart::MAX_NAMES_BYTES;

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
    let boundary = multipart::boundary(kind).map_err(|error| error.to_string())?;
    let body = &text[end + 1..];
    let files = multipart::files(body, &boundary).map_err(|error| error.to_string())?;
    assert!(files.len() <= multipart::MAX_FILES);
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
        b'b' => body::<BuildPlan>,
        b'a' => body::<NewTemplate>,
        b'g' => body::<TagRequest>,
        b'k' => body::<CheckpointName>,
        b'r' => body::<RollbackTarget>,
        b'm' => files,
        b's' => stream::<StartRequest>,
        _ => stream::<Part>,
    };
    let (weight, room) = match kind {
        b'e' => (code_weight(Some(text.len())), ROOM),
        b'm' => (FILE_WEIGHT, ROOM + FORM_ROOM),
        _ => (JSON_WEIGHT, ROOM),
    };
    // The body is there.
    let (parsed, _) = within(text.len() * (weight - 1) + room, || parse(text));
    let _ = accepted(parsed);
});
