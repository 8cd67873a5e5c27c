//! Requests of the control protocol: a JSON object a line.
//!
//! Promises: a request is either understood whole or refused with the field that is wrong; an
//! unknown field is refused.

use std::path::PathBuf;
use std::time::Duration;

use afresh_store::Encoding;
use afresh_sys::PageRange;
use afresh_sys::socket::SocketAccess;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::host::EndpointOptions;
use super::watch_end::WatchId;

/// Default time that a request waits for a VMM to be detached.
const DETACH_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum of it.
const MAX_DETACH_TIMEOUT: u64 = 3600;
/// Maximum of `window`, in pages.
const MAX_WINDOW: u64 = 512;
/// Maximum of `budget_mib`.
const MAX_BUDGET_MIB: u64 = 1 << 30;
/// Maximum length of an error, which repeats what a client wrote.
const MAX_ERROR: usize = 400;

/// A request of a control client.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "request", rename_all = "lowercase", deny_unknown_fields)]
#[non_exhaustive]
pub enum Request {
    /// The endpoints and the VMMs.
    List {},
    /// Open an endpoint. Its `snapshot` is a reference that [`super::Snapshots::open`] understands.
    Add(#[serde(deserialize_with = "endpoint")] Box<EndpointOptions>),
    /// Close an endpoint.
    Remove {
        /// Its name.
        name: String,
    },
    /// Counts of a VMM, or of all.
    Stats {
        /// Its name.
        vm: Option<String>,
    },
    /// The pages that a VMM has touched.
    Touched {
        /// Its name.
        vm: String,
    },
    /// Store the pages that a VMM has touched as the working set of its snapshot.
    Record {
        /// Its name.
        vm: String,
        /// The snapshot with the working set.
        to: String,
    },
    /// Fill pages ahead of a VMM.
    Prefetch {
        /// Its name.
        vm: String,
        /// Pages of the snapshot; all without them.
        #[serde(default, deserialize_with = "ranges")]
        pages: Option<Vec<PageRange>>,
    },
    /// Fill all pages of a VMM, and release it.
    Detach {
        /// Its name.
        vm: String,
        /// How long to wait for that.
        #[serde(rename = "timeout_s", default = "detach_timeout", deserialize_with = "timeout")]
        timeout: Duration,
    },
    /// Write-protect the memory of a VMM that runs, for a short freeze.
    Prepare {
        /// Its name.
        vm: String,
    },
    /// Freeze the memory of a paused VMM.
    Freeze {
        /// Its name.
        vm: String,
        /// The watch of its preparation.
        watch: Option<WatchId>,
    },
    /// Give up the frozen memory of a VMM, or the preparation.
    Thaw {
        /// Its name.
        vm: String,
        /// The watch to end.
        watch: WatchId,
    },
    /// Save the memory of a VMM: the frozen one of a watch, or that of a paused guest.
    Snapshot {
        /// Its name.
        vm: String,
        /// The frozen memory; without it the present one is saved.
        watch: Option<WatchId>,
        /// The new snapshot.
        to: String,
        /// A file with the state of the VMM.
        state: Option<PathBuf>,
        /// How pages are stored.
        #[serde(default = "raw", deserialize_with = "encoding")]
        encoding: Encoding,
    },
}

/// Parses `UID` or `UID:GID`.
///
/// # Errors
/// The text that is not a number.
pub fn parse_owner(text: &str) -> Result<(u32, Option<u32>), String> {
    let number = |text: &str| {
        text.parse::<u32>()
            .ok()
            .filter(|id| *id != u32::MAX)
            .ok_or_else(|| format!("{text:?} is no number: an owner is UID or UID:GID, in numbers"))
    };
    match text.split_once(':') {
        None => Ok((number(text)?, None)),
        Some((user, group)) => Ok((number(user)?, Some(number(group)?))),
    }
}

/// Parses the permissions of a socket: octal digits such as `0660`.
///
/// # Errors
/// Text that is no permissions, or does not let the owner connect.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    match mode {
        Some(mode) if mode & 0o200 != 0 => Ok(mode),
        Some(_) => Err(format!("with mode {text} the owner cannot connect: use 0600 or more")),
        None => Err(format!("{text:?} is no mode: use octal digits such as 0660")),
    }
}

/// The fields of a request to open an endpoint.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EndpointFields {
    name: String,
    snapshot: String,
    socket: PathBuf,
    socket_owner: Option<String>,
    socket_mode: Option<String>,
    #[serde(default)]
    make_dir: bool,
    #[serde(default)]
    on_demand: bool,
    #[serde(default)]
    record: bool,
    #[serde(default)]
    once: bool,
    window: Option<u64>,
    budget_mib: Option<u64>,
}

impl TryFrom<EndpointFields> for EndpointOptions {
    type Error = String;

    fn try_from(fields: EndpointFields) -> Result<Self, String> {
        let mut endpoint = Self::new(&fields.name, &fields.snapshot, fields.socket);
        if let Some(owner) = fields.socket_owner {
            let (user, group) = parse_owner(&owner)?;
            endpoint.access = SocketAccess { user: Some(user), group, ..endpoint.access };
        }
        if let Some(mode) = fields.socket_mode {
            endpoint.access.mode = parse_mode(&mode)?;
        }
        endpoint.makes_directory = fields.make_dir;
        endpoint.stream = !fields.on_demand;
        endpoint.record = fields.record;
        endpoint.once = fields.once;
        if let Some(window) = fields.window {
            if !(1..=MAX_WINDOW).contains(&window) {
                return Err(format!("`window` is {window}: use 1 to {MAX_WINDOW} pages"));
            }
            endpoint.window = window as usize;
        }
        if let Some(mib) = fields.budget_mib {
            if mib > MAX_BUDGET_MIB {
                return Err(format!("`budget_mib` is {mib}: use 0 to {MAX_BUDGET_MIB}"));
            }
            endpoint.budget = Some((mib as usize) << 20);
        }
        Ok(endpoint)
    }
}

fn endpoint<'de, D: Deserializer<'de>>(from: D) -> Result<Box<EndpointOptions>, D::Error> {
    let endpoint = EndpointOptions::try_from(EndpointFields::deserialize(from)?);
    endpoint.map(Box::new).map_err(D::Error::custom)
}

/// Ranges as pairs: first page and number of pages.
fn ranges<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Vec<PageRange>>, D::Error> {
    let Some(pairs) = Option::<Vec<(usize, usize)>>::deserialize(from)? else { return Ok(None) };
    let range = |(first, len): (usize, usize)| {
        let end = first.checked_add(len);
        end.map(|_| PageRange::new(first, len))
            .ok_or_else(|| D::Error::custom("`pages` has an entry [first, count] without an end"))
    };
    pairs.into_iter().map(range).collect::<Result<_, _>>().map(Some)
}

fn detach_timeout() -> Duration {
    DETACH_TIMEOUT
}

fn timeout<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    match Option::<u64>::deserialize(from)? {
        None => Ok(DETACH_TIMEOUT),
        Some(seconds) if seconds <= MAX_DETACH_TIMEOUT => Ok(Duration::from_secs(seconds)),
        Some(seconds) => {
            let text = format!("`timeout_s` is {seconds}: use 0 to {MAX_DETACH_TIMEOUT}");
            Err(D::Error::custom(text))
        }
    }
}

fn raw() -> Encoding {
    Encoding::Raw
}

fn encoding<'de, D: Deserializer<'de>>(from: D) -> Result<Encoding, D::Error> {
    match Option::<String>::deserialize(from)?.as_deref() {
        None | Some("raw") => Ok(Encoding::Raw),
        Some("zstd") => Ok(Encoding::Zstd),
        Some(_) => Err(D::Error::custom("`encoding` is neither raw nor zstd")),
    }
}

/// Parses a line. Returns the client's `id` for the request, if it has one, and the request.
///
/// # Errors
/// The field that is wrong.
pub fn parse_request(line: &[u8]) -> (Option<Value>, Result<Request, String>) {
    let mut fields: Map<String, Value> = match serde_json::from_slice(line) {
        Ok(fields) => fields,
        Err(error) => return (None, Err(format!("a request is a JSON object: {error}"))),
    };
    let id = fields.remove("id");
    if !matches!(id, None | Some(Value::String(_) | Value::Number(_))) {
        return (None, Err("`id` is neither a string nor a number".to_owned()));
    }
    // Each null field is as if it were not there.
    fields.retain(|_, value| !value.is_null());
    let request = serde_json::from_value(Value::Object(fields));
    (id, request.map_err(|error| error.to_string().chars().take(MAX_ERROR).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse_request(text.as_bytes()).1.unwrap_err()
    }

    #[test]
    fn requests_are_understood_whole() {
        let (id, request) =
            parse_request(br#"{"id":7,"request":"prefetch","vm":"a.1","pages":[[0,4],[9,1]]}"#);
        assert_eq!(id, Some(Value::from(7)));
        let Ok(Request::Prefetch { vm, pages }) = request else { panic!("{request:?}") };
        assert_eq!(vm, "a.1");
        assert_eq!(pages.unwrap(), [PageRange::new(0, 4), PageRange::new(9, 1)]);
        let line = br#"{"request":"detach","vm":"a","timeout_s":null}"#;
        let Ok(Request::Detach { timeout, .. }) = parse_request(line).1 else { panic!() };
        assert_eq!(timeout, DETACH_TIMEOUT);
        let line = br#"{"request":"add","name":"a","snapshot":"s@n","socket":"/x/y","record":true,
            "socket_owner":"10:20","socket_mode":"0660","budget_mib":3,"window":8}"#;
        let Ok(Request::Add(endpoint)) = parse_request(line).1 else { panic!() };
        assert_eq!(endpoint.access, SocketAccess { user: Some(10), group: Some(20), mode: 0o660 });
        assert_eq!((endpoint.budget, endpoint.window, endpoint.record), (Some(3 << 20), 8, true));
    }

    #[test]
    fn wrong_requests_are_refused_by_name() {
        for (text, word) in [
            ("", "JSON object"),
            ("[]", "JSON object"),
            ("{}", "missing field `request`"),
            (r#"{"request":"dance"}"#, "unknown variant `dance`, expected one of `list`"),
            (r#"{"request":"stats","vm":3}"#, "integer `3`, expected a string"),
            (r#"{"request":"stats","vn":"a"}"#, "unknown field `vn`"),
            (r#"{"request":"list","vm":"a"}"#, "unknown field `vm`"),
            (r#"{"request":"detach","vm":"a","timeout_s":-1}"#, "expected u64"),
            (r#"{"request":"detach","vm":"a","timeout_s":99999}"#, "0 to 3600"),
            (r#"{"request":"prefetch","vm":"a","pages":[[1]]}"#, "a tuple of size 2"),
            (
                r#"{"request":"prefetch","vm":"a","pages":[[18446744073709551615,2]]}"#,
                "[first, count]",
            ),
            (r#"{"request":"snapshot","vm":"a"}"#, "missing field `to`"),
            (r#"{"request":"thaw","vm":"a"}"#, "missing field `watch`"),
            (r#"{"request":"freeze","vm":"a","watch":-1}"#, "expected u64"),
            (r#"{"request":"prepare","vm":"a","watch":1}"#, "unknown field `watch`"),
            (r#"{"request":"snapshot","vm":"a","to":"b","encoding":"gzip"}"#, "raw nor zstd"),
            (r#"{"request":"add","name":"a","snapshot":"s","socket":"x","window":0}"#, "window"),
            (r#"{"request":"add","name":"a","snapshot":"s","socket":"x","wide":0}"#, "`wide`"),
            (r#"{"request":"add","name":"a","snapshot":"s"}"#, "missing field `socket`"),
            (r#"{"request":"list","id":[]}"#, "`id`"),
        ] {
            let error = error(text);
            assert!(error.contains(word), "{text}: {error}");
        }
        for wrong in ["", "x", "1:", "1:2:3", "-1", "4294967295"] {
            assert!(parse_owner(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "9", "01777", "0", "0444", "-1"] {
            assert!(parse_mode(wrong).is_err(), "{wrong}");
        }
        let deep = format!(r#"{{"request":{}"#, "[".repeat(50_000));
        assert!(error(&deep).contains("recursion"));
        assert!(error(&format!(r#"{{"request":"{}"}}"#, "x".repeat(60_000))).len() < 2000);
    }
}
