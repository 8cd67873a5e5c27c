//! The functions of an ELF file, by its unwinding table (`.eh_frame_hdr`).
//!
//! Promises: a range is that of one function, as unwinders take it.

use std::ops::Range;

use super::Read;
use super::headers::Part;

/// `DW_EH_PE_udata4`.
const UNSIGNED: u8 = 0x03;
/// `DW_EH_PE_datarel | DW_EH_PE_sdata4`.
const FROM_TABLE: u8 = 0x3b;
/// Bytes of an entry of the table.
const ENTRY_LEN: usize = 8;
/// Bytes before the table, in the form that linkers write.
const TABLE: usize = 12;

/// The unwinding table of a file, in memory.
pub(super) struct FunctionTable {
    /// Its address.
    at: u64,
    /// The sorted entries: the start of a function and its description, from `at`.
    entries: Vec<u8>,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

impl FunctionTable {
    /// The table `bytes` at the address `at`; `None` in another form.
    pub(super) fn new(at: u64, bytes: &[u8]) -> Option<Self> {
        let known = matches!(*bytes, [1, _, UNSIGNED, FROM_TABLE, ..]);
        let count = word(bytes, 8).filter(|_| known)? as usize;
        let end = TABLE.checked_add(count.checked_mul(ENTRY_LEN)?)?;
        Some(Self { at, entries: bytes.get(TABLE..end)?.to_vec() })
    }

    fn entry(&self, index: usize) -> Option<(u64, u64)> {
        let from = |at| Some(self.at.wrapping_add(word(&self.entries, at)? as i32 as u64));
        Some((from(index * ENTRY_LEN)?, from(index * ENTRY_LEN + 4)?))
    }

    /// The function that has the instruction at `address`. `read` returns bytes of the file.
    pub(super) fn containing(
        &self,
        address: u64,
        parts: &[Part],
        read: Read<'_>,
    ) -> Option<Range<u64>> {
        let (mut low, mut high) = (0, self.entries.len() / ENTRY_LEN);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.entry(middle)?.0 <= address { low = middle + 1 } else { high = middle }
        }
        let (start, description) = self.entry(low.checked_sub(1)?)?;
        let part = parts.iter().find(|part| part.holds(description))?;
        let bytes = read(part.offset + (description - part.address), 16)?;
        // Length, place of the common part, then start from here, and length of the function.
        let begins = word(&bytes, 8)? as i32 as u64;
        let same = description.wrapping_add(8).wrapping_add(begins) == start;
        let end = start.checked_add(u64::from(word(&bytes, 12)?))?;
        (same && address < end).then_some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_is_found_by_an_address_in_it() {
        let mut bytes = vec![1, 0x1b, UNSIGNED, FROM_TABLE, 0, 0, 0, 0, 2, 0, 0, 0];
        let numbers: [i32; 4] = [-0x800, 0x100, -0x700, 0x110];
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        let table = FunctionTable::new(0x1000, &bytes).unwrap();
        let parts = [Part { address: 0x1000, offset: 0x500, len: 0x1000 }];
        let read = |offset: u64, _: usize| {
            let (start, len) = if offset == 0x600 { (0x800, 0x40) } else { (0x900, 0x40) };
            let begins = start - (0x1000 + (offset as i32 - 0x500) + 8);
            Some([12, 0, begins, len].iter().flat_map(|word: &i32| word.to_le_bytes()).collect())
        };
        let find = |address| table.containing(address, &parts, &read);
        assert_eq!(find(0x800), Some(0x800..0x840));
        assert_eq!(find(0x83f), Some(0x800..0x840));
        assert_eq!(find(0x940), None);
        assert_eq!((find(0x840), find(0x7ff)), (None, None));
        assert_eq!(find(0x93f), Some(0x900..0x940));
        assert!(FunctionTable::new(0, &bytes[..20]).is_none());
        assert!(FunctionTable::new(0, &[2; 64]).is_none());
    }
}
