//! The parts of an ELF file that its loading needs. A fuzz target compiles this file by itself.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Program headers one file may have.
const HEADERS: usize = 256;
const PAGE: u64 = 4096;
/// The machine of programs, and its name. Another processor than arm64 is x86-64.
const MACHINE: (u16, &str) = if cfg!(target_arch = "aarch64") {
    (183, "it is not an ELF program for arm64")
} else {
    (62, "it is not an ELF program for x86-64")
};

/// A `PT_LOAD` header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) flags: u32,
    pub(crate) offset: u64,
    pub(crate) address: u64,
    pub(crate) file_len: u64,
    pub(crate) memory_len: u64,
}

/// A parsed file.
#[derive(Debug)]
pub(crate) struct Elf {
    pub(crate) anywhere: bool,
    pub(crate) entry: u64,
    pub(crate) headers_at: u64,
    pub(crate) headers: u64,
    pub(crate) parts: Vec<Part>,
    pub(crate) loader: Option<PathBuf>,
}

/// Numbers out of a file that may be too short.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn get<const N: usize>(&self, at: u64) -> Result<[u8; N], &'static str> {
        let start = usize::try_from(at).map_err(|_| "it is cut short")?;
        let end = start.checked_add(N).ok_or("it is cut short")?;
        self.0.get(start..end).and_then(|bytes| bytes.try_into().ok()).ok_or("it is cut short")
    }

    fn half(&self, at: u64) -> Result<u16, &'static str> {
        Ok(u16::from_le_bytes(self.get(at)?))
    }

    fn int(&self, at: u64) -> Result<u32, &'static str> {
        Ok(u32::from_le_bytes(self.get(at)?))
    }

    fn word(&self, at: u64) -> Result<u64, &'static str> {
        Ok(u64::from_le_bytes(self.get(at)?))
    }
}

impl Elf {
    /// Parses `head`, the beginning of a file of `size` bytes.
    pub(crate) fn parse(head: &[u8], size: u64) -> Result<Self, &'static str> {
        let file = Fields(head);
        if file.get::<7>(0)? != [0x7f, b'E', b'L', b'F', 2, 1, 1] || file.half(18)? != MACHINE.0 {
            return Err(MACHINE.1);
        }
        let anywhere = match file.half(16)? {
            2 => false,
            3 => true,
            _ => return Err("it is not an executable"),
        };
        let (entry, headers_at) = (file.word(24)?, file.word(32)?);
        let (step, headers) = (u64::from(file.half(54)?), file.half(56)?);
        if step != 56 || usize::from(headers) > HEADERS {
            return Err("its program headers are not of this format");
        }
        let mut elf = Self {
            anywhere,
            entry,
            headers_at: 0,
            headers: headers.into(),
            parts: Vec::new(),
            loader: None,
        };
        for index in 0..u64::from(headers) {
            let at = headers_at.checked_add(index * step).ok_or("it is cut short")?;
            let (kind, flags, offset) = (file.int(at)?, file.int(at + 4)?, file.word(at + 8)?);
            let part = Part {
                flags,
                offset,
                address: file.word(at + 16)?,
                file_len: file.word(at + 32)?,
                memory_len: file.word(at + 40)?,
            };
            let end = offset.checked_add(part.file_len).filter(|&end| end <= size);
            match kind {
                1 => {
                    let end = end.ok_or("a segment is longer than the file")?;
                    if part.memory_len < part.file_len
                        || part.address % PAGE != offset % PAGE
                        || part.address.checked_add(part.memory_len).is_none()
                    {
                        return Err("a segment is inconsistent");
                    }
                    if (offset..end).contains(&headers_at) {
                        elf.headers_at = part.address + (headers_at - offset);
                    }
                    if part.memory_len > 0 {
                        elf.parts.push(part);
                    }
                }
                3 => {
                    let end = end.ok_or("a segment is longer than the file")?;
                    let name = head.get(offset as usize..end as usize);
                    let name = name.ok_or("the name of its loader is too far behind its start")?;
                    let name = name.split(|&b| b == 0).next();
                    elf.loader = name.map(|name| PathBuf::from(OsStr::from_bytes(name)));
                }
                _ => {}
            }
        }
        if elf.parts.is_empty()
            || elf.parts.windows(2).any(|p| p[0].address + p[0].memory_len > p[1].address)
        {
            return Err("it has no segments, or they overlap");
        }
        Ok(elf)
    }
}
