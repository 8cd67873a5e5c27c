//! Programs whose segments share pages or overlap: the last segment of a page decides its content
//! and its protection, and every write to it is undone.

use crate::common;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use afresh_linux::{Instance, Program};
use afresh_snapshot::{Branch, Tree};
use afresh_sys::planted::{self, Bug};
use proptest::prelude::*;

const PAGE: u64 = 4096;
/// Address of the first segment.
const BASE: u64 = 0x40_0000;
/// Bytes of each program's file.
const FILE_LEN: u64 = 64 * PAGE;
/// Offsets in the file: of the program headers, of the path of the loader, and of the code.
const HEADERS: u64 = 64;
const NAME: u64 = 0x300;
const CODE: u64 = 0x500;
/// The lowest address of the stack, and its bytes.
const STACK: u64 = 0x6fff_ffff_0000 - STACK_LEN;
const STACK_LEN: u64 = 8 << 20;
const EXECUTE: u32 = 1;
const WRITE: u32 = 2;
const READ: u32 = 4;
const ALL: u32 = READ | WRITE | EXECUTE;

/// Reads `w`, a byte and an address, and writes the byte there; with another letter it writes
/// nothing. It answers with the byte at the address.
const PROBE: &[u8] = &[
    0x31, 0xc0, // xor eax, eax
    0x31, 0xff, // xor edi, edi
    0x48, 0x8d, 0x74, 0x24, 0x80, // lea rsi, [rsp - 128]
    0xba, 0x40, 0, 0, 0, // mov edx, 64
    0x0f, 0x05, // syscall: read
    0x48, 0x85, 0xc0, // test rax, rax
    0x7e, 0x25, // jle end
    0x48, 0x8b, 0x5e, 0x02, // mov rbx, [rsi + 2]
    0x80, 0x3e, b'w', // cmp byte [rsi], 'w'
    0x75, 0x05, // jne show
    0x8a, 0x46, 0x01, // mov al, [rsi + 1]
    0x88, 0x03, // mov [rbx], al
    0x8a, 0x03, // show: mov al, [rbx]
    0x88, 0x06, // mov [rsi], al
    0xb8, 1, 0, 0, 0, // mov eax, 1
    0xbf, 1, 0, 0, 0, // mov edi, 1
    0xba, 1, 0, 0, 0, // mov edx, 1
    0x0f, 0x05, // syscall: write
    0xeb, 0xc6, // jmp to the start
    0xb8, 60, 0, 0, 0, // end: mov eax, 60
    0x31, 0xff, // xor edi, edi
    0x0f, 0x05, // syscall: exit
];

/// A program header of type `PT_LOAD`.
#[derive(Clone, Copy, Debug)]
struct Segment {
    flags: u32,
    offset: u64,
    address: u64,
    file_len: u64,
    memory_len: u64,
}

impl Segment {
    /// A segment of the file at `BASE` with the same offset, all of it from the file.
    fn new(flags: u32, offset: u64, len: u64) -> Self {
        Self { flags, offset, address: BASE + offset, file_len: len, memory_len: len }
    }

    fn end(&self) -> u64 {
        self.address + self.memory_len
    }

    fn holds_page(&self, address: u64) -> bool {
        let page = address / PAGE;
        self.address / PAGE <= page && page < self.end().div_ceil(PAGE)
    }

    /// The byte at an address of one of its pages; `None` beyond the bytes that it defines.
    fn byte(&self, file: &[u8], address: u64) -> Option<u8> {
        let at = (self.offset + address).checked_sub(self.address)?;
        if at < self.offset + self.file_len {
            return Some(file[at as usize]);
        }
        (address < self.end()).then_some(0)
    }
}

/// A program at a fixed address.
#[derive(Clone, Debug)]
struct Elf {
    /// Its segments in the order of their mappings, each with the bytes of its file.
    parts: Vec<(Segment, Rc<[u8]>)>,
    file: Rc<[u8]>,
}

impl Elf {
    /// `loader` is the path of its interpreter, if it has one.
    fn new(segments: &[Segment], loader: Option<&Path>) -> Self {
        let seed = loader.map_or(0, |_| 99);
        let mut bytes: Vec<u8> =
            (0..FILE_LEN).map(|at| ((at / 7 + seed) % 251) as u8 | 1).collect();
        let mut put = |at: u64, field: &[u8]| {
            bytes[at as usize..][..field.len()].copy_from_slice(field);
        };
        put(0, &[0; CODE as usize]);
        put(0, &[0x7f, b'E', b'L', b'F', 2, 1, 1]);
        put(16, &[2, 0, 62, 0, 1, 0, 0, 0]);
        put(24, &[BASE + CODE, HEADERS].map(u64::to_le_bytes).concat());
        let count = segments.len() as u16 + u16::from(loader.is_some());
        put(52, &[64, 56, count].map(u16::to_le_bytes).concat());
        let mut header = HEADERS;
        let mut add = |kind: u32, segment: &Segment| {
            let Segment { flags, offset, address, file_len, memory_len } = *segment;
            put(header, &[kind, flags].map(u32::to_le_bytes).concat());
            let words = [offset, address, address, file_len, memory_len, PAGE];
            put(header + 8, &words.map(u64::to_le_bytes).concat());
            header += 56;
        };
        let name = loader.map(|path| [path.as_os_str().as_encoded_bytes(), b"\0"].concat());
        if let Some(name) = &name {
            add(3, &Segment::new(READ, NAME, name.len() as u64));
        }
        segments.iter().for_each(|segment| add(1, segment));
        put(NAME, &name.unwrap_or_default());
        put(CODE, PROBE);
        let file: Rc<[u8]> = bytes.into();
        Self { parts: segments.iter().map(|segment| (*segment, file.clone())).collect(), file }
    }

    /// The mapping at an address: the last one of its page.
    fn mapping_at(&self, address: u64) -> Option<&(Segment, Rc<[u8]>)> {
        self.parts.iter().rev().find(|(segment, _)| segment.holds_page(address))
    }
}

/// A shell that runs programs of a directory.
struct Shell {
    program: Program,
    folder: tempfile::TempDir,
}

impl Shell {
    /// `None` if this host cannot run it.
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let source = "while read line; do $line; done";
        let program = Program::new("/bin/sh").arg("-c").arg(source).grant(folder.path());
        common::here(program.warm())?;
        Some(Self { program, folder })
    }

    /// Writes a program, and returns its path.
    fn write(&self, name: &str, elf: &Elf) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, &elf.file).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Runs the program in a new session, as the first process or as its child. Its memory is what
    /// its mappings say, and writes to it are undone.
    fn check(&self, path: &Path, elf: &Elf, child: bool, addresses: &[u64]) {
        // It has the files that were there at its start.
        let warm = self.program.warm().unwrap();
        let (home, state) = (warm.home(), warm.state());
        let mut branch = Branch::<Instance>::from_state(&Tree::new(), home, state);
        let exec = if child { "" } else { "exec " };
        let line = format!("{exec}{}\n", path.display());
        assert_eq!(branch.guest_mut().unwrap().call(line.as_bytes()).unwrap(), b"");
        let state = branch.checkpoint().unwrap();
        for &address in addresses {
            let context = || {
                let segments: Vec<_> = elf.parts.iter().map(|part| part.0).collect();
                format!("{address:#x} of {segments:x?}")
            };
            let (segment, file) = elf.mapping_at(address).unwrap();
            let Some(byte) = segment.byte(file, address) else { continue };
            assert_eq!(probe(&mut branch, address, None), Some(byte), "{}", context());
            let written = (segment.flags & WRITE != 0).then_some(!byte);
            assert_eq!(probe(&mut branch, address, Some(!byte)), written, "{}", context());
            branch.rollback(state).unwrap();
            assert_eq!(probe(&mut branch, address, None), Some(byte), "{}", context());
            let verified = branch.guest_mut().unwrap().verify();
            verified.unwrap_or_else(|error| panic!("{error}: {}", context()));
        }
    }
}

/// The byte at an address of the running program, after `write` was written there; `None` if that
/// has ended it.
fn probe(branch: &mut Branch<Instance>, address: u64, write: Option<u8>) -> Option<u8> {
    let mut request = vec![if write.is_some() { b'w' } else { b'r' }, write.unwrap_or(0)];
    request.extend(address.to_le_bytes());
    branch.guest_mut().unwrap().call(&request).ok()?.first().copied()
}

/// Addresses in every page of two segments, and at the ends of each segment.
fn edges(segments: &[Segment]) -> Vec<u64> {
    let ends = |one: &Segment| [one.address, one.address / PAGE * PAGE, one.end() - 1];
    segments.iter().flat_map(ends).collect()
}

#[test]
fn a_page_of_two_segments_is_one_of_the_later_segment() {
    let Some(shell) = Shell::new() else { return };
    let half = PAGE + PAGE / 2;
    let cases = [
        // Not writable any more.
        [Segment::new(ALL, 0, half), Segment::new(READ, half, half)],
        // Writable, and executable no more.
        [Segment::new(READ | EXECUTE, 0, half), Segment::new(READ | WRITE, half, half)],
        [Segment::new(ALL, 0, half), Segment::new(READ | WRITE, half, half)],
        // Copied in, and then protected.
        [
            Segment { file_len: PAGE, ..Segment::new(READ | EXECUTE, 0, half) },
            Segment::new(READ | WRITE, half, half),
        ],
        // Of another part of the file.
        [
            Segment::new(ALL, 0, half),
            Segment { offset: 5 * PAGE + half, ..Segment::new(READ, half, half) },
        ],
    ];
    for (number, segments) in cases.iter().enumerate() {
        let elf = Elf::new(segments, None);
        let path = shell.write(&format!("program-{number}"), &elf);
        for child in [false, true] {
            shell.check(&path, &elf, child, &edges(segments));
        }
    }
}

#[test]
fn a_loader_and_the_stack_replace_segments_of_the_program() {
    let Some(shell) = Shell::new() else { return };
    let whole = Segment::new(ALL, 0, 40 * PAGE);
    let over = [Segment::new(READ | EXECUTE, 0, PAGE), Segment::new(READ, 4 * PAGE, 33 * PAGE)];
    let loader = Elf::new(&over, None);
    let mut elf = Elf::new(&[whole], Some(&shell.write("loader", &loader)));
    elf.parts.extend(loader.parts);
    let path = shell.write("loaded", &elf);
    for child in [false, true] {
        shell.check(&path, &elf, child, &edges(&[whole, over[0], over[1]]));
    }

    let under = Segment { address: STACK, ..Segment::new(READ, PAGE, 50 * PAGE) };
    let mut elf = Elf::new(&[Segment::new(READ | EXECUTE, 0, PAGE), under], None);
    let path = shell.write("stacked", &elf);
    let (file_len, memory_len) = (0, STACK_LEN);
    let stack = Segment { flags: READ | WRITE, file_len, memory_len, ..under };
    elf.parts.push((stack, elf.file.clone()));
    for child in [false, true] {
        shell.check(&path, &elf, child, &edges(&[under]));
    }
}

/// Segments after the first: bytes of a gap before it, flags, bytes of the file, bytes of zeros,
/// and pages between its place in the file and that in memory.
fn segments() -> impl Strategy<Value = Vec<Segment>> {
    let readable = prop_oneof![Just(READ), Just(READ | WRITE), Just(READ | EXECUTE), Just(ALL)];
    let zeros = prop_oneof![2 => Just(0), 1 => 1..2 * PAGE];
    let one = (0..PAGE, readable, 1..2 * PAGE, zeros, 0..4u64);
    let first = (any::<bool>(), PAGE..2 * PAGE, prop_oneof![Just(0), 1..PAGE]);
    (first, prop::collection::vec(one, 1..5)).prop_map(|((writes, len, zeros), rest)| {
        let flags = if writes { ALL } else { READ | EXECUTE };
        let mut all = vec![Segment { memory_len: len + zeros, ..Segment::new(flags, 0, len) }];
        for (gap, flags, file_len, zeros, ahead) in rest {
            let address = all.last().map_or(BASE, Segment::end) + gap;
            let (offset, memory_len) = (address - BASE + ahead * PAGE, file_len + zeros);
            all.push(Segment { flags, offset, address, file_len, memory_len });
        }
        all
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn segments_are_mapped_in_their_order(segments in segments(), child in any::<bool>()) {
        if let Some(shell) = Shell::new() {
            let elf = Elf::new(&segments, None);
            shell.check(&shell.write("program", &elf), &elf, child, &edges(&segments));
        }
    }
}

#[test]
fn planted_bugs_are_caught() {
    if Shell::new().is_some() {
        for test in [
            "a_page_of_two_segments_is_one_of_the_later_segment",
            "a_loader_and_the_stack_replace_segments_of_the_program",
            "segments_are_mapped_in_their_order",
        ] {
            let test = format!("program_segments::{test}");
            planted::must_be_caught(&[Bug::Overlap], &[&test]);
        }
    }
}
