//! Results of tools: structured for programs, and as text for models.

use std::fmt::Write as _;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::displayed::DisplayedResult;

#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct CodeResult {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// Bytes of output that were dropped.
    pub(crate) dropped_bytes: u64,
    /// The value of the last expression, as the language shows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) text: Option<String>,
    /// The same value as JSON, where it can be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) json: Option<Value>,
    /// Other results that the code displayed, in their text formats. Images are content of the
    /// answer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) displayed: Vec<DisplayedResult>,
    #[serde(skip)]
    pub(crate) images: Vec<Image>,
    /// The exception that ended the code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<Exception>,
    /// Whether the code was cut short, and the sandbox is as it was before.
    pub(crate) undone: bool,
    /// Wall-clock time of the call.
    pub(crate) milliseconds: f64,
    /// CPU time of the call.
    pub(crate) cpu_milliseconds: f64,
    /// Peak of the memory of the sandbox in the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peak_memory_bytes: Option<u64>,
}

/// An image in base64.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) data: String,
    pub(crate) mime: &'static str,
}

impl CodeResult {
    /// Takes a result that the code displayed.
    pub(crate) fn take_displayed(&mut self, mut displayed: DisplayedResult) {
        for (data, mime) in
            [(displayed.png.take(), "image/png"), (displayed.jpeg.take(), "image/jpeg")]
        {
            self.images.extend(data.map(|data| Image { data, mime }));
        }
        if displayed.is_main {
            self.text = displayed.text.take();
            self.json = displayed.json.take();
        }
        if displayed
            != (DisplayedResult { is_main: displayed.is_main, ..DisplayedResult::default() })
        {
            self.displayed.push(displayed);
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Exception {
    pub(crate) name: String,
    pub(crate) message: String,
    pub(crate) traceback: String,
}

#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct CommandResult {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// Bytes of output that were dropped.
    pub(crate) dropped_bytes: u64,
    /// Bytes of `stdin` that the command left unread, in addition to those in its pipe.
    pub(crate) unread_stdin_bytes: usize,
    /// The exit status, or 128 plus the number of the signal that ended the command, as shells
    /// report it.
    pub(crate) exit_code: i32,
    /// Whether the command was killed at its time limit or by a cancellation.
    pub(crate) killed: bool,
    /// Wall-clock time of the command.
    pub(crate) milliseconds: f64,
    /// CPU time of the command.
    pub(crate) cpu_milliseconds: f64,
    /// Peak of the memory of the sandbox in the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peak_memory_bytes: Option<u64>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct FileContent {
    pub(crate) path: String,
    /// `utf8`, or `base64` for other bytes.
    pub(crate) encoding: &'static str,
    pub(crate) content: String,
    /// Bytes of the whole file.
    pub(crate) size: u64,
    /// The first byte after `content`, where the file has more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next_offset: Option<u64>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WrittenFile {
    pub(crate) path: String,
    pub(crate) bytes: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct DirectoryEntry {
    pub(crate) name: String,
    /// `file`, `directory`, `link` or `device`.
    pub(crate) kind: &'static str,
    /// Bytes of content.
    pub(crate) size: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Listing {
    pub(crate) entries: Vec<DirectoryEntry>,
    /// Entries that are not listed.
    pub(crate) omitted: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct StateId {
    /// The id of the state.
    pub(crate) id: String,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct SandboxNames {
    pub(crate) sandboxes: Vec<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ChangedFile {
    pub(crate) path: String,
    /// `added`, `changed` or `removed`.
    pub(crate) change: &'static str,
    /// Bytes that differ.
    pub(crate) bytes: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct DiffResult {
    pub(crate) files: Vec<ChangedFile>,
    /// Files that are not listed.
    pub(crate) omitted: usize,
    /// Memory pages that differ.
    pub(crate) pages: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct StateInfo {
    pub(crate) id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) parent: Option<String>,
    /// Bytes that only this state stores.
    pub(crate) own_bytes: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct StateTree {
    /// The state that the sandbox continues from.
    pub(crate) at: String,
    /// Oldest first. The first is the start.
    pub(crate) states: Vec<StateInfo>,
}

/// The text of a result for models.
pub(crate) trait Describe {
    fn describe(&self) -> String;

    /// The images of the result.
    fn images(&self) -> &[Image] {
        &[]
    }
}

/// Appends a part on separate lines, unless it is empty.
fn append(to: &mut String, part: &str) {
    let part = part.trim_end_matches('\n');
    if !part.is_empty() {
        if !to.is_empty() {
            to.push('\n');
        }
        to.push_str(part);
    }
}

fn append_output(to: &mut String, stdout: &str, stderr: &str, dropped: u64) {
    append(to, stdout);
    if !stderr.is_empty() {
        append(to, &format!("[stderr]\n{stderr}"));
    }
    if dropped > 0 {
        append(to, &format!("[{dropped} bytes of output were dropped]"));
    }
}

impl Describe for CodeResult {
    fn describe(&self) -> String {
        let mut text = String::new();
        append_output(&mut text, &self.stdout, &self.stderr, self.dropped_bytes);
        for displayed in &self.displayed {
            append(&mut text, displayed.describe());
        }
        append(&mut text, self.text.as_deref().unwrap_or_default());
        append(&mut text, self.error.as_ref().map_or("", |error| &error.traceback));
        if self.undone {
            append(&mut text, "[the code was cut short and undone]");
        }
        text
    }

    fn images(&self) -> &[Image] {
        &self.images
    }
}

impl Describe for CommandResult {
    fn describe(&self) -> String {
        let mut text = String::new();
        append_output(&mut text, &self.stdout, &self.stderr, self.dropped_bytes);
        if self.unread_stdin_bytes > 0 {
            append(
                &mut text,
                &format!("[{} bytes of stdin were not read]", self.unread_stdin_bytes),
            );
        }
        if self.killed {
            append(&mut text, "[the command was killed; its effects stay until a rollback]");
        } else if self.exit_code != 0 {
            append(&mut text, &format!("[exit code {}]", self.exit_code));
        }
        text
    }
}

impl Describe for FileContent {
    fn describe(&self) -> String {
        let mut text = self.content.clone();
        if let Some(next) = self.next_offset {
            let _ = write!(text, "\n[the file has {} bytes; continue at {next}]", self.size);
        }
        text
    }
}

impl Describe for WrittenFile {
    fn describe(&self) -> String {
        format!("wrote {} bytes to {}", self.bytes, self.path)
    }
}

impl Describe for Listing {
    fn describe(&self) -> String {
        let mut text = String::new();
        for entry in &self.entries {
            let end = if entry.kind == "directory" { "/" } else { "" };
            append(&mut text, &format!("{}{end}\t{}", entry.name, entry.size));
        }
        if self.omitted > 0 {
            append(&mut text, &format!("[{} more]", self.omitted));
        }
        text
    }
}

impl Describe for StateId {
    fn describe(&self) -> String {
        format!("state {}", self.id)
    }
}

impl Describe for SandboxNames {
    fn describe(&self) -> String {
        self.sandboxes.join("\n")
    }
}

impl Describe for DiffResult {
    fn describe(&self) -> String {
        let mut text = String::new();
        for file in &self.files {
            append(&mut text, &format!("{} {}\t{} bytes", file.change, file.path, file.bytes));
        }
        if self.omitted > 0 {
            append(&mut text, &format!("[{} more]", self.omitted));
        }
        append(&mut text, &format!("{} memory pages differ", self.pages));
        text
    }
}

impl Describe for StateTree {
    fn describe(&self) -> String {
        let mut text = String::new();
        for state in &self.states {
            let name = state.name.as_deref().unwrap_or("-");
            let parent = state.parent.as_deref().unwrap_or("-");
            let here = if state.id == self.at { " (here)" } else { "" };
            append(
                &mut text,
                &format!(
                    "{} {name}, from {parent}, {} bytes of its own{here}",
                    state.id, state.own_bytes
                ),
            );
        }
        text
    }
}
