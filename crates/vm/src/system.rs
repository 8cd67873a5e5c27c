//! The system span: descriptor tables, entry code, the boot page and the page tables.
//!
//! Promises: a guest that starts from `start_state` runs at privilege level 3 in long mode and
//! never leaves it: it has no interrupt table and no system call, and may use only the hypercall's
//! port. Accessed, dirty and busy bits are preset, so the processor never writes here. May break
//! it: mapping any page of this span writable for the guest.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};

use crate::PAGE;
use crate::abi::{ABI_VERSION, BOOT_MAGIC, BootInfo, PORT};
use crate::elf::Program;
use crate::layout::{Layout, Span};

const PRESENT: u64 = 1;
const WRITE: u64 = 2;
const USER: u64 = 4;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
/// An entry for 2 MiB, in place of a table.
const HUGE: u64 = 1 << 7;
const HUGE_PAGE: u64 = 2 << 20;
const NO_EXECUTE: u64 = 1 << 63;

pub(crate) const CODE: u16 = 0x33;
const DATA: u16 = 0x2b;
const TASK: u16 = 0x40;
/// Pages of the span, behind descriptors and entry code: the pristine extended state, as large as
/// any processor's (11 KiB with AMX, which a paravirtual guest's `xrstor` reaches over), the boot
/// page, tables.
const PRISTINE: u64 = 2;
const BOOT: u64 = 5;
const TABLES: u64 = 6;
/// Offset of the task state segment in the descriptor page.
const TSS: usize = 0x80;
/// The task state segment of long mode, without its port bitmap.
const TSS_LEN: usize = 104;
/// The bitmap covers the ports up to the hypercall's four, and ends with a byte of ones.
const BITMAP_LEN: usize = PORT as usize / 8 + 2;

/// How a call enters the guest: the extended state is cleared by the guest's own first
/// instructions, in a page that it cannot write, because doing so from outside costs system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExtendedState {
    /// The processor has XSAVE: `xrstor64` puts every enabled component in its initial state.
    Xsave,
    /// The same, but the processor's own: a paravirtual KVM does not control it.
    Native,
    /// It has not: `fxrstor64` does.
    Fxsave,
}

/// The built span and its entry points.
#[derive(Debug, Clone)]
pub(crate) struct System {
    pub(crate) span: Span,
    pub(crate) bytes: Vec<u8>,
    tables: u64,
}

impl System {
    fn descriptors(&self) -> u64 {
        self.span.start
    }

    fn entry(&self) -> u64 {
        self.span.start + PAGE
    }

    /// The boot page.
    pub(crate) fn boot(&self) -> u64 {
        self.span.start + BOOT * PAGE
    }

    /// Address of the entry code's `out`, which stops the vCPU with pristine extended state.
    pub(crate) fn probe(&self) -> u64 {
        self.entry() + PROBE
    }

    /// Maximum length of the span of a layout. Page tables of all levels follow the guest's
    /// addresses, whether or not its pages hold anything.
    pub(crate) fn max_len(layout: &Layout) -> u64 {
        let end = layout.system;
        let tables = (end >> 21) + (end >> 30) + (end >> 39) + 5;
        (TABLES + tables).saturating_mul(PAGE)
    }

    pub(crate) fn build(layout: &Layout, program: &Program<'_>, extended: ExtendedState) -> Self {
        let start = layout.system;
        let mut tables = Tables::new(start + TABLES * PAGE);
        for (span, writable, executable) in layout.mapped(program) {
            let write = if writable { WRITE } else { 0 };
            let execute = if executable { 0 } else { NO_EXECUTE };
            tables.map(span, PRESENT | USER | write | execute);
        }
        let page = |index: u64| Span { start: start + index * PAGE, len: PAGE };
        tables.map(page(0), PRESENT | WRITE | NO_EXECUTE);
        tables.map(page(1), PRESENT | USER);
        for index in PRISTINE..TABLES {
            tables.map(page(index), PRESENT | USER | NO_EXECUTE);
        }

        let mut bytes = vec![0; (TABLES * PAGE) as usize];
        descriptor_page(start, &mut bytes[..PAGE as usize]);
        entry_page(extended, &mut bytes[PAGE as usize..2 * PAGE as usize]);
        pristine_extended_state(&mut bytes[(PRISTINE * PAGE) as usize..]);
        boot_page(layout, &mut bytes[(BOOT * PAGE) as usize..]);
        let root = tables.address;
        bytes.reserve_exact(tables.pages.len() * PAGE as usize);
        bytes.extend(tables.bytes());
        debug_assert!(bytes.len() as u64 <= Self::max_len(layout));
        Self { span: Span { start, len: bytes.len() as u64 }, bytes, tables: root }
    }

    /// General registers at the start of a call to `target`.
    pub(crate) fn regs(&self, layout: &Layout, target: u64, arguments: [u64; 3]) -> kvm_regs {
        kvm_regs {
            rip: self.entry(),
            rflags: 2,
            // As after a call instruction: 16-byte aligned, less the return address.
            rsp: layout.stack.end() - 8,
            rax: u64::from(u32::MAX),
            rdx: u64::from(u32::MAX),
            rcx: target,
            rdi: arguments[0],
            rsi: arguments[1],
            r8: arguments[2],
            r9: u64::from(DATA),
            ..Default::default()
        }
    }

    /// Special registers at the start of a call, based on those of a new vCPU.
    pub(crate) fn sregs(&self, created: &kvm_sregs, extended: ExtendedState) -> kvm_sregs {
        let data = segment(DATA, 3, false);
        let mut sregs = *created;
        sregs.cs = segment(CODE, 0xb, true);
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        sregs.tr = kvm_segment {
            base: self.descriptors() + TSS as u64,
            limit: (TSS_LEN + BITMAP_LEN - 1) as u32,
            selector: TASK,
            type_: 0xb,
            present: 1,
            ..Default::default()
        };
        sregs.ldt = kvm_segment { unusable: 1, ..Default::default() };
        sregs.gdt.base = self.descriptors();
        sregs.gdt.limit = TASK + 15;
        sregs.idt.base = 0;
        sregs.idt.limit = 0;
        sregs.cr2 = 0;
        sregs.cr3 = self.tables;
        // PE, MP, ET, NE, WP, PG.
        sregs.cr0 = 0x8001_0033;
        // PAE, OSFXSR, OSXMMEXCPT and, with XSAVE, OSXSAVE.
        sregs.cr4 = 0x620;
        if extended == ExtendedState::Xsave {
            sregs.cr4 |= 1 << 18;
        }
        // LME, LMA, NXE; no system calls.
        sregs.efer = 0xd00;
        sregs
    }
}

fn segment(selector: u16, kind: u8, code: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_: kind,
        present: 1,
        dpl: 3,
        db: u8::from(!code),
        s: 1,
        l: u8::from(code),
        g: 1,
        ..Default::default()
    }
}

fn descriptor_page(address: u64, page: &mut [u8]) {
    // Flat 64-bit code and data for level 3, both already accessed.
    write_word(page, usize::from(DATA & !7), 0x00cf_f300_0000_ffff);
    write_word(page, usize::from(CODE & !7), 0x00af_fb00_0000_ffff);
    let base = address + TSS as u64;
    let limit = (TSS_LEN + BITMAP_LEN - 1) as u64;
    // A busy 64-bit task state segment of level 0.
    let low = limit | (base & 0xff_ffff) << 16 | 0x8b << 40 | (base >> 24 & 0xff) << 56;
    write_word(page, usize::from(TASK), low);
    write_word(page, usize::from(TASK) + 8, base >> 32);
    let tss = &mut page[TSS..TSS + TSS_LEN + BITMAP_LEN];
    tss[102..104].copy_from_slice(&(TSS_LEN as u16).to_le_bytes());
    let bitmap = &mut tss[TSS_LEN..];
    bitmap.fill(0xff);
    // A four-byte access needs four clear bits.
    bitmap[usize::from(PORT) / 8] &= !(0xf << (PORT % 8));
}

/// `mov` from R9D to DS, ES, FS and GS: where KVM is paravirtual, these hold the last values loaded
/// here, not the host's.
const LOAD_SEGMENTS: [u8; 12] =
    [0x41, 0x8e, 0xd9, 0x41, 0x8e, 0xc1, 0x41, 0x8e, 0xe1, 0x41, 0x8e, 0xe9];
const PROBE: u64 = 0x40;
// The four ports of a hypercall share a byte of the bitmap, and `out` can name the first.
const _: () = assert!(PORT % 8 + 4 <= 8 && PORT <= 0xff);

fn entry_page(extended: ExtendedState, page: &mut [u8]) {
    // [fx|x]rstor64 [rip + disp32], the operand being the next page.
    let opcode: [u8; 4] = match extended {
        ExtendedState::Xsave | ExtendedState::Native => [0x48, 0x0f, 0xae, 0x2d],
        ExtendedState::Fxsave => [0x48, 0x0f, 0xae, 0x0d],
    };
    page.fill(0xcc);
    // The distance is counted from the instruction's end.
    let distance = (PAGE as usize - LOAD_SEGMENTS.len() - 8) as u32;
    let code = [
        &LOAD_SEGMENTS[..],
        &opcode,
        &distance.to_le_bytes(),
        // xor eax, eax; xor edx, edx; xor r9d, r9d; jmp rcx
        &[0x31, 0xc0, 0x31, 0xd2, 0x45, 0x31, 0xc9, 0xff, 0xe1],
    ]
    .concat();
    page[..code.len()].copy_from_slice(&code);
    // out PORT, eax
    page[PROBE as usize..PROBE as usize + 2].copy_from_slice(&[0xe7, PORT as u8]);
}

/// A legacy area with the initial control words and an empty header: everything else is initial.
fn pristine_extended_state(page: &mut [u8]) {
    page[..2].copy_from_slice(&0x37f_u16.to_le_bytes());
    page[24..28].copy_from_slice(&0x1f80_u32.to_le_bytes());
}

fn boot_page(layout: &Layout, page: &mut [u8]) {
    let info = BootInfo {
        magic: BOOT_MAGIC,
        version: ABI_VERSION,
        region_count: layout.regions.len() as u32,
        heap: layout.heap.start,
        heap_len: layout.heap.len,
        input: layout.input.start,
        input_capacity: layout.input.len,
        stack: layout.stack.start,
        stack_len: layout.stack.len,
        regions: layout.boot_regions(),
    };
    for (index, word) in info.words().enumerate() {
        write_word(page, index * 8, word);
    }
}

fn write_word(page: &mut [u8], at: usize, value: u64) {
    page[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Four-level page tables that grow from `address`. Whole 2 MiB of a span are one entry, so that
/// the tables of a memory that is claimed and never used stay small.
struct Tables {
    address: u64,
    pages: Vec<[u64; 512]>,
}

impl Tables {
    fn new(address: u64) -> Self {
        Self { address, pages: vec![[0; 512]] }
    }

    fn map(&mut self, span: Span, flags: u64) {
        let mut address = span.start;
        while address < span.end() {
            if self.map_huge_page(address, span.end(), flags) {
                address += HUGE_PAGE;
                continue;
            }
            let table = self.leaf(address);
            let first = (address >> 12 & 511) as usize;
            let count = ((span.end() - address) / PAGE).min(512 - first as u64);
            for (index, entry) in
                self.pages[table][first..first + count as usize].iter_mut().enumerate()
            {
                // Segments may share a page; its rights are the union.
                let old = *entry;
                let rights = if old == 0 {
                    flags
                } else {
                    (old | flags) & !NO_EXECUTE | old & flags & NO_EXECUTE
                };
                *entry = (address + index as u64 * PAGE) | rights | ACCESSED | DIRTY;
            }
            address += count * PAGE;
        }
    }

    /// Maps 2 MiB from `address` on, if they end by `end` and nothing is mapped there. Returns
    /// whether it did.
    fn map_huge_page(&mut self, address: u64, end: u64, flags: u64) -> bool {
        if !address.is_multiple_of(HUGE_PAGE) || end - address < HUGE_PAGE {
            return false;
        }
        let table = self.table(address, &[39, 30]);
        let entry = &mut self.pages[table][(address >> 21 & 511) as usize];
        let free = *entry == 0;
        if free {
            *entry = address | flags | HUGE | ACCESSED | DIRTY;
        }
        free
    }

    /// The last-level table of `address`, made if need be.
    fn leaf(&mut self, address: u64) -> usize {
        self.table(address, &[39, 30, 21])
    }

    /// The table of `address` below these levels, made if need be.
    fn table(&mut self, address: u64, levels: &[u32]) -> usize {
        let mut table = 0;
        for shift in levels {
            let index = (address >> shift & 511) as usize;
            let entry = self.pages[table][index];
            table = if entry == 0 || entry & HUGE != 0 {
                let new = self.pages.len();
                // A huge page becomes its pages.
                let page = |page: usize| (entry & !HUGE) + page as u64 * PAGE;
                let pages = std::array::from_fn(|at| if entry == 0 { 0 } else { page(at) });
                self.pages.push(pages);
                self.pages[table][index] =
                    (self.address + new as u64 * PAGE) | PRESENT | WRITE | USER | ACCESSED;
                new
            } else {
                (((entry & !0xfff) - self.address) / PAGE) as usize
            };
        }
        table
    }

    fn bytes(&self) -> impl Iterator<Item = u8> {
        self.pages.iter().flatten().flat_map(|entry| entry.to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The rights of each mapped page, as the processor finds them.
    fn walk(tables: &Tables) -> BTreeMap<u64, u64> {
        let mut found = BTreeMap::new();
        let mut left = vec![(0, 0, 39)];
        while let Some((table, base, shift)) = left.pop() {
            for (index, entry) in tables.pages[table].iter().enumerate() {
                let address = base + ((index as u64) << shift);
                let target = entry & 0x000f_ffff_ffff_f000;
                let rights = entry & (PRESENT | WRITE | USER | NO_EXECUTE);
                match (*entry, shift) {
                    (0, _) => {}
                    (_, 12) => {
                        assert!(found.insert(address, rights).is_none() && target == address)
                    }
                    (entry, 21) if entry & HUGE != 0 => {
                        assert_eq!(target, address);
                        for at in (address..address + HUGE_PAGE).step_by(PAGE as usize) {
                            assert!(found.insert(at, rights).is_none());
                        }
                    }
                    _ => {
                        left.push((((target - tables.address) / PAGE) as usize, address, shift - 9))
                    }
                }
            }
        }
        found
    }

    #[test]
    fn every_page_has_its_rights_wherever_spans_begin_and_end() {
        const ALL: [u64; 3] = [PRESENT | USER, PRESENT | USER | WRITE, PRESENT | NO_EXECUTE];
        let mut tables = Tables::new(1 << 40);
        let mut model = BTreeMap::new();
        // Neighbours share a page, within 2 MiB and at their edges.
        for (number, (start, pages)) in [
            (0x40, 3),
            (0x42, 0x300),
            (0x341, 0xc0),
            (0x400, 0x400),
            (0x7ff, 2),
            (0xa00, 0x200),
            (0xa10, 1),
            (0x3_fff0, 0x1000),
        ]
        .into_iter()
        .enumerate()
        {
            let flags = ALL[number % ALL.len()];
            tables.map(Span { start: start * PAGE, len: pages * PAGE }, flags);
            for page in start..start + pages {
                let rights = model.entry(page * PAGE).or_insert(flags);
                *rights = (*rights | flags) & !NO_EXECUTE | *rights & flags & NO_EXECUTE;
            }
        }
        assert_eq!(walk(&tables), model);
    }

    #[test]
    fn tables_of_whole_2_mib_are_few() {
        let mut tables = Tables::new(1 << 40);
        tables.map(Span { start: 0x41000, len: 15 << 30 }, PRESENT | USER);
        assert!(tables.pages.len() <= 20, "{}", tables.pages.len());
    }
}
