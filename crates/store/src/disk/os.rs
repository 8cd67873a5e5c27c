//! File functions of stores beyond the standard library's portable part.
//!
//! On Unix these are its traits. Windows has no permission bits, so that files get the access that
//! their directory gives them, and no numbers of files that the standard library shows.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::path::Path;

#[cfg(unix)]
mod system {
    pub(crate) use std::os::unix::fs::{
        DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt,
    };

    pub(crate) use afresh_sys::file::{NO_FOLLOW, NO_WAIT};
}

#[cfg(windows)]
mod system {
    use std::fs::{DirBuilder, File, Metadata, OpenOptions};
    use std::io;
    use std::os::windows::fs as windows;

    /// Opens a link itself, which is no regular file.
    pub(crate) const NO_FOLLOW: u32 = 0x0020_0000;
    /// No file of a directory is a pipe there.
    pub(crate) const NO_WAIT: u32 = 0;

    pub(crate) trait FileExt {
        fn read_exact_at(&self, out: &mut [u8], at: u64) -> io::Result<()>;
        fn write_all_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    }

    impl FileExt for File {
        fn read_exact_at(&self, mut out: &mut [u8], mut at: u64) -> io::Result<()> {
            while !out.is_empty() {
                match windows::FileExt::seek_read(self, out, at)? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    len => {
                        out = &mut out[len..];
                        at += len as u64;
                    }
                }
            }
            Ok(())
        }

        fn write_all_at(&self, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
            while !bytes.is_empty() {
                match windows::FileExt::seek_write(self, bytes, at)? {
                    0 => return Err(io::ErrorKind::WriteZero.into()),
                    len => {
                        bytes = &bytes[len..];
                        at += len as u64;
                    }
                }
            }
            Ok(())
        }
    }

    pub(crate) trait OpenOptionsExt {
        fn mode(&mut self, mode: u32) -> &mut Self;
        fn custom_flags(&mut self, flags: u32) -> &mut Self;
    }

    impl OpenOptionsExt for OpenOptions {
        fn mode(&mut self, _: u32) -> &mut Self {
            self
        }

        fn custom_flags(&mut self, flags: u32) -> &mut Self {
            windows::OpenOptionsExt::custom_flags(self, flags)
        }
    }

    pub(crate) trait DirBuilderExt {
        fn mode(&mut self, mode: u32) -> &mut Self;
    }

    impl DirBuilderExt for DirBuilder {
        fn mode(&mut self, _: u32) -> &mut Self {
            self
        }
    }

    /// Times in units of 100 ns.
    pub(super) fn times(meta: &Metadata) -> [i64; 2] {
        use windows::MetadataExt;
        [meta.creation_time() as i64, meta.last_write_time() as i64]
    }
}

pub(crate) use system::*;

/// Opens a regular file as `how` says. A symbolic link is refused. So is a pipe, without waiting
/// for its other end.
pub(crate) fn open_regular(path: &Path, how: &mut OpenOptions) -> io::Result<File> {
    let file = how.custom_flags(NO_FOLLOW | NO_WAIT).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// Sets the permission bits of a file.
pub(crate) fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    #[cfg(unix)]
    return file.set_permissions(std::fs::Permissions::from_mode(mode));
    #[cfg(windows)]
    {
        let _ = (file, mode);
        Ok(())
    }
}

/// The permission bits of a file.
pub(crate) fn mode(meta: &Metadata) -> u32 {
    #[cfg(unix)]
    return meta.permissions().mode();
    #[cfg(windows)]
    {
        let _ = meta;
        0
    }
}

/// Changes whenever a file is replaced or written.
#[allow(clippy::cast_possible_wrap, reason = "compared, never computed with")]
pub(crate) fn identity(meta: &Metadata) -> [i64; 5] {
    let size = meta.len() as i64;
    #[cfg(unix)]
    return [meta.dev() as i64, meta.ino() as i64, size, meta.mtime(), meta.mtime_nsec()];
    #[cfg(windows)]
    {
        let [created, written] = system::times(meta);
        [created, 0, size, written, 0]
    }
}

/// Whether both paths lead to the same directory.
pub(crate) fn same_file(one: &Path, two: &Path) -> bool {
    #[cfg(unix)]
    let of = |path: &Path| std::fs::metadata(path).map(|it| (it.dev(), it.ino())).ok();
    #[cfg(windows)]
    let of = |path: &Path| path.canonicalize().ok();
    one == two || of(one).is_some_and(|it| of(two) == Some(it))
}

/// Whether an open file still has a name.
pub(crate) fn has_name(file: &File) -> io::Result<bool> {
    #[cfg(unix)]
    return Ok(file.metadata()?.nlink() > 0);
    #[cfg(windows)]
    {
        // It keeps its name while it is open.
        let _ = file;
        Ok(true)
    }
}

/// The size of the blocks that holes of a file consist of.
pub(crate) fn block_size(meta: &Metadata) -> u64 {
    #[cfg(unix)]
    return meta.blksize();
    #[cfg(windows)]
    {
        let _ = meta;
        4096
    }
}
