//! Errors of archives.

/// An archive is damaged, hostile, or uses what this crate does not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// A tar header is missing.
    #[error("no tar header at byte {0}: is this an archive, or was it damaged?")]
    Header(u64),
    /// A header does not match its checksum.
    #[error("the tar header at byte {0} does not have its checksum: the file was damaged")]
    Checksum(u64),
    /// A field of a header is not a number.
    #[error("the tar header at byte {0} holds an invalid number")]
    Number(u64),
    /// The file ends within the archive.
    #[error("the archive is cut short: the member at byte {0} is longer than the file")]
    Truncated(u64),
    /// A link, a device, a sparse file or another member that is neither file nor directory.
    #[error("the member at byte {at} is of type `{kind}`; only files and directories are accepted")]
    Kind {
        /// Where its header is.
        at: u64,
        /// The type's character.
        kind: char,
    },
    /// A name leads out of the archive, or is not plain.
    #[error("the member at byte {at} is named {name:?}, which does not stay inside the archive")]
    Name {
        /// Where its header is.
        at: u64,
        /// The name, at most its first 100 bytes.
        name: String,
    },
    /// Two members of one name.
    #[error("the archive has two members named `{0}`")]
    Duplicate(String),
    /// A name is a file and also a directory of another member.
    #[error("the archive uses `{0}` both as a file and as a directory")]
    Overlap(String),
    /// More members than are accepted.
    #[error("the archive has more than {0} members")]
    TooMany(usize),
    /// An extended header that is too long or malformed.
    #[error("the extended header at byte {0} is not one this build reads")]
    Extended(u64),
    /// A required member is missing.
    #[error("the archive has no `{0}`")]
    Missing(String),
    /// The archive has no snapshot, or several.
    #[error("the archive holds {0} snapshots; it must be one")]
    Snapshots(usize),
}
