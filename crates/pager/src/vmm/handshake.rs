//! The message that a VMM begins with.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use afresh_sys::errno::EMFILE;
use afresh_sys::{PAGE_SIZE, PageRange, Uffd, UffdMode, poll, socket};
use serde_json::Value;

use super::{VmmError, VmmOptions};
use crate::wait_budget::WaitBudget;

/// Why a handshake is refused.
pub(super) struct Refusal {
    pub(super) error: VmmError,
    /// Whether the peer has sent a userfaultfd: then it waits for pages that will not come.
    pub(super) waits: bool,
}

/// Maximum time of one wait for a part of the message.
const TICK: Duration = Duration::from_millis(50);
/// Longest message; Firecracker's has about a hundred bytes a mapping.
const MAX_MESSAGE: usize = 64 << 10;
/// Bytes that are received at a time.
const PART: usize = 4096;
/// Most mappings; Firecracker has one or two.
const MAX_MAPPINGS: usize = 256;

/// Maximum nesting that serde_json parses.
const MAX_DEPTH: usize = 127;

/// A part of guest memory, mapped in the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Address in the VMM.
    pub base: usize,
    /// Length in pages of 4096 bytes.
    pub pages: usize,
    /// First page of the source.
    pub offset: usize,
    /// Pages that are filled together at least: 1, or 512 for huge pages.
    pub unit: usize,
}

impl Mapping {
    /// One past the last address.
    pub(super) fn end(&self) -> usize {
        self.base + self.pages * PAGE_SIZE
    }

    /// The pages of the mapping that are filled with `pages` of the source, as far as whole units
    /// are.
    pub(super) fn inside_units(&self, pages: PageRange) -> PageRange {
        let start = (pages.start - self.offset).next_multiple_of(self.unit);
        let end = (pages.end() - self.offset) / self.unit * self.unit;
        PageRange::new(start, end.saturating_sub(start))
    }
}

/// Finds the end of a JSON array that arrives in parts. It looks at each byte once.
#[derive(Debug, Default)]
struct ArrayEnd {
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Whether the array ended, or the text is no array.
    ended: bool,
}

impl ArrayEnd {
    /// Takes the next part. Returns whether the text can be parsed now: it is a whole array, or no
    /// array at all.
    fn push(&mut self, part: &[u8]) -> bool {
        for byte in part {
            match byte {
                _ if self.ended => break,
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' if self.depth > 0 => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'[' | b'{' => {
                    self.depth += 1;
                    // The parser refuses it.
                    self.ended = self.depth > MAX_DEPTH;
                }
                b']' | b'}' => {
                    self.depth = self.depth.saturating_sub(1);
                    self.ended = self.depth == 0;
                }
                b' ' | b'\t' | b'\n' | b'\r' => {}
                _ => self.ended = self.depth == 0,
            }
        }
        self.ended
    }
}

/// Parses the JSON array of mappings and checks it against a source of `source_pages` pages.
///
/// # Errors
/// [`VmmError::Handshake`] with the field that is wrong.
pub fn parse_mappings(text: &[u8], source_pages: usize) -> Result<Vec<Mapping>, VmmError> {
    let refuse = |why: String| VmmError::Handshake(why);
    let value: Value = serde_json::from_slice(text).map_err(|e| refuse(e.to_string()))?;
    let list = value.as_array().ok_or_else(|| refuse("it is not a JSON array".to_owned()))?;
    if list.is_empty() || list.len() > MAX_MAPPINGS {
        return Err(refuse(format!("{} mappings; 1 to {MAX_MAPPINGS} are accepted", list.len())));
    }
    let mut mappings = Vec::with_capacity(list.len());
    for entry in list {
        mappings.push(parse_mapping(entry, source_pages).map_err(refuse)?);
    }
    let mut sorted = mappings.clone();
    sorted.sort_by_key(|mapping| mapping.base);
    if sorted.windows(2).any(|pair| pair[0].end() > pair[1].base) {
        return Err(refuse("mappings overlap".to_owned()));
    }
    // Or a few bytes would make the pager keep account of many times the source.
    let mut of_source = mappings;
    of_source.sort_by_key(|mapping| mapping.offset);
    if of_source.windows(2).any(|pair| pair[0].offset + pair[0].pages > pair[1].offset) {
        return Err(refuse("mappings show the same pages of the snapshot twice".to_owned()));
    }
    Ok(sorted)
}

fn parse_mapping(entry: &Value, source_pages: usize) -> Result<Mapping, String> {
    let number = |name: &str| {
        entry
            .get(name)
            .and_then(Value::as_u64)
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| format!("a mapping has no number `{name}`"))
    };
    let (base, size, offset) = (number("base_host_virt_addr")?, number("size")?, number("offset")?);
    // Page size of the VMM in bytes; older versions misname it.
    let page = match (number("page_size"), number("page_size_kib")) {
        (Ok(bytes), _) | (_, Ok(bytes)) => bytes,
        _ => PAGE_SIZE,
    };
    if page != PAGE_SIZE && page != 512 * PAGE_SIZE {
        return Err(format!("pages of {page} bytes; 4096 and 2097152 are served"));
    }
    if [base, size, offset].iter().any(|n| !n.is_multiple_of(page)) || size == 0 || base == 0 {
        return Err("a mapping is empty or not aligned to its pages".to_owned());
    }
    if base.checked_add(size).is_none() {
        return Err("a mapping wraps around the end of memory".to_owned());
    }
    let (pages, offset) = (size / PAGE_SIZE, offset / PAGE_SIZE);
    if offset.checked_add(pages).is_none_or(|end| end > source_pages) {
        return Err(format!("a mapping is outside the snapshot of {source_pages} pages"));
    }
    Ok(Mapping { base, pages, offset, unit: page / PAGE_SIZE })
}

/// The message of a VMM.
pub(super) struct Handshake {
    pub(super) mappings: Vec<Mapping>,
    pub(super) uffd: Uffd,
    /// Whether the message is in the stream still, where the watchdog finds it if this process is
    /// killed.
    in_stream: bool,
}

impl Handshake {
    /// Takes the message out of the stream, once the watchdog has the userfaultfd.
    pub(super) fn take(&mut self, stream: &UnixStream) -> Result<(), VmmError> {
        if std::mem::take(&mut self.in_stream) {
            receive_part(stream, &mut Vec::new(), &mut Vec::new())?;
        }
        Ok(())
    }
}

/// Receives mappings and userfaultfd. `begin_parts` is called before the first part is taken out of
/// the stream, where the message does not come as a whole.
pub(super) fn receive(
    stream: &UnixStream,
    source_pages: usize,
    options: &VmmOptions<'_>,
    begin_parts: impl FnOnce(),
) -> Result<Handshake, Refusal> {
    let mut fds: Vec<OwnedFd> = Vec::new();
    receive_all(stream, source_pages, (options, begin_parts), &mut fds).map_err(|error| {
        // It has sent a descriptor that this process had no room for.
        let full = matches!(&error, VmmError::Sys(error) if error.errno == EMFILE);
        Refusal { error, waits: full || fds.iter().any(is_userfaultfd) }
    })
}

/// The kind of a descriptor, in the kernel's words.
fn kind(fd: &OwnedFd) -> io::Result<String> {
    let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    Ok(link.to_string_lossy().into_owned())
}

fn is_userfaultfd(fd: &OwnedFd) -> bool {
    kind(fd).is_ok_and(|kind| kind.contains("[userfaultfd]"))
}

/// As [`receive`]; descriptors that came are left in `fds` after an error.
fn receive_all(
    stream: &UnixStream,
    source_pages: usize,
    (options, begin_parts): (&VmmOptions<'_>, impl FnOnce()),
    fds: &mut Vec<OwnedFd>,
) -> Result<Handshake, VmmError> {
    let mut budget = WaitBudget::new(options.handshake);
    let mut begin_parts = Some(begin_parts);
    let (mut text, mut end) = (Vec::new(), ArrayEnd::default());
    let mut in_stream = false;
    // The array can come in pieces, the descriptor with any of them.
    loop {
        match budget.step(TICK, |step| poll::readable([stream.as_fd()], step)) {
            None => return Err(VmmError::Handshake("it did not come in time".to_owned())),
            Some(ready) if ready? == [false] => continue,
            Some(_) => {}
        }
        if text.is_empty() && peek_whole(stream, &mut text, fds)? {
            in_stream = true;
            break;
        }
        if let Some(begin_parts) = begin_parts.take() {
            begin_parts();
        }
        let n = receive_part(stream, &mut text, fds)?;
        if fds.len() > 1 {
            return Err(VmmError::Handshake("more than one descriptor came".to_owned()));
        }
        if end.push(&text[text.len() - n..]) || n == 0 {
            break;
        }
    }
    let mappings = parse_mappings(&text, source_pages)?;
    match fds.first() {
        None => return Err(VmmError::Handshake("no descriptor came".to_owned())),
        Some(fd) if !is_userfaultfd(fd) => {
            let kind = kind(fd)?;
            return Err(VmmError::Handshake(format!("the descriptor is `{kind}`, no userfaultfd")));
        }
        Some(fd) => socket::set_nonblocking(fd.as_fd())?,
    }
    match fds.pop() {
        Some(fd) => {
            Ok(Handshake { mappings, uffd: Uffd::from_fd(fd, UffdMode::Events), in_stream })
        }
        None => Err(VmmError::Handshake("no descriptor came".to_owned())),
    }
}

/// Looks whether the whole message has come at once, with one descriptor, as Firecracker sends it.
/// It stays in the stream.
fn peek_whole(
    stream: &UnixStream,
    text: &mut Vec<u8>,
    fds: &mut Vec<OwnedFd>,
) -> Result<bool, VmmError> {
    let mut whole = vec![0; PART];
    let received = socket::peek(stream, &mut whole, fds)?;
    if fds.len() == 1 && ArrayEnd::default().push(&whole[..received]) {
        text.extend_from_slice(&whole[..received]);
        return Ok(true);
    }
    // Copies: they come again.
    fds.clear();
    Ok(false)
}

/// Appends what comes next; returns its length, 0 at the end.
fn receive_part(
    stream: &UnixStream,
    text: &mut Vec<u8>,
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, VmmError> {
    let mut part = [0; PART];
    let received = socket::receive(stream, &mut part, fds)?;
    text.extend_from_slice(&part[..received]);
    if text.len() > MAX_MESSAGE {
        return Err(VmmError::Handshake(format!("it is longer than {MAX_MESSAGE} bytes")));
    }
    Ok(received)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firecrackers_message_is_understood() {
        let text = br#"[{"base_host_virt_addr":140000000000000,"size":8192,"offset":4096,
            "page_size":4096,"page_size_kib":4096}]"#;
        let expected = Mapping { base: 140_000_000_000_000, pages: 2, offset: 1, unit: 1 };
        assert_eq!(parse_mappings(text, 3).unwrap(), [expected]);
        assert!(parse_mappings(text, 2).is_err());
    }

    #[test]
    fn the_end_of_an_array_is_found_in_whatever_parts_it_comes() {
        let whole = br#" [{"a":"]\"}\\","b":[1,2]}, 3 ]"#;
        for size in 1..=whole.len() {
            let mut end = ArrayEnd::default();
            let parts: Vec<bool> = whole.chunks(size).map(|part| end.push(part)).collect();
            let (last, before) = parts.split_last().unwrap();
            assert!(*last && before.iter().all(|ended| !ended), "{size}");
            assert!(end.push(b"[") && end.depth == 0, "nothing after the end is looked at");
        }
        for none in [&b"x"[..], b" 1", b"\"[", b"]"] {
            assert!(ArrayEnd::default().push(none), "{none:?}");
        }
        for part in [&b""[..], b"  ", b"[1", b"[\"]", b"{\"\\\"}"] {
            assert!(!ArrayEnd::default().push(part), "{part:?}");
        }
    }

    #[test]
    fn hostile_messages_are_refused_by_name() {
        let cases: [(&str, &str); 10] = [
            ("", "EOF"),
            ("{}", "array"),
            ("[]", "0 mappings"),
            (r#"[{"size":4096,"offset":0}]"#, "base_host_virt_addr"),
            (r#"[{"base_host_virt_addr":4096,"size":-4096,"offset":0}]"#, "size"),
            (r#"[{"base_host_virt_addr":4097,"size":4096,"offset":0}]"#, "aligned"),
            (r#"[{"base_host_virt_addr":18446744073709547520,"size":8192,"offset":0}]"#, "wraps"),
            (r#"[{"base_host_virt_addr":4096,"size":40960,"offset":0}]"#, "outside"),
            (
                r#"[{"base_host_virt_addr":4096,"size":8192,"offset":0},
                    {"base_host_virt_addr":8192,"size":4096,"offset":0}]"#,
                "overlap",
            ),
            (
                r#"[{"base_host_virt_addr":4096,"size":8192,"offset":0},
                    {"base_host_virt_addr":65536,"size":8192,"offset":4096}]"#,
                "twice",
            ),
        ];
        for (text, word) in cases {
            let error = parse_mappings(text.as_bytes(), 8).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
        let many = vec![r#"{"base_host_virt_addr":4096,"size":4096,"offset":0}"#; 300].join(",");
        assert!(parse_mappings(format!("[{many}]").as_bytes(), 8).is_err());
        let deep = "[".repeat(100_000);
        assert!(parse_mappings(deep.as_bytes(), 8).is_err());
    }
}
