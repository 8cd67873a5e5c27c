//! A guest program: a static position-independent ELF executable, checked field by field.
//!
//! Promises: a `Program` never reaches outside the file or outside its own span, its entry is in an
//! executable segment, no page is both writable and executable, and every relocation is one that
//! `image` can apply. May break it: nothing in the input; every malformed field is an error that
//! names it.

use object::Endianness;
use object::elf::{
    DT_JMPREL, DT_NEEDED, DT_NULL, DT_PLTREL, DT_PLTRELSZ, DT_REL, DT_RELA, DT_RELAENT, DT_RELASZ,
    DT_RELR, DT_RELRENT, DT_RELRSZ, DT_RELSZ, ELFCLASS64, ELFDATA2LSB, EM_X86_64, ET_DYN, ET_EXEC,
    FileHeader64, PF_W, PF_X, PT_DYNAMIC, PT_INTERP, PT_LOAD, PT_TLS, R_X86_64_NONE,
    R_X86_64_RELATIVE,
};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};

use crate::PAGE;

/// The most loadable segments a program may have.
const MAX_SEGMENTS: usize = 64;
/// The largest span of a program, in bytes: 1 GiB.
const MAX_SPAN: u64 = 1 << 30;
/// Size of one `Elf64_Rela`.
const RELA: u64 = 24;

/// Why a guest program is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ElfError {
    /// The file does not begin with an ELF header.
    #[error("not an ELF file: it is shorter than a header or its magic number is wrong")]
    NotElf,
    /// `e_ident[EI_CLASS]` is not `ELFCLASS64`.
    #[error("ELF class {0} is not 64-bit; build the guest for x86_64")]
    Class(u8),
    /// `e_ident[EI_DATA]` is not `ELFDATA2LSB`.
    #[error("ELF data encoding {0} is not little-endian")]
    Encoding(u8),
    /// `e_ident[EI_VERSION]` or `e_version` is not 1.
    #[error("ELF version is not 1")]
    Version,
    /// `e_machine` is not `EM_X86_64`.
    #[error("ELF machine {0} is not x86_64 (62)")]
    Machine(u16),
    /// `e_type` is `ET_EXEC`: linked to a fixed address.
    #[error("the executable is not position-independent; link it with -static-pie")]
    NotPie,
    /// `e_type` is neither `ET_DYN` nor `ET_EXEC`.
    #[error("ELF type {0} is not an executable; link it with -static-pie")]
    Type(u16),
    /// The program headers are outside the file or have the wrong entry size.
    #[error("the ELF program header table is outside the file or has a wrong entry size")]
    ProgramHeaders,
    /// `PT_INTERP` is present.
    #[error("the program needs a dynamic loader; link it with -static-pie")]
    Interpreter,
    /// `PT_TLS` with a size.
    #[error("thread-local storage (PT_TLS) is not supported; a guest has one thread")]
    ThreadLocal,
    /// It has no loadable segment.
    #[error("the program has no loadable segment")]
    NoSegment,
    /// There are more loadable segments than the limit.
    #[error("the program has {0} loadable segments; at most {MAX_SEGMENTS} are supported")]
    TooManySegments(usize),
    /// A segment's `p_offset`/`p_filesz` reach outside the file.
    #[error("segment {0}: its file range is outside the file")]
    SegmentFile(usize),
    /// `p_filesz` exceeds `p_memsz`.
    #[error("segment {0}: its file size is larger than its memory size")]
    SegmentSize(usize),
    /// `p_vaddr + p_memsz` overflows or exceeds the limit of the span.
    #[error("segment {0}: its addresses overflow or exceed {MAX_SPAN} bytes")]
    SegmentAddress(usize),
    /// `p_align` is not a power of two of at most 64 KiB.
    #[error("segment {0}: alignment {1:#x} is not a power of two of at most 64 KiB")]
    SegmentAlign(usize, u64),
    /// A segment overlaps an earlier one.
    #[error("segment {0}: it overlaps or precedes an earlier segment")]
    SegmentOverlap(usize),
    /// A page would be writable and executable.
    #[error("segment {0}: a page would be both writable and executable")]
    WritableCode(usize),
    /// `e_entry` is outside the executable segments.
    #[error("the entry point {0:#x} is not in an executable segment")]
    Entry(u64),
    /// The dynamic section cannot be read.
    #[error("the dynamic section is outside the file or is malformed")]
    Dynamic,
    /// `DT_NEEDED` is present.
    #[error("the program needs shared libraries; link it statically")]
    NeedsLibrary,
    /// A relocation table is outside the program or has a wrong entry size.
    #[error("the relocation table is outside the program or has a wrong entry size")]
    RelocationTable,
    /// A `DT_RELR` table names more places than the program has words.
    #[error("the relocation table names more places than the program has words")]
    TooManyRelocations,
    /// A relocation type other than `R_X86_64_RELATIVE`.
    #[error("relocation type {0} is not supported; link with -static-pie and no undefined symbols")]
    RelocationType(u32),
    /// A relocation writes outside the writable segments.
    #[error("a relocation writes at {0:#x}, outside the program")]
    RelocationTarget(u64),
}

/// One loadable segment; addresses are before the program is placed.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) writable: bool,
    pub(crate) executable: bool,
    file: std::ops::Range<usize>,
}

/// A checked guest program.
#[derive(Debug, Clone)]
pub struct Program<'a> {
    bytes: &'a [u8],
    segments: Vec<Segment>,
    /// The relocation tables, checked. They are read again when they are applied: an eighth of a
    /// byte of `DT_RELR` names a place.
    rela: [&'a [u8]; 2],
    relr: &'a [u8],
    entry: u64,
    span: u64,
}

/// A relative relocation: the word at `place` becomes the base plus the addend.
#[derive(Debug, Clone, Copy)]
struct Rela {
    place: u64,
    addend: u64,
}

/// The entries of a `DT_RELA` table, each with its type.
fn rela_entries(table: &[u8]) -> impl Iterator<Item = (u32, Rela)> + '_ {
    table.chunks_exact(RELA as usize).map(|entry| {
        (word(entry, 8) as u32, Rela { place: word(entry, 0), addend: word(entry, 16) })
    })
}

/// The places that a `DT_RELR` table names: an even word is a place, an odd word a bitmap of the 63
/// words that follow.
fn relr_places(table: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let mut next = 0u64;
    table.chunks_exact(8).flat_map(move |entry| {
        let entry = word(entry, 0);
        // The place itself, as the first word of a bitmap that has no other.
        let (from, map) = if entry & 1 == 0 { (entry, 1) } else { (next, entry >> 1) };
        next = from.wrapping_add(if entry & 1 == 0 { 8 } else { 63 * 8 });
        (0..63).filter(move |bit| map >> bit & 1 == 1).map(move |bit| from.wrapping_add(bit * 8))
    })
}

const LE: Endianness = Endianness::Little;

impl<'a> Program<'a> {
    /// Checks `bytes`.
    ///
    /// # Errors
    /// The first malformed or unsupported field.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ElfError> {
        let header = check_header(bytes)?;
        let headers = header.program_headers(LE, bytes).map_err(|_| ElfError::ProgramHeaders)?;
        let mut segments: Vec<Segment> = Vec::new();
        let mut dynamic = None;
        for (index, entry) in headers.iter().enumerate() {
            match entry.p_type(LE) {
                PT_INTERP => return Err(ElfError::Interpreter),
                PT_TLS if entry.p_memsz(LE) > 0 => return Err(ElfError::ThreadLocal),
                PT_DYNAMIC => dynamic = Some(entry),
                PT_LOAD if entry.p_memsz(LE) > 0 => {
                    let segment = check_segment(index, entry, bytes.len())?;
                    check_neighbours(index, &segments, &segment)?;
                    segments.push(segment);
                    if segments.len() > MAX_SEGMENTS {
                        return Err(ElfError::TooManySegments(segments.len()));
                    }
                }
                _ => {}
            }
        }
        let span = match segments.last() {
            Some(last) => (last.address + last.size).next_multiple_of(PAGE),
            None => return Err(ElfError::NoSegment),
        };
        let entry = header.e_entry(LE);
        let in_code =
            |s: &Segment| s.executable && entry >= s.address && entry - s.address < s.size;
        if !segments.iter().any(in_code) {
            return Err(ElfError::Entry(entry));
        }
        let mut program = Self { bytes, segments, rela: [&[]; 2], relr: &[], entry, span };
        if let Some(dynamic) = dynamic {
            let entries = dynamic
                .dynamic(LE, bytes)
                .map_err(|_| ElfError::Dynamic)?
                .ok_or(ElfError::Dynamic)?;
            program.read_relocations(entries)?;
        }
        Ok(program)
    }

    /// The entry point, in bytes from the start of the program.
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// Bytes of memory the program occupies, a multiple of the page size.
    pub fn span(&self) -> u64 {
        self.span
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Lays the program out for address `base` in a buffer of `span` bytes.
    pub(crate) fn image(&self, base: u64) -> Vec<u8> {
        let mut image = vec![0; self.span as usize];
        for segment in &self.segments {
            let start = segment.address as usize;
            let file = &self.bytes[segment.file.clone()];
            image[start..start + file.len()].copy_from_slice(file);
        }
        for (kind, Rela { place, addend }) in self.rela.into_iter().flat_map(rela_entries) {
            if kind == R_X86_64_RELATIVE {
                put_word(&mut image, place, base.wrapping_add(addend));
            }
        }
        for place in relr_places(self.relr) {
            let old = word(&image, place);
            put_word(&mut image, place, base.wrapping_add(old));
        }
        image
    }

    fn read_relocations(
        &mut self,
        entries: &[object::elf::Dyn64<Endianness>],
    ) -> Result<(), ElfError> {
        let (mut rela, mut rela_size, mut rela_entry) = (None, 0, RELA);
        let (mut relr, mut relr_size, mut relr_entry) = (None, 0, 8);
        // Those of calls.
        let (mut calls, mut calls_size, mut calls_kind) = (None, 0, DT_RELA as u64);
        for entry in entries {
            let value = entry.d_val(LE);
            match entry.d_tag(LE) {
                DT_NULL => break,
                DT_NEEDED => return Err(ElfError::NeedsLibrary),
                DT_REL | DT_RELSZ => return Err(ElfError::RelocationTable),
                DT_RELA => rela = Some(value),
                DT_RELASZ => rela_size = value,
                DT_RELAENT => rela_entry = value,
                DT_JMPREL => calls = Some(value),
                DT_PLTRELSZ => calls_size = value,
                DT_PLTREL => calls_kind = value,
                DT_RELR => relr = Some(value),
                DT_RELRSZ => relr_size = value,
                DT_RELRENT => relr_entry = value,
                _ => {}
            }
        }
        if rela_entry != RELA || relr_entry != 8 || calls_kind != DT_RELA as u64 {
            return Err(ElfError::RelocationTable);
        }
        for (index, (address, size)) in
            [(rela, rela_size), (calls, calls_size)].into_iter().enumerate()
        {
            let Some(address) = address else { continue };
            let table = self.file_bytes(address, size)?;
            if !(table.len() as u64).is_multiple_of(RELA) {
                return Err(ElfError::RelocationTable);
            }
            for (kind, Rela { place, .. }) in rela_entries(table) {
                match kind {
                    R_X86_64_NONE => {}
                    R_X86_64_RELATIVE => self.check_place(place)?,
                    other => return Err(ElfError::RelocationType(other)),
                }
            }
            self.rela[index] = table;
        }
        if let Some(address) = relr {
            let table = self.file_bytes(address, relr_size)?;
            if !table.len().is_multiple_of(8) {
                return Err(ElfError::RelocationTable);
            }
            let mut places = 0;
            for place in relr_places(table) {
                self.check_place(place)?;
                places += 1;
                if places > self.span / 8 {
                    return Err(ElfError::TooManyRelocations);
                }
            }
            self.relr = table;
        }
        Ok(())
    }

    fn check_place(&self, place: u64) -> Result<(), ElfError> {
        // Segments are in order, and a table names up to a place for each bit of the program.
        let after = self.segments.partition_point(|segment| segment.address <= place);
        let inside =
            |s: &Segment| place.checked_add(8).is_some_and(|end| end <= s.address + s.size);
        match after.checked_sub(1).map(|at| &self.segments[at]) {
            Some(segment) if inside(segment) => Ok(()),
            _ => Err(ElfError::RelocationTarget(place)),
        }
    }

    /// The file's bytes behind the addresses `address..address + size`.
    fn file_bytes(&self, address: u64, size: u64) -> Result<&'a [u8], ElfError> {
        self.segments
            .iter()
            .find_map(|segment| {
                let start = usize::try_from(address.checked_sub(segment.address)?).ok()?;
                let end = start.checked_add(usize::try_from(size).ok()?)?;
                self.bytes[segment.file.clone()].get(start..end)
            })
            .ok_or(ElfError::RelocationTable)
    }
}

fn check_header(bytes: &[u8]) -> Result<&FileHeader64<Endianness>, ElfError> {
    let ident = bytes.get(..16).ok_or(ElfError::NotElf)?;
    if ident[..4] != *b"\x7fELF" {
        return Err(ElfError::NotElf);
    }
    if ident[4] != ELFCLASS64 {
        return Err(ElfError::Class(ident[4]));
    }
    if ident[5] != ELFDATA2LSB {
        return Err(ElfError::Encoding(ident[5]));
    }
    let (header, _) = object::pod::from_bytes::<FileHeader64<Endianness>>(bytes)
        .map_err(|()| ElfError::NotElf)?;
    if ident[6] != 1 || header.e_version.get(LE) != 1 {
        return Err(ElfError::Version);
    }
    match header.e_machine(LE) {
        EM_X86_64 => {}
        other => return Err(ElfError::Machine(other)),
    }
    match header.e_type(LE) {
        ET_DYN => Ok(header),
        ET_EXEC => Err(ElfError::NotPie),
        other => Err(ElfError::Type(other)),
    }
}

fn check_segment(
    index: usize,
    entry: &object::elf::ProgramHeader64<Endianness>,
    file_len: usize,
) -> Result<Segment, ElfError> {
    let (offset, filesz) = (entry.p_offset(LE), entry.p_filesz(LE));
    let (address, size) = (entry.p_vaddr(LE), entry.p_memsz(LE));
    let end = offset
        .checked_add(filesz)
        .filter(|end| *end <= file_len as u64)
        .ok_or(ElfError::SegmentFile(index))?;
    if filesz > size {
        return Err(ElfError::SegmentSize(index));
    }
    if address.checked_add(size).is_none_or(|end| end > MAX_SPAN) {
        return Err(ElfError::SegmentAddress(index));
    }
    let align = entry.p_align(LE);
    if align > 1 && (!align.is_power_of_two() || align > 64 << 10) {
        return Err(ElfError::SegmentAlign(index, align));
    }
    let flags = entry.p_flags(LE);
    let (writable, executable) = (flags & PF_W != 0, flags & PF_X != 0);
    if writable && executable {
        return Err(ElfError::WritableCode(index));
    }
    Ok(Segment { address, size, writable, executable, file: offset as usize..end as usize })
}

/// Checks `segment` against those before it. Several of them may end in its first page, and a page
/// has the rights of all its segments.
fn check_neighbours(index: usize, before: &[Segment], segment: &Segment) -> Result<(), ElfError> {
    let end = |other: &Segment| other.address + other.size;
    if before.last().is_some_and(|last| segment.address < end(last)) {
        return Err(ElfError::SegmentOverlap(index));
    }
    let shares_page = |other: &&Segment| (end(other) - 1) / PAGE == segment.address / PAGE;
    let page = || before.iter().rev().take_while(shares_page).chain([segment]);
    if page().any(|s| s.writable) && page().any(|s| s.executable) {
        return Err(ElfError::WritableCode(index));
    }
    Ok(())
}

fn word(bytes: &[u8], at: u64) -> u64 {
    let at = at as usize;
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn put_word(bytes: &mut [u8], at: u64, value: u64) {
    let at = at as usize;
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}
