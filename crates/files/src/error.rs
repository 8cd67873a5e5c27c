//! Errors of file operations: one variant for each errno.

/// A file operation was refused. On Linux `errno` is the number of the error for a guest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// ENOENT.
    #[error("there is no such file or directory")]
    Missing,
    /// EEXIST.
    #[error("there is something of that name already")]
    Exists,
    /// ENOTDIR.
    #[error("it is not a directory")]
    NotDirectory,
    /// EISDIR.
    #[error("it is a directory")]
    IsDirectory,
    /// ENOTEMPTY.
    #[error("the directory is not empty")]
    NotEmpty,
    /// EINVAL.
    #[error("the operation is invalid for this kind of file")]
    Invalid,
    /// ENOSPC.
    #[error(
        "the file tree is full: its budget in bytes or in files is spent; give it a larger one"
    )]
    Full,
    /// EFBIG.
    #[error(
        "the file exceeds the maximum length of a file, or is too large or too sparse to be read whole: read it in parts"
    )]
    TooLarge,
    /// ENAMETOOLONG.
    #[error("a name may have 255 bytes, and a path 4096")]
    NameTooLong,
    /// ELOOP.
    #[error(
        "the path leads through too many symbolic links, or through one that may not be followed"
    )]
    Loop,
    /// EPERM.
    #[error("the path leads out of its directory, or to a file that must not change")]
    NotPermitted,
    /// EACCES.
    #[error("the permission bits of a directory on the path, or of the file, do not allow that")]
    Denied,
    /// EBADF.
    #[error("the file is not open for that")]
    NotOpen,
    /// EBUSY.
    #[error("the directory is in use")]
    Busy,
    /// EMLINK.
    #[error("the file has as many hard links as a file may have")]
    TooManyLinks,
    /// EXDEV.
    #[error("the two names are on different file systems: copy the file")]
    CrossDevice,
    /// Any other error of a host file.
    #[cfg(unix)]
    #[error("the host's file system refused: {0}")]
    Host(rustix::io::Errno),
    /// ESTALE.
    #[error("{0} was changed or replaced on the host after the guest had opened or changed it")]
    ChangedOnHost(String),
    /// EIO.
    #[error("a file of a layer below could not be read: {0}")]
    Layer(String),
}

impl Refused {
    /// The host's error number. On Linux it is that of a guest, too.
    #[cfg(unix)]
    #[must_use]
    pub fn errno(&self) -> rustix::io::Errno {
        use rustix::io::Errno;
        match self {
            Self::Missing => Errno::NOENT,
            Self::Exists => Errno::EXIST,
            Self::NotDirectory => Errno::NOTDIR,
            Self::IsDirectory => Errno::ISDIR,
            Self::NotEmpty => Errno::NOTEMPTY,
            Self::Invalid => Errno::INVAL,
            Self::Full => Errno::NOSPC,
            Self::TooLarge => Errno::FBIG,
            Self::NameTooLong => Errno::NAMETOOLONG,
            Self::Loop => Errno::LOOP,
            Self::NotPermitted => Errno::PERM,
            Self::Denied => Errno::ACCESS,
            Self::NotOpen => Errno::BADF,
            Self::Busy => Errno::BUSY,
            Self::TooManyLinks => Errno::MLINK,
            Self::CrossDevice => Errno::XDEV,
            Self::Host(errno) => *errno,
            Self::ChangedOnHost(_) => Errno::STALE,
            Self::Layer(_) => Errno::IO,
        }
    }
}

impl From<Refused> for std::io::Error {
    fn from(refused: Refused) -> Self {
        #[cfg(unix)]
        return Self::from_raw_os_error(refused.errno().raw_os_error());
        #[cfg(windows)]
        {
            use std::io::ErrorKind;
            let kind = match refused {
                Refused::Missing => ErrorKind::NotFound,
                Refused::Exists => ErrorKind::AlreadyExists,
                Refused::NotDirectory => ErrorKind::NotADirectory,
                Refused::IsDirectory => ErrorKind::IsADirectory,
                Refused::NotEmpty => ErrorKind::DirectoryNotEmpty,
                Refused::Full => ErrorKind::StorageFull,
                Refused::TooLarge => ErrorKind::FileTooLarge,
                Refused::NotPermitted | Refused::Denied | Refused::NotOpen => {
                    ErrorKind::PermissionDenied
                }
                Refused::Busy => ErrorKind::ResourceBusy,
                Refused::TooManyLinks => ErrorKind::TooManyLinks,
                Refused::CrossDevice => ErrorKind::CrossesDevices,
                Refused::Invalid | Refused::NameTooLong | Refused::Loop => ErrorKind::InvalidInput,
                Refused::ChangedOnHost(_) => ErrorKind::StaleNetworkFileHandle,
                Refused::Layer(_) => ErrorKind::Other,
            };
            Self::new(kind, refused)
        }
    }
}

#[cfg(unix)]
impl From<Refused> for rustix::io::Errno {
    fn from(refused: Refused) -> Self {
        refused.errno()
    }
}

/// A layer could not be opened or differs from its claims.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The host refused.
    #[error("{path}: {source}")]
    Read {
        /// What was read.
        path: String,
        /// Why not.
        source: std::io::Error,
    },
    /// It is damaged, or hostile.
    #[error("{path} is not a usable layer: {why}")]
    Bad {
        /// What was read.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// It has more than the limits allow.
    #[error(
        "{path} has more {what} than the {most} that are allowed; raise the limit on layers if you trust it"
    )]
    Limit {
        /// What was read.
        path: String,
        /// Bytes or files.
        what: &'static str,
        /// The limit.
        most: u64,
    },
}
