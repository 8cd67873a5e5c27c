//! Host directories cannot be granted on this system.
//!
//! Only Linux resolves a path below a directory in one step (`openat2`), whatever other processes
//! do meanwhile. No value of a handle exists here, and [`HostHandle::grant`] gives the reason.

use std::convert::Infallible;
use std::io::{Error, ErrorKind};
use std::path::Path;

use crate::error::Refused;
use crate::host_values::{Durability, HostEntry, HostOpening, HostStat};
use crate::nodes::node::Time;
use crate::trees::open::{Access, Whence};

/// An open file or directory of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostHandle {
    absent: Infallible,
    /// Where the next read or write begins.
    pub offset: u64,
    /// Its access rights.
    pub access: Access,
    /// When its writes are on the disk.
    pub durability: Durability,
}

impl HostHandle {
    /// Always fails.
    ///
    /// # Errors
    /// One of kind `Unsupported`.
    pub fn grant(path: &Path, _: bool) -> std::io::Result<Self> {
        let path = path.display();
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{path}: host directories are granted on Linux alone, whose `openat2` keeps the \
                 paths of a guest in the directory; pass the files as an archive"
            ),
        ))
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        match self.absent {}
    }

    /// Whether it was granted for writing.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        match self.absent {}
    }

    /// Opens or makes the file at a path.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn open(&self, _: &[u8], _: HostOpening) -> Result<Self, Refused> {
        match self.absent {}
    }

    /// The result of `stat`.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn stat(&self) -> Result<HostStat, Refused> {
        match self.absent {}
    }

    /// The result of `stat` for a path.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn stat_at(&self, _: &[u8], _: bool) -> Result<HostStat, Refused> {
        match self.absent {}
    }

    /// The target of the symbolic link at a path.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn read_link(&self, _: &[u8]) -> Result<Vec<u8>, Refused> {
        match self.absent {}
    }

    /// Sets the time of the last access, of the last change of content, or both.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn set_times(&self, _: Option<Time>, _: Option<Time>) -> Result<(), Refused> {
        match self.absent {}
    }

    /// As [`HostHandle::set_times`], of the file at a path.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn set_times_at(
        &self,
        _: &[u8],
        _: bool,
        _: Option<Time>,
        _: Option<Time>,
    ) -> Result<(), Refused> {
        match self.absent {}
    }

    /// Makes a file shorter, or longer with a hole at its end. The caller checks the access of the
    /// handle.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn set_size(&self, _: u64) -> Result<(), Refused> {
        match self.absent {}
    }

    /// Reserves room for a range of a file, which it is extended to contain.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn allocate(&self, _: u64, _: u64) -> Result<(), Refused> {
        match self.absent {}
    }

    /// Reads at a position.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn read_at(&self, _: u64, _: &mut [u8]) -> Result<usize, Refused> {
        match self.absent {}
    }

    /// Reads at the position of the handle, and advances it by the same number of bytes.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn read(&mut self, _: &mut [u8]) -> Result<usize, Refused> {
        match self.absent {}
    }

    /// Writes at a position; in a file that is appended to, at its end. At the limit of files of
    /// this process it writes only a part.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn write_at(&self, _: u64, _: &[u8]) -> Result<usize, Refused> {
        match self.absent {}
    }

    /// Writes at the position of the handle, or at the end if the file is appended to, and advances
    /// the position.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn write(&mut self, _: &[u8]) -> Result<usize, Refused> {
        match self.absent {}
    }

    /// Moves the position, which may be beyond the end.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn seek(&mut self, _: Whence, _: i64) -> Result<u64, Refused> {
        match self.absent {}
    }

    /// Returns when bytes and attributes are on the disk, or with `data` the bytes.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn sync(&self, _: bool) -> Result<(), Refused> {
        match self.absent {}
    }

    /// The next entries of a directory from a position on, `.` and `..` among them: as many as fit
    /// in a buffer, none at the end. 0 is the beginning, and each entry has the position after it.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn entries(&mut self, _: u64) -> Result<Vec<HostEntry>, Refused> {
        match self.absent {}
    }

    /// Makes an empty directory.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn create_directory(&self, _: &[u8]) -> Result<(), Refused> {
        match self.absent {}
    }

    /// Makes a symbolic link. Its target is not checked, because a link that leads out is not
    /// followed.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn create_link(&self, _: &[u8], _: &[u8]) -> Result<(), Refused> {
        match self.absent {}
    }

    /// Gives the file at `old` a further name in another directory or the same. A symbolic link is
    /// not followed.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn link(&self, _: &[u8], _: &Self, _: &[u8]) -> Result<(), Refused> {
        match self.absent {}
    }

    /// Moves the file at `old` to the path `new` of another directory or the same, in place of the
    /// file there.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn rename(&self, _: &[u8], _: &Self, _: &[u8]) -> Result<(), Refused> {
        match self.absent {}
    }

    /// Removes the name of a file that is not a directory.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn remove_file(&self, _: &[u8]) -> Result<(), Refused> {
        match self.absent {}
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// None: no value exists.
    pub fn remove_directory(&self, _: &[u8]) -> Result<(), Refused> {
        match self.absent {}
    }
}
