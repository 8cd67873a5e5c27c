//! Probes guest instructions where KVM does not report their behaviour.
//!
//! On hardware every CPUID of a guest ends in KVM, and XSAVE works as the guest's CR4 and XCR0
//! allow. Where KVM is paravirtual, a guest is a program at level 3 on the host's processor: CPUID
//! may be answered by that, and XSAVE work although KVM offers none. Believing KVM there would
//! leave the upper halves of the vector registers from call to call. Such a host is recognised by a
//! processor that has XSAVE under a KVM that does not offer it. There a guest of a few instructions
//! is run, once a process, to find out.
//!
//! Promises: a guest sees exactly its template, or the template is refused. May break it: a
//! paravirtual KVM that offers XSAVE and does not serve it as hardware does.

use std::sync::Arc;

use afresh_memory::Strategy;
use afresh_sys::InheritedCell;

use crate::abi::{ABI_VERSION, CALL_READY, PORT};
use crate::config::Config;
use crate::cpu::{CpuTemplate, Register};
use crate::elf::Program;
use crate::error::{BuildError, CallError, GuestError, KvmError};
use crate::host::HostFunctions;
use crate::layout::{BASE, Layout, Sizes};
use crate::machine::supported_cpuid;
use crate::processor::{Processor, host_template};
use crate::sandbox::Sandbox;
use crate::strategy::{ResetMethod, Tracking};
use crate::system::{ExtendedState, System};
use crate::template::{ProgramFile, Template, first_image};

/// The behaviour of guests on this host.
#[derive(Debug)]
enum CpuBehaviour {
    /// What KVM says.
    AsKvmSays,
    /// Other values than KVM was given.
    Own { shown: CpuTemplate, xsave: bool },
}

fn probe_behaviour() -> Result<&'static CpuBehaviour, KvmError> {
    static FOUND: InheritedCell<CpuBehaviour> = InheritedCell::new();
    if let Some(found) = FOUND.get() {
        return Ok(found);
    }
    let offered = host_template(supported_cpuid()?);
    let found = if offered.has("xsave") || !std::arch::is_x86_feature_detected!("xsave") {
        CpuBehaviour::AsKvmSays
    } else {
        let mut error = None;
        let shown = CpuTemplate::from_cpuid("host", |leaf, index, register| {
            ask(&cpuid_code(leaf, index, register))
                .unwrap_or_else(|e| {
                    error = Some(e);
                    None
                })
                .unwrap_or(0) as u32
        });
        if let Some(error) = error {
            return Err(error);
        }
        CpuBehaviour::Own { shown, xsave: ask(&XGETBV)?.is_some() }
    };
    Ok(FOUND.get_or_make(|| found))
}

/// The processor of a guest that is built with `template`.
pub(crate) fn build_processor(template: Option<CpuTemplate>) -> Result<Processor, KvmError> {
    if let (Some(template), CpuBehaviour::Own { shown, .. }) = (&template, probe_behaviour()?)
        && template != shown
    {
        return Err(KvmError::OwnCpuid { template: template.name().to_owned() });
    }
    let template = template.map_or_else(CpuTemplate::host, Ok)?;
    processor(template)
}

/// The processor of a guest that was built with `template`. If it finds more features than that,
/// its frozen states will, too.
pub(crate) fn thaw_processor(template: CpuTemplate) -> Result<Processor, KvmError> {
    if matches!(probe_behaviour()?, CpuBehaviour::AsKvmSays) {
        return processor(template);
    }
    let missing = template.missing()?;
    if missing.is_empty() {
        return processor(CpuTemplate::host()?);
    }
    let missing = missing.into_iter().map(str::to_owned).collect();
    Err(KvmError::Processor { template: template.name().to_owned(), missing })
}

fn processor(template: CpuTemplate) -> Result<Processor, KvmError> {
    let supported = supported_cpuid()?;
    match probe_behaviour()? {
        CpuBehaviour::AsKvmSays => Processor::new(template, supported),
        CpuBehaviour::Own { xsave, .. } => {
            // KVM's CPUID values do not affect the guest here, but must be those that KVM offers.
            let offered = Processor::new(host_template(supported), supported)?;
            let extended = if *xsave { ExtendedState::Native } else { ExtendedState::Fxsave };
            Ok(Processor { template, extended, ..offered })
        }
    }
}

impl CpuTemplate {
    /// Every feature that a guest can have here, of those that templates know; the default of
    /// guests.
    ///
    /// # Errors
    /// [`KvmError`] where KVM cannot be used at all.
    pub fn host() -> Result<Self, KvmError> {
        Ok(match probe_behaviour()? {
            CpuBehaviour::AsKvmSays => host_template(supported_cpuid()?),
            CpuBehaviour::Own { shown, .. } => shown.clone(),
        })
    }

    /// The features that this host lacks.
    ///
    /// # Errors
    /// [`KvmError`] where KVM cannot be used at all.
    pub fn missing(&self) -> Result<Vec<&'static str>, KvmError> {
        Ok(self.missing_in(&Self::host()?))
    }
}

/// `xor ecx, ecx; xgetbv; mov edi, eax`: an invalid opcode without XSAVE.
const XGETBV: [u8; 7] = [0x31, 0xc9, 0x0f, 0x01, 0xd0, 0x89, 0xc7];

/// `mov eax, leaf; mov ecx, index; cpuid; mov edi, register`
fn cpuid_code(leaf: u32, index: u32, register: Register) -> Vec<u8> {
    let to_edi = match register {
        Register::Eax => 0xc7,
        Register::Ebx => 0xdf,
        Register::Ecx => 0xcf,
        Register::Edx => 0xd7,
    };
    let mut code = vec![0xb8];
    code.extend(leaf.to_le_bytes());
    code.push(0xb9);
    code.extend(index.to_le_bytes());
    code.extend([0x0f, 0xa2, 0x89, to_edi]);
    code
}

/// Runs instructions that leave a number in EDI as a guest; `None` where they fault.
fn ask(code: &[u8]) -> Result<Option<u64>, KvmError> {
    let failed = |error: BuildError| match error {
        BuildError::Kvm(error) => error,
        other => KvmError::Probe(Box::new(other)),
    };
    let elf = program(code);
    let mut sandbox = prepare(&elf).map_err(failed)?;
    match sandbox.initialise(sandbox.template.system.boot()) {
        Ok(()) => Ok(Some(sandbox.entry)),
        Err(BuildError::Init(CallError::Guest(GuestError::Crash(_)))) => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// A guest without the embedder's parts, for any processor that KVM offers.
fn prepare(elf: &[u8]) -> Result<Sandbox, BuildError> {
    let program = Program::parse(elf)?;
    let sizes = Sizes { memory: 256 << 10, stack: 4096, input: 4096, regions: Vec::new() };
    let layout = Layout::new(&program, &sizes)?;
    let supported = supported_cpuid()?;
    let processor = Processor::new(host_template(supported), supported)?;
    let system = System::build(&layout, &program, processor.extended);
    let image = first_image(&program, &layout, &system, &[])?;
    let entry = BASE + program.entry();
    let (file, functions) = (ProgramFile::new(elf), HostFunctions::default());
    let template = Template::new(&program, file, layout, system, processor, functions, Vec::new());
    let config = Config {
        reset: ResetMethod::new(Strategy::FullCopy, Tracking::Nothing),
        ..Config::default()
    };
    Sandbox::start(Arc::new(template), &image, config, entry)
}

/// A static executable of one page: `code`, then the hypercall that ends an initialisation.
fn program(code: &[u8]) -> Vec<u8> {
    const CODE: u64 = 64 + 56;
    // mov eax, CALL_READY; mov esi, ABI_VERSION; out PORT, eax
    let ready = [
        &[0xb8][..],
        &CALL_READY.to_le_bytes(),
        &[0xbe],
        &ABI_VERSION.to_le_bytes(),
        &[0xe7, PORT as u8],
    ]
    .concat();
    let len = CODE + (code.len() + ready.len()) as u64;
    let half = |value: u16| value.to_le_bytes().to_vec();
    let word = |value: u32| value.to_le_bytes().to_vec();
    let long = |value: u64| value.to_le_bytes().to_vec();
    [
        // 64-bit, little-endian, version 1; ET_DYN for x86_64.
        b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec(),
        [half(3), half(62), word(1)].concat(),
        // Entry, program headers, no section headers.
        [long(CODE), long(64), long(0), word(0)].concat(),
        [half(64), half(56), half(1), half(0), half(0), half(0)].concat(),
        // One loadable segment that may be read and executed.
        [word(1), word(5), long(0), long(0), long(0), long(len), long(len), long(4096)].concat(),
        code.to_vec(),
        ready,
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_a_few_instructions_is_a_guest_like_any_other() {
        for code in [&XGETBV[..], &cpuid_code(7, 1, Register::Edx)] {
            let elf = program(code);
            let parsed = Program::parse(&elf).unwrap();
            assert_eq!((parsed.entry(), parsed.span()), (120, 4096));
        }
    }
}
