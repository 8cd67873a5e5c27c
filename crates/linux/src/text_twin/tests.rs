use super::*;
use crate::platform::{INSIDE, originals, parse, relative, trampoline_cells};

/// A file of the host, as a tree reads it: zeros behind its end.
fn reader(path: &str) -> Option<impl Fn(u64, usize) -> Option<Vec<u8>>> {
    let bytes = std::fs::read(path).ok()?;
    Some(move |offset: u64, len: usize| {
        let start = (offset as usize).min(bytes.len());
        let mut found = bytes[start..(start + len).min(bytes.len())].to_vec();
        found.resize(len, 0);
        Some(found)
    })
}

const LIBRARY: &str = "/lib/x86_64-linux-gnu/libc.so.6";

#[test]
fn the_c_library_gets_sites_that_lead_back_to_their_calls() {
    let Some(read) = reader(LIBRARY) else { return println!("SKIPPED: no {LIBRARY}") };
    let twin = TextTwin::new(&read).unwrap();
    let (trampolines, sites) = twin.edits.split_last().unwrap();
    assert!(sites.len() >= 12, "{}", sites.len());
    let mut numbers = Vec::new();
    for (start, jump) in sites {
        let mut at = relative(jump, 1, *start).unwrap();
        let code = |at: u64| &trampolines.1[(at - trampolines.0) as usize..];
        if code(at)[0] == 0x80 {
            at += HEAD_LEN;
        }
        let (call, number, cell) = parse(code(at), at).unwrap();
        assert_eq!(code(cell)[..8], INSIDE.to_le_bytes());
        assert_eq!(read(call, 2).unwrap(), SYSCALL);
        numbers.push(number);
    }
    for number in [libc::SYS_getpid, libc::SYS_lseek, libc::SYS_ioctl, libc::SYS_newfstatat] {
        assert!(numbers.contains(&(number as u32)), "{number}: {numbers:?}");
    }
}

#[test]
fn a_twin_is_undone_by_its_own_bytes() {
    let Some(read) = reader(LIBRARY) else { return println!("SKIPPED: no {LIBRARY}") };
    let twin = TextTwin::new(&read).unwrap();
    let len = (twin.range.end - twin.range.start) as usize;
    let original = read(twin.range.start, len).unwrap();
    let mut text = original.clone();
    twin.apply(twin.range.start, &mut text);
    // In two parts, as a file is read.
    let (mut first, mut second) = (original[..len / 2].to_vec(), original[len / 2..].to_vec());
    twin.apply(twin.range.start, &mut first);
    twin.apply(twin.range.start + (len / 2) as u64, &mut second);
    assert!([first, second].concat() == text && text != original);
    assert!(trampoline_cells(&text).next().is_some());
    let memory = text.clone();
    let read = |at: u64, len: usize| {
        let start = usize::try_from(at.checked_sub(twin.range.start)?).ok()?;
        memory.get(start..start + len).map(<[u8]>::to_vec)
    };
    let sites = originals(&text, twin.range.start, &read);
    assert_eq!(sites.len() + 1, twin.edits.len());
    for (at, bytes) in sites {
        let at = (at - twin.range.start) as usize;
        text[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    let end = (twin.edits.last().unwrap().0 - twin.range.start) as usize;
    assert!(text[..end] == original[..end]);
}
