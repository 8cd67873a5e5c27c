//! Making a sandbox: from a program to a warm image.
//!
//! Promises: every refusal names the necessary change. May break it: a program whose initialisation
//! never ends; it is stopped by the time limit like any call.

use std::sync::Arc;
use std::time::Duration;

use afresh_memory::ZeroPageSource;

use crate::PAGE;
use crate::config::Config;
use crate::cpu::CpuTemplate;
use crate::elf::Program;
use crate::error::BuildError;
use crate::host::{HostFunction, HostFunctions};
use crate::layout::{BASE, Layout, RegionKind, Sizes};
use crate::probe::build_processor;
use crate::sandbox::Sandbox;
use crate::shared::SharedMemory;
use crate::strategy::ResetMethod;
use crate::system::System;
use crate::template::{Content, ProgramFile, Template, first_image};

/// Sizes, regions, host functions and limits of a sandbox.
pub struct SandboxBuilder {
    memory: u64,
    stack: u64,
    input: u64,
    pub(crate) regions: Vec<(u64, RegionKind, Content)>,
    pub(crate) functions: HostFunctions,
    cpu: Option<CpuTemplate>,
    pub(crate) config: Config,
}

impl Default for SandboxBuilder {
    fn default() -> Self {
        Self {
            memory: 16 << 20,
            stack: 64 << 10,
            input: 64 << 10,
            regions: Vec::new(),
            functions: HostFunctions::default(),
            cpu: None,
            config: Config::default(),
        }
    }
}

impl Sandbox {
    /// Starts describing a sandbox.
    pub fn builder() -> SandboxBuilder {
        SandboxBuilder::default()
    }
}

impl SandboxBuilder {
    /// Size of the main memory in bytes: program, stack, input buffer and heap. 16 MiB if not set;
    /// 256 KiB to 4 GiB, a multiple of 4096.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Size of the stack in bytes; 64 KiB if not set.
    #[must_use]
    pub fn stack(mut self, bytes: u64) -> Self {
        self.stack = bytes;
        self
    }

    /// Capacity of the input buffer in bytes; 64 KiB if not set.
    #[must_use]
    pub fn input(mut self, bytes: u64) -> Self {
        self.input = bytes;
        self
    }

    /// Adds a region of zeros that the guest reads and writes; `bytes` is a multiple of 4096.
    #[must_use]
    pub fn read_write(mut self, bytes: u64) -> Self {
        self.regions.push((bytes, RegionKind::ReadWrite, Content::Zeros));
        self
    }

    /// Adds a region that the guest can only read, holding `content`, padded to whole pages.
    #[must_use]
    pub fn read_only(mut self, mut content: Vec<u8>) -> Self {
        let len = content.len().max(1).next_multiple_of(PAGE as usize);
        content.resize(len, 0);
        self.regions.push((len as u64, RegionKind::ReadOnly, Content::Bytes(content)));
        self
    }

    /// Adds memory shared with the host; it is not part of the image and is never reset.
    #[must_use]
    pub fn shared(mut self, memory: Arc<SharedMemory>) -> Self {
        self.regions.push((memory.len() as u64, RegionKind::Shared, Content::Shared(memory)));
        self
    }

    /// Adds inaccessible addresses; `bytes` is a multiple of 4096.
    #[must_use]
    pub fn gap(mut self, bytes: u64) -> Self {
        self.regions.push((bytes, RegionKind::Gap, Content::Zeros));
        self
    }

    /// Registers a host function under a name, replacing an earlier one.
    #[must_use]
    pub fn host_function<A: 'static>(mut self, name: &str, function: impl HostFunction<A>) -> Self {
        self.functions.add(name, function);
        self
    }

    /// The processor that the guest sees; [`CpuTemplate::host`] if not set. A guest may remember
    /// detected features, so its snapshots thaw only on hosts that have every feature of the
    /// template. A thawed one keeps the template it was built with, regardless of this setting.
    #[must_use]
    pub fn cpu(mut self, template: CpuTemplate) -> Self {
        self.cpu = Some(template);
        self
    }

    /// The longest a call, or the initialisation, may run. No limit if not set.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.config.timeout = Some(timeout);
        self
    }

    /// The longest output that a call may return, in bytes; 64 MiB if not set.
    #[must_use]
    pub fn output(mut self, bytes: u64) -> Self {
        self.config.limits.output = bytes;
        self
    }

    /// The longest list of arguments that the guest may pass to a host function, in bytes; 16 MiB
    /// if not set.
    #[must_use]
    pub fn arguments(mut self, bytes: u64) -> Self {
        self.config.limits.arguments = bytes;
        self
    }

    /// Maximum randomness of a call, or of the initialisation, in bytes; 1 MiB if not set. A guest
    /// that needs more expands it with its own generator.
    #[must_use]
    pub fn random(mut self, bytes: u64) -> Self {
        self.config.limits.random = bytes;
        self
    }

    /// Receives the guest's log messages with their levels, 1 (error) to 5 (trace).
    #[must_use]
    pub fn log(mut self, log: impl Fn(u8, &str) + Send + Sync + 'static) -> Self {
        self.config.log = Some(Arc::new(log));
        self
    }

    /// How the sandbox is reset; the best method that this host has if not set.
    #[must_use]
    pub fn reset_method(mut self, method: ResetMethod) -> Self {
        self.config.reset = method;
        self
    }

    /// Takes up to `bytes` of the memory that is zero in the image from `source` (an
    /// `Arc<afresh_frames::ZeroPool>`, say) when a sandbox is made, this one or a fork of it. The
    /// memory comes as resident blocks of 2 MiB, so the guest's first writes need no host fault.
    /// Memory that the first call does not use is released at the first reset. None if not set.
    #[must_use]
    pub fn zero_memory(mut self, source: Arc<dyn ZeroPageSource>, bytes: u64) -> Self {
        let pages = usize::try_from(bytes / PAGE).unwrap_or(usize::MAX);
        self.config.zero_source = Some((source, pages));
        self
    }

    /// Loads `elf`, runs its initialisation, and takes the memory it then has as the image.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build(self, elf: &[u8]) -> Result<Sandbox, BuildError> {
        let program = Program::parse(elf)?;
        let sizes = Sizes {
            memory: self.memory,
            stack: self.stack,
            input: self.input,
            regions: self.regions.iter().map(|(len, kind, _)| (*len, *kind)).collect(),
        };
        let layout = Layout::new(&program, &sizes)?;
        let contents: Vec<Content> = self.regions.into_iter().map(|(_, _, it)| it).collect();
        let processor = build_processor(self.cpu)?;
        let system = System::build(&layout, &program, processor.extended);
        let image = first_image(&program, &layout, &system, &contents)?;
        let entry = BASE + program.entry();
        let file = ProgramFile::new(elf);
        let functions = self.functions;
        let template =
            Template::new(&program, file, layout, system, processor, functions, contents);
        let boot = template.system.boot();
        let method = self.config.reset;
        // Without tracking, finding the writes of the initialisation would mean to read everything.
        let tracked = Config { reset: ResetMethod::default(), ..self.config };
        let mut sandbox = Sandbox::start(Arc::new(template), &image, tracked, entry)?;
        sandbox.initialise(boot)?;
        if method == ResetMethod::default() {
            return Ok(sandbox);
        }
        sandbox.pristine().with_reset(method).fork()
    }
}
