//! Requests of the control protocol: a JSON object a line.
//!
//! Promises: a request is either understood whole or refused with the field that is wrong; an unknown field is refused.

use std::path::PathBuf;
use std::time::Duration;

use afresh_store::Encoding;
use afresh_sys::PageRange;
use afresh_sys::socket::SocketAccess;
use serde_json::{Map, Value};

use super::host::DoorOptions;

/// Default time that a request waits for a VMM to be detached.
const DETACH_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum of it.
const MAX_DETACH_TIMEOUT: u64 = 3600;

/// A request of a control client.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Request {
    /// The doors and the VMMs.
    List,
    /// Open a door. Its `snapshot` is a reference that [`super::Snapshots::open`] understands.
    Add(Box<DoorOptions>),
    /// Close a door.
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
        pages: Option<Vec<PageRange>>,
    },
    /// Fill all pages of a VMM, and release it.
    Detach {
        /// Its name.
        vm: String,
        /// How long to wait for that.
        timeout: Duration,
    },
    /// Save the memory of a paused VMM.
    Snapshot {
        /// Its name.
        vm: String,
        /// The new snapshot.
        to: String,
        /// A file with the state of the VMM.
        state: Option<PathBuf>,
        /// How pages are stored.
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

/// The fields of a request that are still to be read.
struct Fields(Map<String, Value>);

impl Fields {
    fn text(&mut self, name: &str) -> Result<Option<String>, String> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(format!("`{name}` is not a string")),
        }
    }

    fn needed(&mut self, name: &str) -> Result<String, String> {
        self.text(name)?.ok_or_else(|| format!("`{name}` is missing"))
    }

    fn flag(&mut self, name: &str) -> Result<bool, String> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(_) => Err(format!("`{name}` is neither true nor false")),
        }
    }

    fn number(&mut self, name: &str, most: u64) -> Result<Option<u64>, String> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64().filter(|number| *number <= most) {
                Some(number) => Ok(Some(number)),
                None => Err(format!("`{name}` is not a number from 0 to {most}")),
            },
        }
    }

    /// Ranges as pairs: first page and number of pages.
    fn ranges(&mut self, name: &str) -> Result<Option<Vec<PageRange>>, String> {
        let pair = |value: &Value| {
            let [first, len] = &value.as_array()?[..] else { return None };
            let first = usize::try_from(first.as_u64()?).ok()?;
            let len = usize::try_from(len.as_u64()?).ok()?;
            first.checked_add(len).map(|_| PageRange::new(first, len))
        };
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(list)) => match list.iter().map(pair).collect() {
                Some(ranges) => Ok(Some(ranges)),
                None => Err(format!("`{name}` has an entry that is not [first, count]")),
            },
            Some(_) => Err(format!("`{name}` is not an array")),
        }
    }

    fn end(self) -> Result<(), String> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => {
                Err(format!("unknown field {:?}", name.chars().take(40).collect::<String>()))
            }
        }
    }
}

/// Parses a line. Returns the client's `id` for the request, if it has one, and the request.
///
/// # Errors
/// The field that is wrong.
pub fn parse_request(line: &[u8]) -> (Option<Value>, Result<Request, String>) {
    let mut fields = match serde_json::from_slice(line) {
        Ok(Value::Object(fields)) => Fields(fields),
        Ok(_) => return (None, Err("a request is a JSON object".to_owned())),
        Err(error) => return (None, Err(format!("a request is a JSON object: {error}"))),
    };
    let id = fields.0.remove("id");
    if !matches!(id, None | Some(Value::String(_) | Value::Number(_))) {
        return (None, Err("`id` is neither a string nor a number".to_owned()));
    }
    let request = request(&mut fields).and_then(|request| fields.end().map(|()| request));
    (id, request)
}

fn request(fields: &mut Fields) -> Result<Request, String> {
    const KNOWN: &str = "list, add, remove, stats, touched, record, prefetch, detach and snapshot";
    let name = fields.needed("request")?;
    Ok(match name.as_str() {
        "list" => Request::List,
        "add" => Request::Add(Box::new(door(fields)?)),
        "remove" => Request::Remove { name: fields.needed("name")? },
        "stats" => Request::Stats { vm: fields.text("vm")? },
        "touched" => Request::Touched { vm: fields.needed("vm")? },
        "record" => Request::Record { vm: fields.needed("vm")?, to: fields.needed("to")? },
        "prefetch" => {
            Request::Prefetch { vm: fields.needed("vm")?, pages: fields.ranges("pages")? }
        }
        "detach" => Request::Detach {
            vm: fields.needed("vm")?,
            timeout: fields
                .number("timeout_s", MAX_DETACH_TIMEOUT)?
                .map_or(DETACH_TIMEOUT, Duration::from_secs),
        },
        "snapshot" => Request::Snapshot {
            vm: fields.needed("vm")?,
            to: fields.needed("to")?,
            state: fields.text("state")?.map(PathBuf::from),
            encoding: match fields.text("encoding")?.as_deref() {
                None | Some("raw") => Encoding::Raw,
                Some("zstd") => Encoding::Zstd,
                Some(_) => return Err("`encoding` is neither raw nor zstd".to_owned()),
            },
        },
        other => {
            let other: String = other.chars().take(40).collect();
            return Err(format!("unknown request {other:?}; known are {KNOWN}"));
        }
    })
}

fn door(fields: &mut Fields) -> Result<DoorOptions, String> {
    let (name, snapshot) = (fields.needed("name")?, fields.needed("snapshot")?);
    let mut door = DoorOptions::new(&name, &snapshot, fields.needed("socket")?);
    if let Some(owner) = fields.text("socket_owner")? {
        let (user, group) = parse_owner(&owner)?;
        door.access = SocketAccess { user: Some(user), group, ..door.access };
    }
    if let Some(mode) = fields.text("socket_mode")? {
        door.access.mode = parse_mode(&mode)?;
    }
    door.makes_directory = fields.flag("make_dir")?;
    door.stream = !fields.flag("on_demand")?;
    door.record = fields.flag("record")?;
    door.once = fields.flag("once")?;
    if let Some(window) = fields.number("window", 512)? {
        if window == 0 {
            return Err("`window` is 0; use 1 to 512 pages".to_owned());
        }
        door.window = window as usize;
    }
    door.budget = fields.number("budget_mib", 1 << 30)?.map(|mib| (mib as usize) << 20);
    Ok(door)
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
        let line = br#"{"request":"add","name":"a","snapshot":"s@n","socket":"/x/y","record":true,
            "socket_owner":"10:20","socket_mode":"0660","budget_mib":3,"window":8}"#;
        let Ok(Request::Add(door)) = parse_request(line).1 else { panic!() };
        assert_eq!(door.access, SocketAccess { user: Some(10), group: Some(20), mode: 0o660 });
        assert_eq!((door.budget, door.window, door.record), (Some(3 << 20), 8, true));
    }

    #[test]
    fn wrong_requests_are_refused_by_name() {
        for (text, word) in [
            ("", "JSON object"),
            ("[]", "JSON object"),
            ("{}", "`request` is missing"),
            (r#"{"request":"dance"}"#, "unknown request \"dance\"; known are list"),
            (r#"{"request":"stats","vm":3}"#, "`vm` is not a string"),
            (r#"{"request":"stats","vn":"a"}"#, "unknown field \"vn\""),
            (r#"{"request":"detach","vm":"a","timeout_s":-1}"#, "`timeout_s` is not a number"),
            (r#"{"request":"detach","vm":"a","timeout_s":99999}"#, "0 to 3600"),
            (r#"{"request":"prefetch","vm":"a","pages":[[1]]}"#, "[first, count]"),
            (
                r#"{"request":"prefetch","vm":"a","pages":[[18446744073709551615,2]]}"#,
                "[first, count]",
            ),
            (r#"{"request":"snapshot","vm":"a"}"#, "`to` is missing"),
            (r#"{"request":"snapshot","vm":"a","to":"b","encoding":"gzip"}"#, "raw nor zstd"),
            (r#"{"request":"add","name":"a","snapshot":"s","socket":"x","window":0}"#, "window"),
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
    }
}
