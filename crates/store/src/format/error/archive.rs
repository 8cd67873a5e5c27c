//! Errors of archives.

/// An archive is damaged, hostile, or uses what this crate does not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// There is no tar header.
    #[error("no tar header at byte {0}: is this an archive, or was it damaged?")]
    Header(u64),
    /// A header does not have its checksum.
    #[error("the tar header at byte {0} does not have its checksum: the file was damaged")]
    Checksum(u64),
    /// A field of a header is not a number.
    #[error("the tar header at byte {0} holds an invalid number")]
    Number(u64),
    /// The file ends before the archive does.
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
    /// A name that leaves the archive, or is not plain.
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
    /// A member that is a file and, for another, a directory.
    #[error("the archive uses `{0}` both as a file and as a directory")]
    Overlap(String),
    /// More members than are accepted.
    #[error("the archive has more than {0} members")]
    TooMany(usize),
    /// An extended header that is too long or malformed.
    #[error("the extended header at byte {0} is not one this build reads")]
    Extended(u64),
    /// A member that must be there is not.
    #[error("the archive has no `{0}`")]
    Missing(String),
    /// Not one snapshot.
    #[error("the archive holds {0} snapshots; it must be one")]
    Snapshots(usize),
}
