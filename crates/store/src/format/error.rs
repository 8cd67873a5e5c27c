//! Errors of reading and writing snapshots, and the way out.

mod archive;
mod turn;

use std::io;
use std::path::{Path, PathBuf};

use super::digest::Sha256;

pub use archive::ArchiveError;
pub use turn::TurnError;

/// A page layer is damaged, hostile, or of another version.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The file is too short to be a layer.
    #[error("the layer is cut short: {0} bytes")]
    Truncated(u64),
    /// The magic number at the end is missing.
    #[error("not a page layer (no magic number): was the file cut short?")]
    Magic,
    /// A version this build does not read.
    #[error("page layer of version {0}; this build reads version 1: use a newer afresh")]
    Version(u32),
    /// A field holds a value that the format does not allow.
    #[error("page layer field `{field}` holds {value}, which the format does not allow")]
    Field {
        /// Which field.
        field: &'static str,
        /// What it held.
        value: u64,
    },
    /// Lengths contradict each other or the file's length.
    #[error("page layer sections do not fit the file: {0}")]
    Layout(&'static str),
    /// An extent is out of order, overlaps, or points outside.
    #[error("page layer extent {0} is out of order or out of range")]
    Extent(u64),
    /// The index does not match its digest in the configuration.
    #[error("page layer index does not match its root digest: the file was damaged or replaced")]
    Root,
    /// The working set holds something else than the page that it claims to be a copy of.
    #[error(
        "the working set's copy of page {0} is not that page: do without the working set \
         (`afresh compact --drop-working-set`)"
    )]
    Copy(u64),
    /// The blob does not match the SHA-256 in its name, although its pages are intact.
    #[error("the layer's bytes do not match the digest that names it: the file was damaged")]
    Name,
    /// A group of pages does not match its digest.
    #[error("pages {first}..{end} of the layer do not match their digest: the file was damaged")]
    Group {
        /// First stored page of the group.
        first: u64,
        /// One past its last stored page.
        end: u64,
    },
    /// A compressed group does not decompress to its pages.
    #[error("compressed group {0} does not decompress to its pages: the file was damaged")]
    Decompress(u64),
    /// The layer is of a memory of another length.
    #[error(
        "the layer spans {layer} pages and the memory has {memory}: the snapshot was damaged, or made \
         to do harm"
    )]
    Span {
        /// Pages in the index space of the layer.
        layer: u64,
        /// Pages of the memory, as the configuration says.
        memory: u64,
    },
    /// The layer is not the child of the layer below it.
    #[error("delta layer belongs to another parent layer")]
    Parent,
}

/// A signature or a key does not match, or a sealed blob is damaged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// The snapshot is sealed and no key was given.
    #[error("the snapshot is sealed: it opens only with the key that it was sealed with")]
    Locked,
    /// A key was given and the snapshot is not sealed.
    #[error("the snapshot is not sealed, and was to be opened with a key: open it without one")]
    NotSealed,
    /// Sealed with another key.
    #[error("the snapshot was sealed with key {sealed}, not with the given one, {given}")]
    WrongKey {
        /// Id of the key it was sealed with.
        sealed: String,
        /// Id of the key that was given.
        given: String,
    },
    /// A blob is not sealed, and should be.
    #[error("a sealed blob cannot be read: {0}")]
    Format(&'static str),
    /// A chunk was changed, moved, or belongs to another blob.
    #[error("chunk {0} of a sealed blob is not what was sealed: the file was damaged or replaced")]
    Chunk(u64),
    /// A sealed and an open snapshot, or two keys, in one stack of layers.
    #[error(
        "a delta is sealed with the key of its parent or, like its parent, not at all: save the \
         memory whole to change that"
    )]
    Mixed,
    /// A signature is demanded and missing.
    #[error("the snapshot is not signed, and a signature is demanded: sign it")]
    Unsigned,
    /// The snapshot is signed by untrusted keys only.
    #[error("the snapshot claims to be signed by {0:?}, and none of these keys is trusted")]
    Untrusted(Vec<String>),
    /// The signature of a trusted key is wrong.
    #[error("the signature of {0} does not fit the snapshot: it was forged or damaged")]
    Signature(String),
    /// The text or file is not a key.
    #[error("not a key: {0}")]
    Key(&'static str),
    /// Others may access a file with a secret key.
    #[error(
        "other users can read the key file: run `chmod 600` on it, and replace the key if they may have seen it"
    )]
    KeyMode,
    /// The cryptographic library refused.
    #[error("{0}")]
    Library(&'static str),
}

/// The snapshot belongs to another guest build.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuestMismatch {
    /// Another kind of guest.
    #[error("the snapshot is of a {snapshot} guest, not of a {here} guest")]
    Kind {
        /// Kind in the snapshot.
        snapshot: String,
        /// Kind expected.
        here: String,
    },
    /// Another module.
    #[error(
        "the snapshot was taken of module {snapshot}, but this module is {here}: take a new \
         snapshot of this module"
    )]
    Module {
        /// Module hash in the snapshot.
        snapshot: String,
        /// Module hash expected.
        here: String,
    },
    /// Another engine version.
    #[error(
        "the snapshot was taken with engine {snapshot}, but this is {here}: take a new snapshot \
         with this engine"
    )]
    Engine {
        /// Engine in the snapshot.
        snapshot: String,
        /// Engine expected.
        here: String,
    },
    /// This CPU lacks features that the snapshot requires.
    #[error("this CPU lacks {0:?}, which the snapshot was taken with: restore on a newer CPU")]
    Cpu(Vec<String>),
}

/// A snapshot could not be opened or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The directory is not an OCI image layout.
    #[error("{0} is not an OCI image layout: it has no valid `oci-layout` file")]
    NotALayout(PathBuf),
    /// No snapshot of that name.
    #[error("no snapshot named `{name}`; the store holds {}", few(known))]
    NoSuchName {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<String>,
    },
    /// A JSON file is larger than the reader accepts.
    #[error("{what} is {size} bytes; at most {limit} are accepted")]
    TooLarge {
        /// Which file.
        what: &'static str,
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// The snapshot asks for more than its reader allows.
    #[error(
        "{what} takes {bytes} bytes, above the limit `{name}` of {limit}: raise that limit if you trust \
         whoever made the snapshot (`Access::with_limits`; in commands `--limit {name}=SIZE`)"
    )]
    Limit {
        /// The part that is too large.
        what: &'static str,
        /// What it takes.
        bytes: u64,
        /// What is allowed.
        limit: u64,
        /// The limit's name: a field of [`Limits`](crate::Limits).
        name: &'static str,
    },
    /// A JSON file is malformed.
    #[error("{what} is damaged: {why}")]
    Json {
        /// Which file.
        what: &'static str,
        /// Where and why.
        why: String,
    },
    /// A blob does not match the digest in its name.
    #[error("{what} does not match its digest {expected}: the file was damaged or replaced")]
    Digest {
        /// Which file.
        what: &'static str,
        /// The digest it should have.
        expected: Sha256,
    },
    /// A media type or schema this build does not read.
    #[error("{what} is of type `{found}`, which this build does not read")]
    MediaType {
        /// Which file.
        what: &'static str,
        /// Its type.
        found: String,
    },
    /// It is a container image, or an index of such.
    #[error(
        "it is a container image, and no snapshot: what runs guests (`afresh run`, `afresh snapshot`) takes it as a \
         Linux program"
    )]
    ContainerImage,
    /// A page layer is damaged.
    #[error("layer {digest}: {source}")]
    Layer {
        /// The layer.
        digest: Sha256,
        /// What is wrong.
        source: LayerError,
    },
    /// An archive is damaged, hostile, or uses what this crate does not read.
    #[error("{path}: {source}")]
    Archive {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ArchiveError,
    },
    /// A turn of a session is damaged, or does not follow on the one before.
    #[error("turn {number} of the session: {source}")]
    Turn {
        /// Which, from 0 on.
        number: usize,
        /// What is wrong.
        source: TurnError,
    },
    /// A session's turns are not where its snapshot is.
    #[error(
        "the snapshot is a session's, and its turns ({journal}) are not there: they stay in the directory \
         in which they were saved; `afresh push` and `afresh compact` take them along"
    )]
    NoJournal {
        /// Their file.
        journal: String,
    },
    /// A session's turns were saved in this directory as in a remote.
    #[error(
        "the session was saved through a `file://` address ({}): open its directory by that address",
        .journal.display()
    )]
    RemoteJournal {
        /// Their directory.
        journal: PathBuf,
    },
    /// A signature or a key does not match.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// The snapshot belongs to another guest build.
    #[error(transparent)]
    Guest(#[from] GuestMismatch),
    /// The image could not be built in memory.
    #[error(transparent)]
    Image(#[from] afresh_memory::ImageError),
    /// A page outside the snapshot was requested.
    #[error("pages {first}..{end} lie outside the snapshot of {pages} pages")]
    Range {
        /// First page asked for.
        first: usize,
        /// One past the last page asked for.
        end: usize,
        /// Pages there are.
        pages: usize,
    },
}

/// Some of many names.
fn few(names: &[String]) -> String {
    const MAX_NAMES: usize = 20;
    if names.is_empty() {
        return "none".to_owned();
    }
    // Stores of others may have any names.
    let quoted = |name: &String| format!("`{}`", name.escape_debug());
    let mut shown: Vec<String> = names.iter().take(MAX_NAMES).map(quoted).collect();
    if names.len() > MAX_NAMES {
        shown.push(format!("and {} more", names.len() - MAX_NAMES));
    }
    shown.join(", ")
}

impl OpenError {
    /// Whether a file that should be there is not.
    pub(crate) fn is_missing_file(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
}

/// A snapshot could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The path is not a regular file, so an archive does not replace it.
    #[error("{} exists and is no snapshot: choose another name, or remove it", .0.display())]
    ForeignFile(PathBuf),
    /// The path is a link, so an archive does not replace it.
    #[error("{} is a link: choose another name, or give the path that it names", .0.display())]
    Link(PathBuf),
    /// The file to write exists, and cannot be read as an archive of one snapshot.
    #[error(
        "{} exists and cannot be read as a snapshot: {source}; choose another name, or remove it",
        .path.display()
    )]
    UnreadableTarget {
        /// The file.
        path: PathBuf,
        /// Why it cannot be read.
        #[source]
        source: Box<OpenError>,
    },
    /// The memory to save could not be read.
    #[error("reading the memory to save: {0}")]
    Source(io::Error),
    /// The store or the parent could not be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A key does not match.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// The guest state exceeds the maximum of the format.
    #[error("{what} of {size} is above the format's limit of {limit}")]
    TooLarge {
        /// The part that is too large.
        what: &'static str,
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// A delta cannot be smaller than its parent.
    #[error(
        "the memory has {pages} pages and the parent snapshot {parent}: save it whole, without a \
         parent"
    )]
    Shrunk {
        /// Pages of the memory.
        pages: usize,
        /// Pages of the parent.
        parent: usize,
    },
    /// A remote could not store it.
    #[error("{0}")]
    Remote(Box<dyn std::error::Error + Send + Sync>),
    /// Another writer continues from the same saved state.
    #[error(
        "{0}: the session was saved by somebody else since, or its name means something else: open it again, \
         or save under another name"
    )]
    Moved(PathBuf),
    /// A fleet, or another program, names snapshots of the directory by their digests.
    #[error(
        "snapshots in {} are named by `{by}`, not by names in it, so a collection would remove them; collect \
         the store of a fleet with --nats and --fleet",
        .path.display()
    )]
    Kept {
        /// The directory.
        path: PathBuf,
        /// Who names them.
        by: String,
    },
    /// A session's turns are signed one by one, by the program that saves them.
    #[error(
        "the snapshot is a session's, whose turns are signed when they are saved: `afresh compact` makes one of it \
         that can be signed"
    )]
    Session,
    /// The name cannot be a tag.
    #[error("`{0}` cannot name a snapshot: use 1 to 128 of A-Z a-z 0-9 . _ - / :")]
    Name(String),
    /// Compression failed.
    #[error("compressing pages: {0}")]
    Compress(io::Error),
    /// A value could not be written as JSON.
    #[error("writing {what}: {why}")]
    Json {
        /// Which file.
        what: &'static str,
        /// Why.
        why: String,
    },
}

impl SaveError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
}
