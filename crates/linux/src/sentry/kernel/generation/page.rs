//! The generation page: how a guest maps it, and how it is renewed.

use afresh_files::{Node, Tree};
use rustix::io::Errno;

use super::LEN;
use crate::platform::PlatformError;
use crate::sentry::Sentry;
use crate::sentry::fs::seals;
use crate::sentry::kernel::device::{Device, GenerationWatch};
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::time::now;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::result::SyscallResult;

/// The bytes that a mapping of the device shows.
fn page(generation: u64) -> Vec<u8> {
    let mut bytes = generation.to_le_bytes().to_vec();
    bytes.resize(PAGE as usize, 0);
    bytes
}

impl Kernel {
    /// The file that mappings of the device show, if there are any.
    fn generation_page(&self) -> Option<Node> {
        self.seals.generation_page().filter(|node| self.shares.contains(node))
    }

    /// Whether the program is notified of each new generation.
    pub(crate) fn watches_generation(&self) -> bool {
        let is_open = || {
            self.table.descriptions().any(|(_, description)| {
                matches!(description.open, FileObject::Device(Device::Generation(_), _))
            })
        };
        self.generation_page().is_some() || is_open()
    }

    /// The signals, and their receivers, of descriptors with an older generation.
    fn generation_signals(&self, generation: u64) -> Vec<(i32, SignalInfo)> {
        let parts = self.table.parts(self.processes.current_id());
        let mut signals = Vec::new();
        for (id, description) in &parts.descriptions {
            let FileObject::Device(Device::Generation(watch), _) = &description.open else {
                continue;
            };
            let asks = description.flags & libc::O_ASYNC as u32 != 0 && watch.owner != 0;
            if asks && watch.differs(generation) {
                let number = parts.descriptors.iter().find(|(_, _, open, _)| open == id);
                signals
                    .push((watch.owner, watch.info(number.map_or(0, |(_, number, ..)| *number))));
            }
        }
        signals
    }
}

/// Makes the file that mappings of the device show.
fn create_page(tree: &mut Tree, generation: u64) -> SyscallResult<Node> {
    let node = tree.create_unnamed(0o444, now())?;
    if let Err(refused) = tree.write(node, 0, &page(generation), now()) {
        tree.release(node);
        return Err(refused.into());
    }
    Ok(node)
}

impl Sentry {
    /// The device of this number, in its state for a new descriptor.
    pub(in crate::sentry) fn device_of(&self, number: u64) -> Option<Device> {
        Some(match Device::of(number)? {
            Device::Generation(watch) => {
                let seen = self.streams.generation.get();
                Device::Generation(GenerationWatch { seen, ..watch })
            }
            device => device,
        })
    }

    /// Notes that a descriptor was read.
    pub(in crate::sentry) fn see_generation(&mut self, descriptor: u64) -> SyscallResult<()> {
        let now = self.streams.generation.get();
        match self.state.table.get(descriptor)?.open {
            FileObject::Device(Device::Generation(watch), _) if watch.differs(now) => {
                self.watch_generation(descriptor, |watch| watch.seen = now)
            }
            _ => Ok(()),
        }
    }

    /// Changes the settings of a descriptor of the device.
    pub(in crate::sentry) fn watch_generation(
        &mut self,
        descriptor: u64,
        change: impl FnOnce(&mut GenerationWatch),
    ) -> SyscallResult<()> {
        match &mut self.change().table.get_mut(descriptor)?.open {
            FileObject::Device(Device::Generation(watch), _) => {
                change(watch);
                Ok(())
            }
            _ => Err(Errno::INVAL.into()),
        }
    }

    /// The file that a mapping of the device shows, which is kept. One page can be mapped, and only
    /// to be read.
    pub(in crate::sentry) fn map_generation(
        &mut self,
        offset: u64,
        len: u64,
        protection: u64,
    ) -> SyscallResult<Node> {
        if offset != 0 || len > PAGE {
            return Err(Errno::INVAL.into());
        }
        if protection & libc::PROT_WRITE as u64 != 0 {
            return Err(Errno::ACCESS.into());
        }
        if let Some(node) = self.state.generation_page() {
            return Ok(node);
        }
        let generation = self.streams.generation.get();
        let state = self.change();
        let node = create_page(&mut state.tree, generation)?;
        let kept = state.keep_shared(node);
        state.tree.release(node);
        kept?;
        state.seals.begin(node, seals::GENERATION_PAGE, &state.tree);
        // It changes with each reset.
        self.make_live(node, 0..PAGE, false)?;
        Ok(node)
    }

    /// Notifies a reset program, which has not run since, of its new generation.
    pub(crate) fn begin_generation(&mut self) -> Result<(), PlatformError> {
        let generation = self.streams.generation.get();
        if let Some(node) = self.state.generation_page() {
            let mut shown = [0; LEN as usize];
            let read = self.state.tree.read(node, 0, &mut shown);
            if read.is_err() || shown != generation.to_le_bytes() {
                // The file has its page already, so there is room.
                let _ = self.change().tree.write(node, 0, &generation.to_le_bytes(), now());
                self.shared.refresh(&self.state.tree, node)?;
            }
        }
        for (owner, info) in self.state.generation_signals(generation) {
            let processes = &self.state.processes;
            let targets = match owner {
                group @ ..0 => processes.group(group.unsigned_abs()),
                one => vec![one as u32],
            };
            for target in targets {
                if self.state.processes.lives(target) {
                    self.change().send_to(target, None, info.clone());
                }
            }
        }
        Ok(())
    }
}
