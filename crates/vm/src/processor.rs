//! A template as KVM takes it: the leaves of CPUID, and the extended state that goes with them.
//!
//! Promises: a leaf shows the template's features, the prerequisites to run at all (long mode,
//! paging), sizes and names; no other feature of the host. The vendor, family and model stay the
//! host's, for the meaning of some instructions depends on them. May break it: a feature bit
//! outside the leaves below; those leaves are not shown.

use afresh_sys::InheritedCell;
use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use std::collections::BTreeMap;

use crate::cpu::{CpuTemplate, Register};
use crate::error::KvmError;
use crate::system::ExtendedState;

/// DE, PSE, MSR, PAE, MCE, APIC, MTRR, PGE, MCA, PAT, PSE36 and the FPU: long mode requires them.
const SYSTEM_1_EDX: u32 = 0x0003_72ed;
/// The bit that marks a virtual machine.
const HYPERVISOR_1_ECX: u32 = 1 << 31;
/// AMD's copy of leaf 1; SYSCALL, NX and long mode.
const SYSTEM_EXTENDED_EDX: u32 = 0x0003_f3ff | 1 << 11 | 1 << 20 | 1 << 29;
/// The last leaf shown of each kind.
const LAST: u32 = 0xd;
const LAST_EXTENDED: u32 = 0x8000_0008;
const HYPERVISOR: u32 = 0x4000_0000;
/// How this hypervisor signs, in EBX, ECX and EDX.
const SIGNATURE: [u32; 3] =
    [u32::from_le_bytes(*b"afre"), u32::from_le_bytes(*b"sh m"), u32::from_le_bytes(*b"icro")];
/// Bytes of an area for x87 and SSE alone.
const LEGACY_AREA: u32 = 576;

/// The parts of every vCPU of a sandbox.
#[derive(Debug)]
pub(crate) struct Processor {
    pub(crate) template: CpuTemplate,
    pub(crate) cpuid: CpuId,
    pub(crate) extended: ExtendedState,
    /// The extended state that it may use.
    pub(crate) xcr0: u64,
    /// Model-specific registers of a vCPU that never ran, read at the first comparison.
    pub(crate) fresh_msrs: InheritedCell<BTreeMap<u32, u64>>,
}

fn value(entry: &kvm_cpuid_entry2, register: Register) -> u32 {
    match register {
        Register::Eax => entry.eax,
        Register::Ebx => entry.ebx,
        Register::Ecx => entry.ecx,
        Register::Edx => entry.edx,
    }
}

/// Everything that `supported` shows and a template can hold.
pub(crate) fn host_template(supported: &CpuId) -> CpuTemplate {
    CpuTemplate::from_cpuid("host", |leaf, index, register| {
        let mut entries = supported.as_slice().iter();
        let found = entries.find(|entry| entry.function == leaf && entry.index == index);
        found.map_or(0, |entry| value(entry, register))
    })
}

impl Processor {
    /// `template` on a host whose KVM offers `supported`.
    pub(crate) fn new(template: CpuTemplate, supported: &CpuId) -> Result<Self, KvmError> {
        let missing = template.missing_in(&host_template(supported));
        if !missing.is_empty() {
            return Err(KvmError::Processor {
                template: template.name().to_owned(),
                missing: missing.iter().map(|&name| name.to_owned()).collect(),
            });
        }
        let xcr0 = template.xcr0();
        let mut entries: Vec<_> = supported
            .as_slice()
            .iter()
            .filter_map(|entry| visible_entry(entry, &template, xcr0))
            .collect();
        let area = area(&entries);
        for entry in entries.iter_mut().filter(|entry| (entry.function, entry.index) == (0xd, 0)) {
            (entry.ebx, entry.ecx) = (area, area);
        }
        let [ebx, ecx, edx] = SIGNATURE;
        entries.push(kvm_cpuid_entry2 {
            function: HYPERVISOR,
            eax: HYPERVISOR,
            ebx,
            ecx,
            edx,
            ..Default::default()
        });
        let cpuid = CpuId::from_entries(&entries).map_err(|_| KvmError::Lacks("room for CPUID"))?;
        let xsave = template.has("xsave");
        let extended = if xsave { ExtendedState::Xsave } else { ExtendedState::Fxsave };
        Ok(Self { template, cpuid, extended, xcr0, fresh_msrs: InheritedCell::new() })
    }
}

/// The part of an entry that is shown, if any.
fn visible_entry(
    entry: &kvm_cpuid_entry2,
    template: &CpuTemplate,
    xcr0: u64,
) -> Option<kvm_cpuid_entry2> {
    let mut out = *entry;
    let (leaf, index) = (entry.function, entry.index);
    let bits = |register| template.bits(leaf, index, register);
    match (leaf, index) {
        (0, _) => out.eax = entry.eax.min(LAST),
        (1, _) => {
            // One processor, with the identification 0.
            out.ebx = entry.ebx & 0xff00 | 1 << 16;
            out.ecx = bits(Register::Ecx) | entry.ecx & HYPERVISOR_1_ECX;
            out.edx = bits(Register::Edx) | entry.edx & SYSTEM_1_EDX;
        }
        // Caches.
        (2 | 0x8000_0005 | 0x8000_0006, _) => {}
        (4, _) => out.eax = entry.eax & 0x3fff,
        (7, 0) => {
            out.eax = entry.eax.min(1);
            (out.ebx, out.ecx) = (bits(Register::Ebx), bits(Register::Ecx));
            out.edx = bits(Register::Edx);
        }
        (7, 1) => {
            (out.eax, out.ebx) = (bits(Register::Eax), 0);
            (out.ecx, out.edx) = (0, bits(Register::Edx));
        }
        // The sizes follow.
        (0xd, 0) => (out.eax, out.edx) = (xcr0 as u32, (xcr0 >> 32) as u32),
        (0xd, 1) => (out.eax, out.ecx, out.edx) = (bits(Register::Eax), 0, 0),
        (0xd, component) if component < 64 && xcr0 >> component & 1 == 1 => {}
        (0x8000_0000, _) => out.eax = entry.eax.min(LAST_EXTENDED),
        (0x8000_0001, _) => {
            out.ecx = bits(Register::Ecx);
            out.edx = bits(Register::Edx) | entry.edx & SYSTEM_EXTENDED_EDX;
        }
        (0x8000_0002..=0x8000_0004, _) => {
            let mut text = [b' '; 48];
            let name = format!("afresh {}", template.name());
            for (to, from) in text.iter_mut().zip(name.bytes()) {
                *to = from;
            }
            let word = |index: usize| {
                let at = (leaf - 0x8000_0002) as usize * 16 + index * 4;
                u32::from_le_bytes([text[at], text[at + 1], text[at + 2], text[at + 3]])
            };
            (out.eax, out.ebx, out.ecx, out.edx) = (word(0), word(1), word(2), word(3));
        }
        (0x8000_0007, _) => {
            (out.eax, out.ebx, out.ecx) = (0, 0, 0);
            out.edx = bits(Register::Edx);
        }
        (0x8000_0008, _) => {
            out.ebx = bits(Register::Ebx);
            (out.ecx, out.edx) = (0, 0);
        }
        _ => return None,
    }
    Some(out)
}

/// Bytes that XSAVE writes at most for the components that are shown.
fn area(entries: &[kvm_cpuid_entry2]) -> u32 {
    entries
        .iter()
        .filter(|entry| entry.function == 0xd && entry.index >= 2)
        .map(|entry| entry.ebx.saturating_add(entry.eax))
        .fold(LEGACY_AREA, u32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A processor that shows every bit of every leaf.
    fn everything() -> CpuId {
        let leaves = [
            (0, 0),
            (1, 0),
            (4, 1),
            (6, 0),
            (7, 0),
            (7, 1),
            (7, 2),
            (0xa, 0),
            (0xb, 0),
            (0xd, 0),
            (0xd, 1),
            (0xd, 2),
            (0xd, 5),
            (0xd, 9),
            (0xd, 18),
            (0x12, 0),
            (0x14, 0),
            (0x1d, 1),
            (0x4000_0001, 0),
            (0x8000_0000, 0),
            (0x8000_0001, 0),
            (0x8000_0002, 0),
            (0x8000_0003, 0),
            (0x8000_0007, 0),
            (0x8000_0008, 0),
            (0x8000_000a, 0),
        ];
        let entries: Vec<_> = leaves
            .into_iter()
            .map(|(function, index)| kvm_cpuid_entry2 {
                function,
                index,
                eax: if function == 0xd && index >= 2 { 64 } else { u32::MAX },
                ebx: if function == 0xd { 1000 * index } else { u32::MAX },
                ecx: u32::MAX,
                edx: u32::MAX,
                ..Default::default()
            })
            .collect();
        CpuId::from_entries(&entries).unwrap()
    }

    fn leaf(processor: &Processor, function: u32, index: u32) -> Option<kvm_cpuid_entry2> {
        let mut entries = processor.cpuid.as_slice().iter();
        entries.find(|e| (e.function, e.index) == (function, index)).copied()
    }

    #[test]
    fn only_what_the_template_holds_is_shown() {
        let supported = everything();
        let names: Vec<&str> = host_template(&supported).features().collect();
        assert_eq!(names, CpuTemplate::known_features().collect::<Vec<_>>());
        for template in [CpuTemplate::v2(), CpuTemplate::v3(), CpuTemplate::v4()] {
            let processor = Processor::new(template.clone(), &supported).unwrap();
            let shown = host_template(&processor.cpuid);
            assert_eq!(
                shown.features().collect::<Vec<_>>(),
                template.features().collect::<Vec<_>>()
            );
            for gone in [6, 0xa, 0xb, 0x12, 0x14, 0x1d, 0x4000_0001, 0x8000_000a] {
                assert!(leaf(&processor, gone, 0).is_none(), "{gone:#x}");
            }
            assert!(leaf(&processor, 7, 2).is_none());
            // Protection keys and FSGSBASE are in no template.
            assert_eq!(leaf(&processor, 7, 0).unwrap().ecx & 1 << 3, 0);
            assert_eq!(leaf(&processor, 7, 0).unwrap().ebx & 1, 0);
            assert_eq!(leaf(&processor, 0, 0).unwrap().eax, LAST);
            let name = leaf(&processor, 0x8000_0002, 0).unwrap();
            assert_eq!(name.eax.to_le_bytes(), *b"afre");
        }
    }

    #[test]
    fn extended_state_is_that_of_the_template() {
        let area = |template: CpuTemplate| {
            let processor = Processor::new(template, &everything()).unwrap();
            let entry = leaf(&processor, 0xd, 0).unwrap();
            assert_eq!((u64::from(entry.eax), entry.edx), (processor.xcr0, 0));
            assert!(leaf(&processor, 0xd, 9).is_none() && leaf(&processor, 0xd, 18).is_none());
            (leaf(&processor, 0xd, 2).is_some(), leaf(&processor, 0xd, 5).is_some(), entry.ecx)
        };
        assert_eq!(area(CpuTemplate::v2()), (false, false, 576));
        assert_eq!(area(CpuTemplate::v3()), (true, false, 2064));
        assert_eq!(area(CpuTemplate::v4()), (true, true, 5064));
    }

    #[test]
    fn missing_features_of_the_host_are_named() {
        let host = Processor::new(CpuTemplate::v3(), &everything()).unwrap().cpuid;
        let error = Processor::new(CpuTemplate::v4(), &host).unwrap_err().to_string();
        assert!(error.contains("x86-64-v4") && error.contains("avx512f"), "{error}");
        assert!(!error.contains("avx2"), "{error}");
    }
}
