//! Reading and writing a file at a position.

#[cfg(unix)]
pub(crate) use std::os::unix::fs::FileExt;

#[cfg(windows)]
pub(crate) trait FileExt {
    fn read_at(&self, out: &mut [u8], at: u64) -> std::io::Result<usize>;
    fn read_exact_at(&self, out: &mut [u8], at: u64) -> std::io::Result<()>;
    fn write_at(&self, bytes: &[u8], at: u64) -> std::io::Result<usize>;
}

#[cfg(windows)]
impl FileExt for std::fs::File {
    fn read_at(&self, out: &mut [u8], at: u64) -> std::io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(self, out, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> std::io::Result<usize> {
        std::os::windows::fs::FileExt::seek_write(self, bytes, at)
    }

    fn read_exact_at(&self, mut out: &mut [u8], mut at: u64) -> std::io::Result<()> {
        while !out.is_empty() {
            match self.read_at(out, at)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                len => {
                    out = &mut out[len..];
                    at += len as u64;
                }
            }
        }
        Ok(())
    }
}
