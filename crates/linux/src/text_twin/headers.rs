//! The program headers that a twin needs: the text, all loaded parts, and the unwinding table.

use super::Read;

/// Bytes of a file header, and of a program header.
const FILE_HEADER_LEN: usize = 64;
const HEADER_LEN: usize = 56;
/// Program headers one file may have.
const MAX_HEADERS: usize = 64;
const LOADED: u64 = 1;
/// `PT_GNU_EH_FRAME`.
const UNWINDING: u64 = 0x6474_e550;
const EXECUTES: u64 = 1;
const WRITES: u64 = 2;
/// Longest unwinding table.
const MAX_TABLE: u64 = 8 << 20;

/// A part of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) offset: u64,
    pub(super) address: u64,
    pub(super) len: u64,
}

impl Part {
    pub(super) fn holds(&self, address: u64) -> bool {
        address.checked_sub(self.address).is_some_and(|behind| behind < self.len)
    }
}

/// Program headers of a file.
#[derive(Debug)]
pub(super) struct ProgramHeaders {
    pub(super) loaded: Vec<Part>,
    pub(super) text: Part,
    pub(super) unwinding: Part,
}

fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let bytes = bytes.get(at..at + len)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

impl ProgramHeaders {
    /// Those of the file that `read` reads; `None` unless it is an ELF file for x86-64 with one
    /// text that is not writable.
    pub(super) fn read(read: Read<'_>) -> Option<Self> {
        let file = read(0, FILE_HEADER_LEN)?;
        let is_elf = file.starts_with(&[0x7f, b'E', b'L', b'F', 2, 1, 1]);
        let (machine, step) = (number(&file, 18, 2)?, number(&file, 54, 2)?);
        let (at, count) = (number(&file, 32, 8)?, number(&file, 56, 2)? as usize);
        if !is_elf || machine != 62 || step != HEADER_LEN as u64 || count > MAX_HEADERS {
            return None;
        }
        let headers = read(at, count * HEADER_LEN)?;
        let (mut loaded, mut texts, mut unwinding) = (Vec::new(), Vec::new(), None);
        for header in headers.chunks_exact(HEADER_LEN) {
            let (kind, flags) = (number(header, 0, 4)?, number(header, 4, 4)?);
            let (offset, address) = (number(header, 8, 8)?, number(header, 16, 8)?);
            let part = Part { offset, address, len: number(header, 32, 8)? };
            part.address.checked_add(part.len).and(part.offset.checked_add(part.len))?;
            if kind == LOADED {
                loaded.push(part);
                if flags & EXECUTES != 0 {
                    texts.push(part);
                    let fits = flags & WRITES == 0 && number(header, 40, 8)? == part.len;
                    fits.then_some(())?;
                }
            } else if kind == UNWINDING && part.len <= MAX_TABLE {
                unwinding = Some(part);
            }
        }
        let [text] = texts[..] else { return None };
        Some(Self { loaded, text, unwinding: unwinding? })
    }
}
