//! Twins of executable text: the same bytes, but calls that can be answered inside the guest's
//! process jump to the code that does so ([`crate::platform`], `inside.rs`).
//!
//! A call site is `mov $number,%eax; syscall`. The `mov` becomes a jump to a *trampoline* behind
//! the text, in the part of its last page that the file does not use. The `syscall` stays: a call
//! that is not answered inside is made there, and so are calls that reach it in another way.
//!
//! ```text
//! site:        jmp trampoline        trampoline:  mov $number,%eax
//! call:        syscall                            lea call(%rip),%rcx
//!                                                 jmp *inside(%rip)
//! ```
//!
//! Promises: text with its twin's bytes does what it did before. Only functions are changed that
//! the unwinding table names, that decode to their last byte, and in which nothing jumps between
//! the instructions of a site. May break it: jumps from other functions there, or code that reads
//! its own text.

mod functions;
mod headers;
mod instruction;

use std::ops::Range;

use crate::platform::{
    CELL_LEN, HEAD_LEN, INSIDE, JUMP_LEN, NEAR_LEN, READ_LEN, SYSCALL, is_answered_inside,
};
use functions::FunctionTable;
use headers::{Part, ProgramHeaders};

const PAGE: u64 = afresh_sys::PAGE_SIZE as u64;
/// Longest text that is searched. Those of C libraries are shorter.
const MAX_TEXT: u64 = 2 << 20;
/// Longest mapping that shows a twin. It is read whole when its protection changes.
pub(crate) const MAX_TWIN_MAPPING: u64 = MAX_TEXT + 2 * PAGE;
/// Longest function that is decoded.
const MAX_FUNCTION: u64 = 64 << 10;
/// Bytes of functions that are decoded for one text, where each site decodes its function.
const MAX_DECODED: u64 = 16 << 20;
/// Reads bytes of a file.
type Read<'a> = &'a dyn Fn(u64, usize) -> Option<Vec<u8>>;

/// The changed bytes of a text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TextTwin {
    /// The pages of the text in its file.
    range: Range<u64>,
    /// Offsets in the file, sorted, and the bytes there.
    edits: Vec<(u64, Vec<u8>)>,
}

/// A place that makes a call, as an offset in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Site {
    /// The first byte that is changed.
    start: u64,
    /// The `syscall`.
    call: u64,
    number: u32,
}

impl Site {
    /// The site whose `syscall` is at `call`, if its form is known.
    fn at(text: &[u8], call: usize) -> Option<Self> {
        let before = |len: usize| call.checked_sub(len).map(|start| &text[start..call]);
        if let Some([0xb8, number @ ..]) = before(JUMP_LEN) {
            let number = u32::from_le_bytes(number.try_into().ok()?);
            if is_answered_inside(number) {
                return Some(Self { start: (call - JUMP_LEN) as u64, call: call as u64, number });
            }
        }
        match before(READ_LEN as usize)? {
            [0x80, 0x3d, _, _, _, _, 0, 0x74, _, 0x31, 0xc0] => {
                Some(Self { start: call as u64 - READ_LEN, call: call as u64, number: 0 })
            }
            _ => None,
        }
    }

    /// The lengths of its instructions before the `syscall`.
    fn instructions(&self) -> &'static [usize] {
        if self.call - self.start == READ_LEN { &[7, 2, 2] } else { &[5] }
    }

    /// Whether `code`, of a function that begins at the offset `start` of the text, has these
    /// instructions, nothing jumps between them, and all of it is known.
    fn is_sound(&self, code: &[u8], start: u64) -> bool {
        let (first, call) = ((self.start - start) as usize, (self.call - start) as usize);
        let (mut at, mut expected, mut next) = (0, first, self.instructions().iter());
        let mut found = false;
        while at < code.len() {
            let Some(instruction) = instruction::decode(&code[at..]) else { return false };
            if at == expected {
                found = at == call && code[at..].starts_with(&SYSCALL);
                match next.next() {
                    Some(len) if instruction.len == *len => expected = at + len,
                    Some(_) => return false,
                    None => {}
                }
            }
            at += instruction.len;
            let target = instruction.branch.map(|distance| at as i64 + distance);
            if target.is_some_and(|target| target > first as i64 && target < call as i64) {
                return false;
            }
        }
        found && at == code.len()
    }

    /// Its trampoline, at the offset `at`, with the address of the code inside at `cell`.
    fn trampoline(&self, text: &[u8], at: u64, cell: u64) -> Option<Vec<u8>> {
        let mut code = Vec::new();
        let relative = |to: u64, from: u64| i32::try_from(to as i64 - from as i64).ok();
        if self.call - self.start == READ_LEN {
            let site = &text[self.start as usize..self.call as usize];
            let distance = i64::from(i32::from_le_bytes(site[2..6].try_into().ok()?));
            let single = i32::try_from(distance + self.start as i64 - at as i64).ok()?;
            code.extend([0x80, 0x3d]);
            code.extend(single.to_le_bytes());
            code.extend([0, 0x0f, 0x84]);
            let many = (self.start + 9).wrapping_add_signed(i64::from(site[8] as i8));
            code.extend(relative(many, at + HEAD_LEN)?.to_le_bytes());
        }
        code.push(0xb8);
        code.extend(self.number.to_le_bytes());
        code.extend([0x48, 0x8d, 0x0d]);
        code.extend(relative(self.call, at + code.len() as u64 + 4)?.to_le_bytes());
        code.extend([0xff, 0x25]);
        code.extend(relative(cell, at + code.len() as u64 + 4)?.to_le_bytes());
        Some(code)
    }
}

/// The text of a program.
struct Text {
    bytes: Vec<u8>,
    /// Its offset in the file, and its address.
    offset: u64,
    address: u64,
    /// Where the unused part of its last page begins.
    end: u64,
}

impl Text {
    /// The sites, sound or not. Most texts are large and have none.
    fn sites(&self) -> Vec<Site> {
        const CHUNK: usize = 256;
        let mut sites = Vec::new();
        for start in (0..self.bytes.len()).step_by(CHUNK) {
            let end = (start + CHUNK + 1).min(self.bytes.len());
            let pairs = self.bytes[start..end - 1].iter().zip(&self.bytes[start + 1..end]);
            // Without a branch for each byte.
            let is_call = |(first, second): (&u8, &u8)| (*first == 0x0f) & (*second == 0x05);
            if pairs.clone().fold(false, |any, pair| any | is_call(pair)) {
                let calls = pairs.enumerate().filter(|(_, pair)| is_call(*pair));
                sites.extend(calls.filter_map(|(at, _)| Site::at(&self.bytes, start + at)));
            }
        }
        sites
    }

    /// The sites whose functions are sound.
    fn sound_sites(&self, table: &FunctionTable, parts: &[Part], read: Read<'_>) -> Vec<Site> {
        let mut room = MAX_DECODED;
        let mut is_sound = |site: &Site| {
            let function = table.containing(self.address + site.call, parts, read)?;
            let start = function.start.checked_sub(self.address)?;
            let end = function.end.checked_sub(self.address)?;
            let code = self.bytes.get(start as usize..end as usize)?;
            let within = start <= site.start && site.call + 2 <= end;
            room = room.checked_sub(end - start)?;
            Some(within && end - start <= MAX_FUNCTION && site.is_sound(code, start))
        };
        self.sites().into_iter().filter(|site| is_sound(site) == Some(true)).collect()
    }
}

impl TextTwin {
    /// The twin of the text of the file that `read` reads; `None` without a site.
    pub(crate) fn new(read: Read<'_>) -> Option<Self> {
        let ProgramHeaders { loaded, text, unwinding } = ProgramHeaders::read(read)?;
        if text.len > MAX_TEXT {
            return None;
        }
        let end = text.offset + text.len;
        let range = text.offset / PAGE * PAGE..end.checked_next_multiple_of(PAGE)?;
        let bytes = read(text.offset, text.len as usize)?;
        let text = Text { bytes, offset: text.offset, address: text.address, end };
        if text.sites().is_empty() {
            return None;
        }
        // Other bytes there may be text, too.
        let unused = read(end, (range.end - end) as usize)?;
        if unused.iter().any(|byte| *byte != 0) {
            return None;
        }
        let held = loaded.iter().find(|part| part.holds(unwinding.address))?;
        let table_at = held.offset + (unwinding.address - held.address);
        let table =
            FunctionTable::new(unwinding.address, &read(table_at, unwinding.len as usize)?)?;
        let sites = text.sound_sites(&table, &loaded, read);
        Self::with_sites(&text, range, &sites)
    }

    /// Sites get trampolines while there is room.
    fn with_sites(text: &Text, range: Range<u64>, sites: &[Site]) -> Option<Self> {
        let cell = text.end.next_multiple_of(CELL_LEN);
        let mut trampolines = INSIDE.to_le_bytes().to_vec();
        let mut edits = Vec::new();
        for site in sites {
            let at = cell + trampolines.len() as u64;
            if at + NEAR_LEN as u64 > range.end {
                break;
            }
            let code = site.trampoline(&text.bytes, at - text.offset, cell - text.offset)?;
            let start = text.offset + site.start;
            let mut jump = vec![0xe9];
            let distance = i32::try_from(at as i64 - (start + JUMP_LEN as u64) as i64).ok()?;
            jump.extend(distance.to_le_bytes());
            edits.push((start, jump));
            trampolines.extend(code);
        }
        if edits.is_empty() {
            return None;
        }
        edits.push((cell, trampolines));
        Some(Self { range, edits })
    }

    /// Whether a mapping of `wanted` has all of the text, and not much more.
    pub(crate) fn is_within(&self, wanted: &Range<u64>) -> bool {
        let fits = wanted.end - wanted.start <= MAX_TWIN_MAPPING;
        fits && wanted.start <= self.range.start && self.range.end <= wanted.end
    }

    /// Changes `bytes`, which are those of the file from `offset` on.
    pub(crate) fn apply(&self, offset: u64, bytes: &mut [u8]) {
        let end = offset + bytes.len() as u64;
        for (at, edit) in &self.edits {
            let (from, to) = ((*at).max(offset), (at + edit.len() as u64).min(end));
            if from < to {
                let part = &edit[(from - at) as usize..(to - at) as usize];
                bytes[(from - offset) as usize..(to - offset) as usize].copy_from_slice(part);
            }
        }
    }
}

#[cfg(test)]
mod tests;
