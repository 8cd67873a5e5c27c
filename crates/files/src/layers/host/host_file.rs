//! The identity of a host file at a point in time, and what tells versions of its content apart.

use std::fs::File;

use rustix::fs::{FileType, Stat};

use crate::nodes::content::Content;
use crate::nodes::inode::Body;
use crate::nodes::node::{Node, Time, Times};
use crate::nodes::source::{Source, SourceVersion};

/// The identity of a host file at a point in time. Two that are equal have the same bytes, if they
/// [are settled](HostFile::is_settled).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostFile {
    /// Device and number.
    pub(super) file: (u64, u64),
    size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, u64),
    changed: (i64, u64),
    is_directory: bool,
}

/// Seconds within which a file may change twice and have the same times.
const RACY: i64 = 2;

impl HostFile {
    pub(super) fn of_stat(stat: &Stat) -> Self {
        Self {
            file: (stat.st_dev, stat.st_ino),
            size: stat.st_size.max(0) as u64,
            modified: (stat.st_mtime, stat.st_mtime_nsec),
            changed: (stat.st_ctime, stat.st_ctime_nsec),
            is_directory: FileType::from_raw_mode(stat.st_mode) == FileType::Directory,
        }
    }

    /// The version of its content.
    pub(crate) fn version(&self) -> SourceVersion {
        let ((device, number), (seconds, nanoseconds)) = (self.file, self.modified);
        SourceVersion([device, number, self.size, seconds.cast_unsigned(), nanoseconds])
    }

    /// The time of its last change of content.
    pub(crate) fn modified(&self) -> Time {
        Time { seconds: self.modified.0, nanos: self.modified.1 as u32 }
    }

    /// It as the content of a guest file.
    pub(crate) fn body(&self, node: Node) -> Body {
        Body::File(Content::of_version(Source::Host(node), self.size, self.version()))
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.is_directory
    }

    /// The identity of an open file, which may be opened with `O_PATH`.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn of(file: &File) -> std::io::Result<Self> {
        Ok(Self::of_stat(&rustix::fs::fstat(file)?))
    }

    /// Whether the two are one file with the same size and time of modification. Other names and
    /// modes make no difference.
    #[must_use]
    pub fn has_content_of(&self, other: &Self) -> bool {
        self.version() == other.version()
    }

    /// Its length.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether a further change would show in its times: those of a file that has just been changed
    /// may stay as they are.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let now = Time::now().seconds;
        self.changed.0.max(self.modified.0).saturating_add(RACY) < now
    }
}

/// The times of a host file, as its [`Stat`] has them.
pub(super) fn times_of(stat: &Stat) -> Times {
    let time = |seconds: i64, nanos: u64| Time { seconds, nanos: nanos as u32 };
    Times {
        accessed: time(stat.st_atime, stat.st_atime_nsec),
        modified: time(stat.st_mtime, stat.st_mtime_nsec),
        changed: time(stat.st_ctime, stat.st_ctime_nsec),
    }
}
