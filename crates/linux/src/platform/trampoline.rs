//! Trampolines between the text of a program and the code that answers its calls, as they are found
//! in memory.
//!
//! ```text
//! site:        jmp trampoline        trampoline:  mov $number,%eax
//! call:        syscall                            lea call(%rip),%rcx
//!                                                 jmp *inside(%rip)
//! ```
//!
//! A `read` of glibc has a comparison and a conditional jump in front of the call, which its
//! trampoline has as well.
//!
//! Promises: only a trampoline that leads to the code inside is taken for one.

use super::arch::inside::is_answered_inside;
use super::stub::INSIDE;

/// Bytes of the jump that a site gets.
pub(crate) const JUMP_LEN: usize = 5;
/// Bytes that the address of the code inside takes.
pub(crate) const CELL_LEN: u64 = 8;
/// `mov $number,%eax`, `lea call(%rip),%rcx` and `jmp *inside(%rip)`.
const TAIL_LEN: u64 = 18;
/// `cmpb $0,single(%rip)` and `je many`, which precede them for a `read` of glibc.
pub(crate) const HEAD_LEN: u64 = 13;
/// Bytes of those two in the text, and of `xor %eax,%eax` behind them.
pub(crate) const READ_LEN: u64 = 11;
pub(crate) const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Reads memory of a program.
type Read<'a> = &'a dyn Fn(u64, usize) -> Option<Vec<u8>>;

/// Bytes before an address that are needed to recognise a trampoline there.
pub(super) const BEFORE: usize = 12;
/// The same with those behind it.
pub(crate) const NEAR_LEN: usize = BEFORE + (HEAD_LEN + TAIL_LEN) as usize;

/// The address that a distance at `at` in `bytes` leads to, which are at `address`.
pub(crate) fn relative(bytes: &[u8], at: usize, address: u64) -> Option<u64> {
    let distance = i32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?);
    Some(address.wrapping_add(at as u64 + 4).wrapping_add_signed(i64::from(distance)))
}

/// The call and its number of the trampoline whose last part `bytes` begin with, at `address`, and
/// where the address of the code inside must be.
pub(crate) fn parse(bytes: &[u8], address: u64) -> Option<(u64, u32, u64)> {
    let [0xb8, a, b, c, d, 0x48, 0x8d, 0x0d, _, _, _, _, 0xff, 0x25, ..] = *bytes else {
        return None;
    };
    let number = u32::from_le_bytes([a, b, c, d]);
    let (call, cell) = (relative(bytes, 8, address)?, relative(bytes, 14, address)?);
    is_answered_inside(number).then_some((call, number, cell))
}

/// The sites in `bytes` at `address` that have a twin's jump, with their own bytes. `read` returns
/// memory of the program.
pub(crate) fn originals(bytes: &[u8], address: u64, read: Read<'_>) -> Vec<(u64, Vec<u8>)> {
    let mut found = Vec::new();
    for at in 0..bytes.len().saturating_sub(JUMP_LEN + SYSCALL.len() - 1) {
        let code = &bytes[at..];
        let is_call = code[0] == 0xe9 && code[JUMP_LEN..].starts_with(&SYSCALL);
        let is_read = matches!(*code, [0xe9, _, _, _, _, _, 0, 0x74, _, 0x31, 0xc0, 0x0f, 5, ..]);
        let site = address.wrapping_add(at as u64);
        if (is_call || is_read)
            && let Some(original) = relative(bytes, at + 1, address)
                .and_then(|trampoline| original(site, is_read, trampoline, read))
        {
            found.push((site, original));
        }
    }
    found
}

/// The bytes that a site had before its jump to `trampoline`.
fn original(site: u64, is_read: bool, trampoline: u64, read: Read<'_>) -> Option<Vec<u8>> {
    let code = read(trampoline, (HEAD_LEN + TAIL_LEN) as usize)?;
    let (head, call) = if is_read { (HEAD_LEN, READ_LEN) } else { (0, JUMP_LEN as u64) };
    let (to, number, cell) = parse(&code[head as usize..], trampoline.wrapping_add(head))?;
    if to != site.wrapping_add(call) || read(cell, 8)? != INSIDE.to_le_bytes() {
        return None;
    }
    if !is_read {
        return Some([&[0xb8], &number.to_le_bytes()[..]].concat());
    }
    let single = relative(&code, 2, trampoline)?;
    let distance = (single.wrapping_sub(site).wrapping_sub(6) as i64 as i32).to_le_bytes();
    (code[..2] == [0x80, 0x3d]).then(|| [&[0x80, 0x3d], &distance[..3]].concat())
}

/// Offsets in `bytes` of the address of the code inside, as trampolines use it.
pub(crate) fn trampoline_cells(bytes: &[u8]) -> impl Iterator<Item = usize> + '_ {
    let cells = bytes.chunks_exact(CELL_LEN as usize).enumerate();
    let cells = cells.filter(|(_, cell)| *cell == INSIDE.to_le_bytes());
    cells.map(|(index, _)| index * CELL_LEN as usize)
}
